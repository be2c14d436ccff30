"""Routed experts for benchmarks: enough of them, and routings that meet other ones on every call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np

from kdtree_engine._native import ops
from machine import THREADS

ROUTINGS = 12


def matrix(rng: np.random.Generator, kind: str, out: int, width: int) -> ops.Matrix:
    """Random weights: `f32`, `bf16`, or `int4` with bf16 scales."""
    if kind == "f32":
        return ops.Matrix.f32(rng.random((out, width), dtype=np.float32))
    if kind == "bf16":
        return ops.Matrix.bf16(rng.integers(0x3C00, 0x3F80, (out, width), dtype=np.uint16))
    words = rng.integers(-(2**31), 2**31, (out, width // 8), dtype=np.int64).astype(np.int32)
    return ops.Matrix.w4a16(words, rng.integers(0x3C00, 0x3C80, (out, width // 32), dtype=np.uint16))


class Mixture:
    """`count` experts of hidden x inner, `top_k` a row."""

    def __init__(self, rng: np.random.Generator, kind: str, count: int, top_k: int, hidden: int, inner: int) -> None:
        self.rng, self.count, self.top_k, self.hidden, self.inner = rng, count, top_k, hidden, inner
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        parts = [[matrix(rng, kind, *shape) for _ in range(count)] for shape in shapes]
        self.expert_bytes = sum(part[0].bytes for part in parts)
        self.experts = ops.Experts(*parts)

    def measure(self, measure: Callable[..., None], rows: int) -> None:
        """Routings in turn: what is read is the experts that some row chose."""
        routings = [
            np.array([self.rng.choice(self.count, self.top_k, replace=False) for _ in range(rows)], dtype=np.int32)
            for _ in range(ROUTINGS)
        ]
        chosen = [len(np.unique(routing)) for routing in routings]
        x, y = np.ones((rows, self.hidden), np.float32), np.zeros((rows, self.hidden), np.float32)
        weight = np.full((rows, self.top_k), 0.01, np.float32)
        turn = cycle(routings)
        measure(
            lambda: ops.experts(x, self.experts, next(turn), weight, None, y, threads=THREADS),
            reads=sum(chosen) / ROUTINGS * self.expert_bytes,
            working_set=len(np.unique(np.concatenate(routings))) * self.expert_bytes,
            flops=rows * self.top_k * 6 * self.hidden * self.inner,
            exact=rows == 1,
            rounds=3 * ROUTINGS,
        )
