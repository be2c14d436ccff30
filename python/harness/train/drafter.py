"""The stage that trains a DFlash drafter for a target.

The target first writes texts: continuations of stretches of the training corpus, greedy and sampled. Blocks are then
trained at random anchors inside what it wrote, so the drafter learns the target's own continuations, which is what
it is measured by. Losses of later positions count less (arXiv 2602.06036), since a draft counts only if all before
it are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from harness.train import evaluate, tensors
from harness.train.bpe import MASK
from harness.train.data import Batches
from harness.train.drafter_model import Drafter
from harness.train.errors import TrainError
from harness.train.export import load_target, save_drafter, save_target
from harness.train.loop import Clock, Run, autocast, plot
from harness.train.optimiser import Optimiser
from harness.train.rollout import rollout
from harness.train.shapes import DraftShape
from harness.train.target_model import Target

__all__ = ["DraftTraining", "train_drafter"]

_CHECKPOINT_EVERY = 60.0
ROLLOUTS = "rollouts.pt"


@dataclass(frozen=True)
class DraftTraining:
    """``pool`` texts of ``length`` tokens are written at once, in at most ``rounds`` rounds and at most the share
    ``writing`` of the time; ``greedy``: the share without sampling, the rest has ``temperature``. ``batch`` texts
    with ``anchors`` blocks each are a step; ``decay``: positions over which a loss's weight falls to 1 / e;
    ``report_prompts``: held-out prompts of each kind in the report."""

    pool: int = 4096
    rounds: int = 24
    length: int = 416
    prompts: tuple[int, int] = (32, 160)
    writing: float = 0.3
    greedy: float = 0.6
    temperature: float = 0.7
    batch: int = 96
    anchors: int = 32
    decay: float = 5.0
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.02
    warmup: float = 0.02
    cooldown: float = 0.6
    mixture: dict[str, float] = field(
        default_factory=lambda: {"code": 0.35, "reference": 0.25, "prose": 0.22, "lists": 0.18}
    )
    seed: int = 2
    report_prompts: int = 48


def _write_texts(
    target: Target, batches: Batches, training: DraftTraining, clock: Clock, device: str, run: Run
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts [N, length] and how many tokens of each were given."""
    texts, given = [], []
    noise = torch.Generator(device).manual_seed(training.seed)
    choice = torch.Generator().manual_seed(training.seed)
    for i in range(training.rounds):
        if i and clock.done(0) >= training.writing:
            break
        low, high = training.prompts
        size = int(torch.randint(low, high + 1, (1,), generator=choice))
        prompt = batches.draw(training.pool, size, choice)
        heat = torch.full((training.pool,), training.temperature, device=device)
        heat[: int(training.pool * training.greedy)] = 0.0
        texts.append(rollout(target, prompt, training.length, heat, device, noise).to(torch.int32))
        given.append(torch.full((training.pool,), size))
        run.say(f"{(i + 1) * training.pool} texts written, {clock.elapsed:.0f} s")
    return torch.cat(texts), torch.cat(given).to(device)


