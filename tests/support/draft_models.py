"""Random DFlash draft models beside the random targets of `models`: engine, numpy oracle, rounds and what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from models import ModelSpec, bf16_bits, fill, spec, tensors

from harness.reference import dflash, quant
from harness.reference.model import Model
from kdtree_engine import _native

TABLE, PATH = 1, 2  # sources of a node


@dataclass(frozen=True)
class DraftSpec:
    """One random draft model: what the target does not fix, and a seed."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 80
    rows: int = 8
    taps: tuple[int, ...] = (0, 1)
    window: tuple[int, ...] = (0, 0)
    causal: tuple[int, ...] = (0, 0)
    rope: tuple[tuple[str, float], ...] = ()
    mask: int = 255
    bf16: bool = False
    seed: int = 1

    def config(self, target: ModelSpec) -> dflash.DraftConfig:
        fields = {
            "hidden_size": target.fields["hidden_size"],
            "vocab_size": target.fields["vocab_size"],
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "rms_norm_eps": 1e-5,
            "block_rows": self.rows,
            "mask_token_id": self.mask,
            "rope_theta": 10000.0,
            "rope_factor": 0.0,
            "rope_original_max_position_embeddings": 0.0,
            "rope_beta_fast": 0.0,
            "rope_beta_slow": 0.0,
            "rope_amplitude": 1.0,
            **dict(self.rope),
        }
        return dflash.DraftConfig(fields, list(self.taps), list(self.window), list(self.causal))


YARN = (
    ("rope_theta", 50000.0),
    ("rope_factor", 64.0),
    ("rope_original_max_position_embeddings", 32.0),
    ("rope_beta_fast", 32.0),
    ("rope_beta_slow", 1.0),
    ("rope_amplitude", 1.4158883083359671),
)
TARGETS = {
    "k2": spec("f32", 1),
    "deep": spec("f32", 21, num_hidden_layers=5, hidden_size=48, first_k_dense_replace=2),
    "ragged_bf16": spec("bf16", 22, hidden_size=52, vocab_size=301, v_head_dim=11, kv_lora_rank=37),
}
DRAFTS = {
    "plain": DraftSpec(),
    # Everything at once: YaRN with the legacy amplitude, windows, causal layers, taps out of order, ragged heads.
    "yarn_windows": DraftSpec(
        layers=3, heads=6, kv_heads=2, head_dim=18, rows=6, taps=(3, 0, 4), window=(0, 20, 7), causal=(0, 1, 0),
        rope=YARN, mask=17, seed=2,
    ),
    "one_key_head_bf16": DraftSpec(
        layers=1, heads=17, kv_heads=1, head_dim=10, rows=16, taps=(2,), window=(70,), causal=(1,), bf16=True, seed=3,
        mask=300,
    ),
}  # fmt: skip
PAIRS = {"plain": "k2", "yarn_windows": "deep", "one_key_head_bf16": "ragged_bf16"}


