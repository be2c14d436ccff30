"""Attention over the latent cache at the widths of Kimi K2: 64 heads, latent 512, rope 64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kdtree_engine._native import ops
from machine import THREADS

HEADS, LATENT, ROPE = 64, 512, 64


@pytest.mark.parametrize("prefix", [1024, 8192])
@pytest.mark.parametrize("rows", [1, 8, 65])
def test_attend(measure: Callable[..., None], rng: np.random.Generator, prefix: int, rows: int) -> None:
    width, count = LATENT + ROPE, prefix // 64
    pages = rng.standard_normal((count, 64, width), dtype=np.float32)
    scratch = rng.standard_normal((65, width), dtype=np.float32)
    table = rng.permutation(count).astype(np.int32)[None]
    ancestors = np.zeros((rows, 65), dtype=np.int32)
    ancestors[:, 1] = np.arange(rows)
    columns = [np.full(rows, value, dtype=np.int32) for value in (0, prefix + 1, prefix, 2)]
    q = rng.standard_normal((rows, HEADS, width), dtype=np.float32)
    measure(
        lambda: ops.attend(q, pages, scratch, table, ROPE, 0.05, *columns, ancestors, threads=THREADS),
        reads=(prefix + rows) * width * 4,  # one pass over the keys, however many rows look at them
        flops=2 * rows * HEADS * (prefix + 2) * (width + LATENT),
        rounds=15 if rows * prefix < 100_000 else 3,
    )