def _anchors(
    given: torch.Tensor, length: int, rows: int, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Positions [B, count] of last tokens: those that the target wrote, with a whole block of its text behind."""
    uniform = torch.rand(len(given), count, generator=generator).to(given.device)
    room = (length - rows - given + 1).unsqueeze(1)
    return given.unsqueeze(1) + (uniform * room).long().clamp_max(room - 1)


def draft_loss(
    drafter: Drafter,
    target: Target,
    text: torch.Tensor,
    at: torch.Tensor,
    taps: tuple[int, ...],
    decay: float,
    device: str,
) -> torch.Tensor:
    """Weighted mean negative log-likelihood of the tokens behind the anchors `at` [B, A] of text [B, S]."""
    with torch.no_grad(), autocast(device):
        _, streams, _ = target.hidden(text)
    with autocast(device):
        feature = drafter.features([streams[i] for i in taps])
        hidden = drafter(text.gather(1, at), at, feature, target.embed.weight)
        logits = F.linear(hidden, target.head.weight)
    ahead = torch.arange(1, drafter.rows, device=text.device)
    wanted = text.gather(1, (at.unsqueeze(-1) + ahead).flatten(1))
    losses = F.cross_entropy(logits.float().flatten(0, 2), wanted.flatten(), reduction="none")
    weight = torch.exp(-(ahead - 1).float() / decay)
    y: torch.Tensor = (losses.unflatten(0, (-1, drafter.rows - 1)) * weight).sum(dim=-1).mean() / weight.sum()
    return y


def train_drafter(
    corpus: Path,
    target_folder: Path,
    out: Path,
    draft: DraftShape,
    training: DraftTraining,
    clock: Clock,
    device: str,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, and write ``OUT/draft`` and ``OUT/model``: the target once more, with the trained embedding of the mask
    token. Raises TrainError."""
    torch.manual_seed(training.seed)
    target = load_target(target_folder, device)
    draft.check(target.shape)
    if training.prompts[1] + draft.rows + 1 >= training.length or training.length > target.shape.context:
        raise TrainError(
            f"texts of {training.length} tokens; expected more than prompt and block ({training.prompts[1]} + "
            f"{draft.rows + 1}) and at most the model's {target.shape.context}"
        )
    target.requires_grad_(False)
    drafter = Drafter(draft, target.shape).to(device)
    with torch.no_grad():  # begins like an average token
        drafter.mask.copy_(target.embed.weight.mean(dim=0) + 0.3 * drafter.mask)
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    others = [p for p in drafter.parameters() if p.ndim < 2]
    optimiser = Optimiser(matrices, others, training.matrix_rate, training.other_rate, training.weight_decay)
    generator = torch.Generator().manual_seed(training.seed)
    run = Run(out, drafter, optimiser, clock, generator, "drafter")
    settings = {"draft": _plain(asdict(draft)), "training": _plain(asdict(training))}
    run.resume(settings)
    texts, given = _texts(corpus, target, training, clock, device, run, settings)

    while clock.done(run.step) < 1.0:
        pick = torch.randint(len(texts), (training.batch,), generator=generator).to(device)
        text = texts[pick].long()
        at = _anchors(given[pick], training.length, draft.rows, training.anchors, generator)
        loss = draft_loss(drafter, target, text, at, draft.taps, training.decay, device)
        optimiser.zero_grad()
        loss.backward()
        factor = run.rate(training.warmup, training.cooldown)
        optimiser.step(factor)
        run.record(loss, text.numel(), lambda factor=factor: {"rate": factor})  # type: ignore[misc]
        if run.save_due(_CHECKPOINT_EVERY):
            run.save(settings)
            _export(drafter, target, out, draft, corpus)
    if run.step == 0:
        raise TrainError("the time was over before the first step")
    run.save(settings)
    _export(drafter, target, out, draft, corpus)
    plot(out, "drafter")
    report = {
        "steps": run.step,
        "texts": len(texts),
        "minutes": round(clock.elapsed / 60 + clock.earlier, 2),
        "seed": training.seed,
        "settings": settings,
        "accepted": evaluate.draft_report(target, drafter, draft, corpus, device, training.report_prompts),
    }
    tensors.write_text(out / "report.json", json.dumps(report, indent=1) + "\n")
    say(json.dumps(report["accepted"]))
    return report


def _texts(
    corpus: Path,
    target: Target,
    training: DraftTraining,
    clock: Clock,
    device: str,
    run: Run,
    settings: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the run that is resumed, or written anew."""
    path = run.folder / ROLLOUTS
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["settings"] == settings:
            return saved["texts"], saved["given"]
    batches = Batches(corpus, "train", training.mixture, device)  # type: ignore[arg-type]
    batches.check(target.shape.vocab_size, training.length)
    texts, given = _write_texts(target, batches, training, clock, device, run)
    torch.save({"texts": texts, "given": given, "settings": settings}, path)
    return texts, given


def _export(drafter: Drafter, target: Target, out: Path, draft: DraftShape, corpus: Path) -> None:
    save_drafter(drafter, out / "draft", draft, target.shape)
    with torch.no_grad():
        target.embed.weight[MASK] = drafter.mask
    save_target(target, out / "model", corpus)


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, so that settings compare equal after a checkpoint."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain
