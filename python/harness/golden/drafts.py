"""Planted drafts: tables that hold the true continuation among random siblings.

The true token sits at rank 0 of most rows and at a later rank of two *branch* rows, so that the accepted path
runs through children that are not first; at a random depth it is missing for good. Log-probabilities are made
up (multiples of 1/64, hence exact sums) such that the path is among the 64 heaviest prefixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import hashing
from harness.reference import ddtree

DEPTH = 16
WIDTH = 8
BUDGET = 64
SHORTEST = 12  # accepted depth at BUDGET that every table reaches

_SURE = (-4, -320)  # log-probability of rank 0 and of the first rank behind, in 64ths
_TWO_WAY = (-48, -52, -300)
_THREE_WAY = (-74, -78, -84, -260)


@dataclass(frozen=True)
class Table:
    """token: int32 [DEPTH, WIDTH]; logp: float32 [DEPTH, WIDTH], rows descending; agrees: depth to which the
    true path is in it."""

    token: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float32]
    agrees: int


def _row(name: str, head: Sequence[int], rank: int, true: int, vocab: int) -> tuple[list[int], list[float]]:
    """One row: `true` at a rank (nowhere if negative), log-probabilities `head` and then falling, ties
    included."""
    token = hashing.distinct(f"{name}/siblings", WIDTH, vocab, (true,))
    if rank >= 0:
        token[rank] = true
    logp = list(head)
    for step in hashing.integers(f"{name}/steps", (WIDTH - len(head),), 0, 24).tolist():
        logp.append(logp[-1] - step)
    return token, [x / 64 for x in logp]


def _candidate(name: str, truth: Sequence[int], vocab: int) -> Table:
    agrees = hashing.integer(f"{name}/agrees", SHORTEST, DEPTH + 1)
    branches = (hashing.integer(f"{name}/early", 2, 7), hashing.integer(f"{name}/late", 8, SHORTEST + 1))
    rows = []
    for depth in range(1, DEPTH + 1):
        at = f"{name}/{depth}"
        head: Sequence[int] = _SURE
        rank = 0
        if depth in branches:
            head = (_TWO_WAY, _THREE_WAY)[hashing.integer(f"{at}/kind", 0, 2)]
            rank = hashing.integer(f"{at}/rank", 1, len(head) - 1)
        if depth > agrees:
            rank = -1
        rows.append(_row(at, head, rank, truth[depth - 1], vocab))
    return Table(
        np.array([t for t, _ in rows], dtype=np.int32),
        np.array([x for _, x in rows], dtype=np.float32),
        agrees,
    )


def accepted_depth(tree: ddtree.Tree, truth: Sequence[int]) -> int:
    """How far a target that emits `truth` walks down the tree."""
    selected = [truth[d] if d < len(truth) else -1 for d in tree.depth]  # -1: walked beyond the truth
    walk = ddtree.accept(tree.token, tree.parent, np.array(selected), tree.count + 1, tree.count + 1)
    return len(walk.path) - (0 if walk.failed else 1)


def planted(name: str, truth: Sequence[int], vocab: int) -> Table:
    """The first candidate whose tree at BUDGET holds the true path as deep as the table does.

    truth: the DEPTH tokens after the root.
    """
    for attempt in range(1000):
        table = _candidate(f"{name}/{attempt}", truth, vocab)
        tree = ddtree.build_tree(0, table.token, table.logp, BUDGET, DEPTH)
        if accepted_depth(tree, truth) == table.agrees:
            return table
    raise ValueError(f"{name}: no planted table found")


def first_children(tree: ddtree.Tree) -> dict[int, int]:
    """Node -> its first child."""
    return {int(tree.parent[i]): i for i in range(tree.count, 0, -1)}


def branches_on(tree: ddtree.Tree, path: Sequence[int]) -> int:
    """How many steps of a path go to a child that is not the first."""
    first: dict[Any, int] = first_children(tree)
    return sum(first[a] != b for a, b in itertools.pairwise(path))
