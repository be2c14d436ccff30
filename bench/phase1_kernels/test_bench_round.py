"""What a round costs beside the forward: choosing tokens from a real vocabulary, building a tree, accepting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kdtree_engine._native import ops
from machine import THREADS

VOCAB, ROWS = 163840, 16
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "flat_top_p": {"temperature": 3.0, "top_p": 0.99},
}


@pytest.fixture(scope="module")
def logits(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((ROWS, VOCAB), dtype=np.float32) * np.float32(3)


@pytest.mark.parametrize("name", list(SAMPLING))
def test_select(measure: Callable[..., None], logits: np.ndarray, name: str) -> None:
    position = np.arange(ROWS, dtype=np.int32)
    measure(lambda: ops.select(logits, position, threads=THREADS, **SAMPLING[name]), reads=logits.nbytes)


@pytest.mark.parametrize("k", [8, 64])
def test_top_k(measure: Callable[..., None], logits: np.ndarray, k: int) -> None:
    measure(lambda: ops.top_k(logits, k, threads=THREADS), reads=logits.nbytes)


@pytest.mark.parametrize("budget", [16, 64])
def test_build_tree(measure: Callable[..., None], rng: np.random.Generator, budget: int) -> None:
    token = np.array([rng.permutation(1000)[:64] for _ in range(16)], dtype=np.int32)
    logp = -np.cumsum(rng.random((16, 64), dtype=np.float32), axis=1)
    no_paths = (np.zeros(0, np.int32), np.zeros((0, 64), np.int32), np.zeros((0, 64), np.float32))
    measure(lambda: ops.build_tree(token, logp, *no_paths, budget, 64, 7), rounds=50)


@pytest.mark.parametrize("nodes", [16, 64])
def test_tree_rows(measure: Callable[..., None], nodes: int) -> None:
    """Positions, prefixes and ancestors of a binary tree."""
    token = np.arange(nodes + 1, dtype=np.int32)
    parent = (token - 1) // 2
    measure(lambda: ops.tree_rows(token, parent, nodes, 0, 1000), rounds=50)


@pytest.mark.parametrize("rows", [4, 16])
def test_commit(measure: Callable[..., None], rng: np.random.Generator, rows: int) -> None:
    """An accepted path into its pages, one layer of Kimi K2: 576 floats a row, read and written."""
    pages = np.zeros((512, 64, 576), np.float32)
    scratch = rng.standard_normal((65, 576), dtype=np.float32)
    table = rng.permutation(512).astype(np.int32)[None]
    path = np.arange(rows, dtype=np.int32)
    measure(
        lambda: ops.commit(path, 1000, 0, pages, scratch, table, threads=THREADS), reads=rows * 576 * 4, rounds=50
    )


def test_accept(measure: Callable[..., None]) -> None:
    """A chain of 64 nodes, all accepted: the longest walk there is."""
    token, parent = np.arange(65, dtype=np.int32), np.arange(-1, 64, dtype=np.int32)
    selected = np.arange(1, 66, dtype=np.int32)
    stops = np.zeros(0, np.int32)
    measure(lambda: ops.accept(token, parent, selected, 65, 100, stops), rounds=50)