def draft_tensors(draft: DraftSpec, target: ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor of the draft model, float32 or bf16 bits, by its published name."""
    rng = np.random.default_rng(draft.seed)
    found = {}
    for name, shape in sorted(dflash.weight_shapes(draft.config(target)).items()):
        scale = 0.2 if len(shape) == 1 else 1.6 / np.sqrt(shape[1])
        array = (rng.normal(0, scale, shape) + (len(shape) == 1)).astype(np.float32)
        found[name] = bf16_bits(array) if draft.bf16 else array
    return found


def floats(array: np.ndarray) -> np.ndarray:
    """float32 of float32 or bf16 bits."""
    return quant.from_bf16_bits(array) if array.dtype == np.uint16 else array


# Where a pair runs: its backend and precision. Everything that is bitwise holds on each; what is compared with the
# oracle needs float32.
DEVICES = {"cpu": ("cpu", "f32"), "cuda_f32": ("cuda", "f32"), "cuda_bf16": ("cuda", "bf16")}
# ragged_bf16's latents are 37 wide: on CUDA in bf16 they are multiples of 8, and other models are refused.
RUNS = [(name, at) for name in DRAFTS for at in DEVICES if (PAIRS[name], at) != ("ragged_bf16", "cuda_bf16")]
RUN_IDS = [name if at == "cpu" else f"{name}-{at}" for name, at in RUNS]
FLOAT32_RUNS = [run for run in RUNS if DEVICES[run[1]][1] == "f32"]
FLOAT32_IDS = [i for i, run in zip(RUN_IDS, RUNS, strict=True) if run in FLOAT32_RUNS]


@cache
def no_gpu() -> str | None:
    """Why nothing runs on CUDA here; None where it does."""
    if not _native.build_info()["cuda"]:
        return "this build has no CUDA backend"
    report = _native.gpu_report()
    return report["problem"] or (None if report["gpus"] else "no GPU was found")


def require(device: str) -> None:
    """Skips the test, and says so, where the device of DEVICES is not there."""
    why = no_gpu() if DEVICES[device][0] == "cuda" else None
    if why is not None:
        pytest.skip(f"NOT RUN on {device}: {why}")


def build_pair(
    target: ModelSpec, draft: DraftSpec, *, threads: int = 2, isa: str = "", device: str = "cpu"
) -> _native.Engine:
    backend, precision = DEVICES[device]
    builder = _native.EngineBuilder(target.fields, backend, threads, isa, precision)
    c = draft.config(target)
    loader = builder.add_draft_model(dict(c.fields), list(c.target_layers), list(c.window), list(c.causal))
    for name, array in draft_tensors(draft, target).items():
        loader.add(name, array)
    fill(builder, tensors(target))
    return builder.finish()


@dataclass
class Pair:
    """A target and its draft model: specs, engine, oracles."""

    target: ModelSpec
    draft: DraftSpec
    engine: _native.Engine = field(repr=False)
    device: str = "cpu"

    @property
    def vocab(self) -> int:
        return int(self.target.fields["vocab_size"])

    def oracle(self, kind: type[dflash.Drafter] = dflash.Drafter, dtype: Any = np.float64) -> dflash.Drafter:
        weights = {name: floats(a) for name, a in draft_tensors(self.draft, self.target).items()}
        own = tensors(self.target)
        embed, head = (floats(own[f"{n}.weight"]) for n in ("model.embed_tokens", "lm_head"))
        return kind(self.draft.config(self.target), weights, embed, head, dtype)

    def taps(self, tokens: Sequence[int], layers: Sequence[int] | None = None) -> np.ndarray:
        """float64 [tokens, taps * hidden]: from the numpy target."""
        model = Model(dict(self.target.fields), tensors(self.target))
        out = model.forward(tokens, range(len(tokens)))
        return np.concatenate([out.taps[i] for i in (self.draft.taps if layers is None else layers)], axis=1)


@cache
def pair(name: str, device: str = "cpu") -> Pair:
    """A pair of DRAFTS on a device of DEVICES, which must be there (`require`)."""
    target, draft = TARGETS[PAIRS[name]], DRAFTS[name]
    return Pair(target, draft, build_pair(target, draft, device=device), device)


@dataclass
class Draft:
    """One draft of a generation: the root's position and token, and the float32 logits [drafts, vocab]."""

    position: int
    root: int
    logits: np.ndarray


@dataclass
class Watched:
    """A generation and what its draft model saw."""

    session: _native.Session
    drafts: list[Draft]
    features: dict[int, np.ndarray]  # by position
    rounds: list[dict[str, Any]]


def watch(session: _native.Session, max_tokens: int, **options: Any) -> Watched:
    """Steps a generation to its end; after every step reads back what the draft model computed in it."""
    seen = Watched(session, [], {}, [])
    session.begin(max_tokens, trace=True, **options)
    ready = session.draft_positions[0]
    while True:
        before = session.tokens
        finished = session.step().finished
        if session.draft_positions[0] > ready:
            now = session.draft_positions[0]
            for i, row in enumerate(session.draft_features(now - ready)):
                seen.features[ready + i] = row
            ready = now
        trace = session.trace
        if trace is not None:
            seen.rounds.append(trace)
            if trace["asked"] & TABLE:
                seen.drafts.append(Draft(len(before) - 1, before[-1], session.draft_logits()))
        if finished is not None:
            return seen
