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
        reads=w4a16.bytes,
        flops=2 * rows * out * width,
        rounds=60 if rows < 16 else 10,
    )
