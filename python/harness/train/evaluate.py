"""Measures: bits per byte on the held-out texts, and how many tokens a round of drafting brings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from harness.train.corpus import load_tokens
from harness.train.data import manifest
from harness.train.drafter_model import Drafter
from harness.train.export import load_target
from harness.train.loop import autocast
from harness.train.rollout import rollout
from harness.train.shapes import DraftShape
from harness.train.sources import KINDS, Kind
from harness.train.target_model import Target

__all__ = ["accepted_lengths", "bits_per_byte", "draft_report", "heldout_prompts", "target_report", "walk"]

_ROWS = 32768  # tokens of a forward


def bits_per_byte(model: Target, corpus: Path, kind: Kind, device: str, most: int | None = None) -> float:
    """Of the held-out documents of a kind, in float32: bits for all tokens, the ends of documents included, over the
    bytes of the text. Windows of the model's whole context overlap by half; every token but the first is scored
    once. `most` tokens at most."""
    counts = manifest(corpus)["counts"][f"heldout.{kind}"]
    stream = torch.from_numpy(load_tokens(corpus, "heldout", kind).astype("int64"))[:most]
    window = min(model.shape.context, len(stream) - 1)
    stride = max(window // 2, 1)
    starts = list(range(0, max(len(stream) - 1 - window, 0) + stride, stride))
    starts = sorted({min(s, len(stream) - 1 - window) for s in starts})
    nats, scored = 0.0, 0
    batch = max(_ROWS // window, 1)
    with torch.no_grad():
        for at in range(0, len(starts), batch):
            rows = torch.stack([stream[s : s + window + 1] for s in starts[at : at + batch]]).to(device)
            logits = model.head(model.hidden(rows[:, :-1])[0]).float()
            losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)
            for i, s in enumerate(starts[at : at + batch]):
                skip = max(scored - s, 0)
                nats += float(losses[i, skip:].double().sum())
                scored = s + window
    share = scored / max(counts["tokens"] - 1, 1)  # of the text, where `most` cut it
    return float(nats / math.log(2) / (counts["bytes"] * share))


def target_report(model: Target, folder: Path, corpus: Path, device: str) -> dict[str, Any]:
    """Bits per byte of: the folder (INT4, as it runs), the same weights without INT4 in bf16, and `xz -9e` of the
    same texts."""
    counts = manifest(corpus)["counts"]
    shown: dict[str, Any] = {}
    int4 = load_target(folder, device)
    plain = Target(model.shape).to(device)
    plain.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in model.state_dict().items()})
    biases = [layer.mlp.bias for layer in model.layers if not layer.dense]
    for layer, bias in zip((m for m in plain.layers if not m.dense), biases, strict=True):
        layer.mlp.quantized = False
        layer.mlp.bias.copy_(bias)  # float32 in the file
    for kind in KINDS:
        c = counts[f"heldout.{kind}"]
        shown[kind] = {
            "xz": round(8 * c["xz_bytes"] / c["bytes"], 4),
            "int4": round(bits_per_byte(int4, corpus, kind, device), 4),
            "bf16": round(bits_per_byte(plain, corpus, kind, device), 4),
        }
    shown["all"] = {
        name: round(_mean(shown, counts, name), 4) for name in ("xz", "int4", "bf16")
    }
    return shown


def folder_report(model: Target, corpus: Path, device: str, most: int | None = None) -> dict[str, Any]:
    """Bits per byte of a loaded folder, beside `xz -9e` of the same texts, whole."""
    counts = manifest(corpus)["counts"]
    shown: dict[str, Any] = {}
    for kind in KINDS:
        c = counts[f"heldout.{kind}"]
        ours = bits_per_byte(model, corpus, kind, device, most)
        shown[kind] = {"xz": round(8 * c["xz_bytes"] / c["bytes"], 4), "int4": round(ours, 4)}
    shown["all"] = {name: round(_mean(shown, counts, name), 4) for name in ("xz", "int4")}
    return shown


def _mean(shown: dict[str, Any], counts: dict[str, Any], name: str) -> float:
    sizes = {k: counts[f"heldout.{k}"]["bytes"] for k in KINDS}
    return float(sum(shown[k][name] * sizes[k] for k in KINDS) / sum(sizes.values()))


def heldout_prompts(corpus: Path, kind: Kind, count: int, size: int) -> torch.Tensor:
    """int64 [count, size], evenly spread over the held-out stream of a kind."""
    stream = torch.from_numpy(load_tokens(corpus, "heldout", kind).astype("int64"))
    count = min(count, max(len(stream) // size - 1, 1))
    room = len(stream) - size
    return torch.stack([stream[at : at + size] for at in (i * room // count for i in range(count))])


def walk(right: torch.Tensor, first: int) -> list[int]:
    """Tokens of each round, the target's own included, of one text. right [S, rows - 1]: whether the draft at
    distance j + 1 behind an anchor is the text's token; the first round's last token stands at `first`."""
    lengths = []
    at = first
    run = right.long().cumprod(dim=-1).sum(dim=-1).tolist()
    while at + right.shape[1] + 1 < len(run):
        lengths.append(run[at] + 1)
        at += run[at] + 1
    return lengths


def accepted_lengths(
    target: Target, drafter: Drafter, taps: tuple[int, ...], text: torch.Tensor, given: int, device: str
) -> list[int]:
    """Lengths of all chain rounds over texts [B, S] that the target wrote behind `given` tokens."""
    rows, (batch, length) = drafter.rows, text.shape
    right = torch.zeros(batch, length, rows - 1, dtype=torch.bool)
    with torch.no_grad(), autocast(device):
        streams = target.hidden(text)[1]
        feature = drafter.features([streams[i] for i in taps])
        ahead = torch.arange(1, rows, device=device)
        for begin in range(given, length - rows + 1, 32):
            at = torch.arange(begin, min(begin + 32, length - rows + 1), device=device).expand(batch, -1)
            hidden = drafter(text.gather(1, at), at, feature, target.embed.weight)
            draft = F.linear(hidden, target.head.weight).argmax(dim=-1)
            wanted = text.gather(1, (at.unsqueeze(-1) + ahead).flatten(1)).unflatten(1, (-1, rows - 1))
            right[:, begin : begin + at.shape[1]] = (draft == wanted).cpu()
    return [n for row in right for n in walk(row, given)]


def draft_report(
    target: Target, drafter: Drafter, draft: DraftShape, corpus: Path, device: str, count: int = 48, size: int = 96,
    length: int = 352,
) -> dict[str, Any]:
    """Mean tokens of a chain round per kind of held-out prompt, greedy and at temperature 0.7."""
    length = min(length, target.shape.context)
    size = min(size, length // 3)
    shown: dict[str, Any] = {}
    noise = torch.Generator(device).manual_seed(0)
    for kind in KINDS:
        prompts = heldout_prompts(corpus, kind, count, size).to(device)
        shown[kind] = {}
        for name, heat in (("greedy", 0.0), ("t0.7", 0.7)):
            text = rollout(target, prompts, length, torch.full((len(prompts),), heat, device=device), device, noise)
            lengths = accepted_lengths(target, drafter, draft.taps, text, size, device)
            shown[kind][name] = round(sum(lengths) / max(len(lengths), 1), 3)
    return shown
