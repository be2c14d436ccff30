"""What one draft of a DFlash model costs in the engine, next to reading its weights once.

    python bench/draft_model.py [--device cuda] [--shape k2|small] [--contexts 256,4096] [--json FILE]

Builds a draft model of Kimi K2.6's shape (6 layers, hidden 7168, 64 query heads on 8 key heads of 128, inner 18432,
six taps, window 4096, vocabulary 163840, block of 8) on a small target with random bf16 weights, and times whole drafts
of a generation: features, keys and values of the tokens that waited, the block, its table on the host. Random drafts
are hardly ever accepted, so one to two tokens wait. `floor`: bytes of the draft's weights, keys and values at the rate
at which the device reads its memory. Needs 12 GB for the shape k2.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from harness.guard import guarded
from kdtree_engine import _native
from kdtree_engine.checkout import commit

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "k2": dict(
        hidden=7168, vocab=163840, layers=6, heads=64, kv_heads=8, head_dim=128, inner=18432, taps=6, rows=8,
        window=4096,
    ),
    "small": dict(
        hidden=512, vocab=4096, layers=2, heads=8, kv_heads=2, head_dim=64, inner=1024, taps=3, rows=8, window=128
    ),
}  # fmt: skip
Shape = dict[str, int]


class Weights:
    """Random bf16 bits, cheaply: one random pool, repeated from a different place for every matrix."""

    def __init__(self) -> None:
        values = np.random.default_rng(1).normal(size=999_983).astype(np.float32)
        self.pool = values

    def matrix(self, shape: tuple[int, ...]) -> np.ndarray:
        scale = np.float32(1.0 if len(shape) == 1 else 1.2 / math.sqrt(shape[-1]))
        values = np.ones_like(self.pool) if len(shape) == 1 else self.pool * scale
        self.pool = np.roll(self.pool, 31337)
        return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), shape)


def target_fields(s: Shape) -> dict[str, float]:
    return dict(
        vocab_size=s["vocab"], hidden_size=s["hidden"], num_hidden_layers=s["taps"], num_attention_heads=4,
        q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, intermediate_size=64,
        moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=s["taps"] - 1, n_group=1, topk_group=1, scoring=0, norm_topk_prob=1,
        routed_scaling_factor=1.0, rms_norm_eps=1e-5, latent_norm_eps=1e-6, rope_theta=50000.0, rope_interleave=1,
        rope_factor=0, rope_original_max_position_embeddings=0, rope_beta_fast=0, rope_beta_slow=0, rope_mscale=0,
        rope_mscale_all_dim=0, max_position_embeddings=1 << 17,
    )  # fmt: skip


def draft_fields(s: Shape) -> dict[str, float]:
    return dict(
        hidden_size=s["hidden"], vocab_size=s["vocab"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"], intermediate_size=s["inner"], rms_norm_eps=1e-5,
        rope_theta=50000.0, rope_factor=0, rope_original_max_position_embeddings=0, rope_beta_fast=0, rope_beta_slow=0,
        rope_amplitude=1.0, block_rows=s["rows"], mask_token_id=s["vocab"] - 2,
    )  # fmt: skip


def build(s: Shape, device: str, precision: str) -> _native.Engine:
    builder = _native.EngineBuilder(target_fields(s), device, 0, precision=precision)
    layers = s["layers"]
    loader = builder.add_draft_model(draft_fields(s), list(range(s["taps"])), [s["window"]] * layers, [0] * layers)
    weights = Weights()
    for name, shape in loader.expected():
        loader.add(name, weights.matrix(tuple(shape)))
    for name, shape, _ in builder.expected():
        loaded = weights.matrix(tuple(shape))
        builder.add(name, (loaded.astype(np.uint32) << 16).view(np.float32) if "bias" in name else loaded)
    return builder.finish()


def bytes_read(s: Shape, context: int, waiting: float) -> float:
    """Of one draft: the layers, the head, what feeding the waiting tokens takes, keys and values in the window."""
    hidden, query, key = s["hidden"], s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    layer = hidden * (2 * query + 2 * key + 3 * s["inner"])
    feed = hidden * (s["taps"] * hidden + 2 * key * s["layers"]) if waiting > 0 else 0
    entries = min(context, s["window"]) * 2 * key * s["layers"]
    return 2.0 * (s["layers"] * layer + s["vocab"] * hidden + feed + entries)


def draft_seconds(engine: _native.Engine, s: Shape, context: int, rounds: int) -> tuple[list[float], float]:
    """Seconds of each draft behind `context` tokens, and how many tokens a round committed."""
    session = _native.Session(_native.Executor(engine, context + 2 * s["rows"] * rounds + 64, 1))
    session.append([int(t) for t in np.random.default_rng(2).integers(0, s["vocab"] - 4, context)])
    session.begin(2 * rounds, drafter=_native.DFlashDrafter(), budget=8, trace=True)
    found: list[float] = []
    while True:
        result = session.step()
        trace = session.trace
        if trace is not None and trace["asked"]:
            found.append(trace["seconds"]["draft_table"])
        if result.finished is not None or len(found) >= rounds + 3:
            return found[3:], len(session.tokens[context:]) / max(1, len(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="")
    parser.add_argument("--shape", choices=SHAPES, default="k2")
    parser.add_argument(
        "--contexts", default="256,4096,16384", help="tokens before the first draft (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    s = SHAPES[args.shape]
    start = time.perf_counter()
    engine = build(s, args.device, args.precision)
    rate = engine.read_rate(1 << 30)
    print(f"{engine.description}; built in {time.perf_counter() - start:.1f} s; memory reads {rate / 1e9:.0f} GB/s")
    print(
        f"{'context':>8} {'tokens/round':>13} {'draft, median':>14} {'p10':>9} {'p90':>9} {'floor':>9} {'of floor':>9}"
    )
    records = []
    for context in (int(c) for c in args.contexts.split(",")):
        seconds, committed = draft_seconds(engine, s, context, args.rounds)
        floor = bytes_read(s, context, committed) / rate
        median = statistics.median(seconds)
        deciles = statistics.quantiles(seconds, n=10)
        times = " ".join(f"{1e3 * t:>6.3f} ms" for t in (deciles[0], deciles[-1], floor))
        print(f"{context:>8} {committed:>13.2f} {1e3 * median:>11.3f} ms {times} {floor / median:>8.0%}")
        records.append(
            dict(context=context, committed_per_round=committed, median=median, seconds=seconds, floor=floor)
        )
    if args.json:
        args.json.write_text(
            json.dumps(
                dict(
                    command=f"python bench/draft_model.py --shape {args.shape} --contexts {args.contexts}",
                    device=engine.description, machine=platform.machine(), commit=commit(ROOT) or "unknown",
                    date=time.strftime("%Y-%m-%d"), read_bytes_per_second=rate, shape=s, results=records,
                ),
                indent=1,
            )
            + "\n"
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
