"""INT4 W4A16 matrix products: bytes of weights and scales read, and operations beside numpy's sgemm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kdtree_engine._native import ops
from machine import SET_BYTES, THREADS

WIDTH = 7168


@pytest.fixture(scope="module", params=["f32", "bf16"])
def w4a16(request: pytest.FixtureRequest, rng: np.random.Generator) -> ops.Matrix:
    out = SET_BYTES * 2 // WIDTH // 64 * 64
    words = rng.integers(-(2**31), 2**31, (out, WIDTH // 8), dtype=np.int64).astype(np.int32)
    if request.param == "f32":
        return ops.Matrix.w4a16(words, rng.random((out, WIDTH // 32), dtype=np.float32))
    return ops.Matrix.w4a16(words, rng.integers(0x3C00, 0x3F80, (out, WIDTH // 32), dtype=np.uint16))


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 65])
def test_int4(measure: Callable[..., None], w4a16: ops.Matrix, rows: int) -> None:
    out, width = w4a16.shape
    x = np.ones((rows, width), dtype=np.float32)
    y = np.empty((rows, out), dtype=np.float32)
    measure(
        lambda: ops.linear(x, w4a16, out=y, threads=THREADS),
        reads=w4a16.bytes if rows <= 4 else 0,  # few rows wait for memory, many for arithmetic
        flops=2 * rows * out * width if rows >= 4 else 0,
        floor={1: {"read": 0.45}, 8: {"sgemm": 0.6}}.get(rows, {}),
        rounds=60 if rows < 16 else 10,
    )


@pytest.mark.parametrize("rows", [1, 16])
def test_experts(measure: Callable[..., None], rng: np.random.Generator, rows: int) -> None:
    """64 experts of 2048 x 768, 8 a row: what is read is the experts that are chosen."""
    hidden, inner, count, top_k = 2048, 768, 64, 8

    def matrices(out: int, width: int) -> list[ops.Matrix]:
        words = rng.integers(-(2**31), 2**31, (count, out, width // 8), dtype=np.int64).astype(np.int32)
        scales = rng.integers(0x3C00, 0x3C80, (count, out, width // 32), dtype=np.uint16)
        return [ops.Matrix.w4a16(w, s) for w, s in zip(words, scales, strict=True)]

    parts = [matrices(inner, hidden), matrices(inner, hidden), matrices(hidden, inner)]
    experts = ops.Experts(*parts)
    expert = np.array([rng.choice(count, top_k, replace=False) for _ in range(rows)], dtype=np.int32)
    x, y = np.ones((rows, hidden), np.float32), np.zeros((rows, hidden), np.float32)
    weight = np.full((rows, top_k), 0.01, np.float32)
    chosen = len(np.unique(expert))
    measure(
        lambda: ops.experts(x, experts, expert, weight, None, y, threads=THREADS),
        reads=chosen * sum(part[0].bytes for part in parts),
        flops=rows * top_k * 6 * hidden * inner,
    )
