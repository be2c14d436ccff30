"""FP32 and BF16 matrix products. One row is bound by reading the weights; 65 rows by arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kdtree_engine._native import ops
from machine import SET_BYTES, THREADS

WIDTH = 7168


@pytest.fixture(scope="module")
def fp32(rng: np.random.Generator) -> ops.Matrix:
    return ops.Matrix.f32(rng.random((SET_BYTES // (WIDTH * 4) // 64 * 64, WIDTH), dtype=np.float32))


@pytest.fixture(scope="module")
def bf16(rng: np.random.Generator) -> ops.Matrix:
    bits = rng.integers(0x3C00, 0x3F80, (SET_BYTES // (WIDTH * 2) // 64 * 64, WIDTH), dtype=np.uint16)
    return ops.Matrix.bf16(bits)


def run(measure: Callable[..., None], w: ops.Matrix, rows: int) -> None:
    out, width = w.shape
    x = np.ones((rows, width), dtype=np.float32)
    y = np.empty((rows, out), dtype=np.float32)
    measure(
        lambda: ops.linear(x, w, out=y, threads=THREADS),
        reads=w.bytes,
        flops=2 * rows * out * width,
        rounds=60 if rows < 16 else 10,
    )


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 65])
def test_fp32(measure: Callable[..., None], fp32: ops.Matrix, rows: int) -> None:
    run(measure, fp32, rows)


@pytest.mark.parametrize("rows", [1, 8, 65])
def test_bf16(measure: Callable[..., None], bf16: ops.Matrix, rows: int) -> None:
    run(measure, bf16, rows)
