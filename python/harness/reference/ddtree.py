"""Draft trees on plain arrays: build, ancestors, visibility, accept (counterpart of cpp/ddtree).

Source: Ringel and Romano, "Accelerating Speculative Decoding with Block Diffusion Draft Trees" (arXiv
2604.12989), sections 3 and 4. The rules for ties, for values that are no log-probabilities and for merging
several sources are those of cpp/ddtree/build.h.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FROM_TABLE = 1
FROM_PATH = 2


@dataclass(frozen=True)
class Tree:
    """A draft tree, nodes in pop order, node 0 the root.

    token, parent, depth, source: int32 [count + 1]; weight: float64 [count + 1], the log-probability of the
    path from the root. parent of the root is -1, its depth, source and weight are 0.
    """

    token: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float64]

    @property
    def count(self) -> int:
        """Nodes, the root not counted."""
        return len(self.token) - 1

    def truncated(self, nodes: int) -> Tree:
        """The tree of the first `nodes` nodes (all of them where there are fewer)."""
        n = min(nodes, self.count) + 1
        return Tree(self.token[:n], self.parent[:n], self.depth[:n], self.source[:n], self.weight[:n])


@dataclass(frozen=True)
class Path:
    """A weighted path: one token and one log-probability per depth, from depth 1 on."""

    token: Sequence[int]
    logp: Sequence[float]


def usable_ranks(token: npt.NDArray[Any], logp: npt.NDArray[Any], vocab: int = 2**31 - 1) -> int:
    """How many leading entries of a table row count: up to the first that is no log-probability in order.

    token: integers [K]; logp: float [K]. An entry ends the row where it is NaN, infinite, positive, greater
    than the entry before it, or where its token is outside the vocabulary.
    """
    for rank in range(len(logp)):
        x = float(logp[rank])
        if not (-np.inf < x <= 0.0) or not 0 <= token[rank] < vocab:
            return rank
        if rank > 0 and x > float(logp[rank - 1]):
            return rank
    return len(logp)


def usable_steps(path: Path, vocab: int = 2**31 - 1) -> int:
    """How many leading steps of a path count: up to the first NaN, infinity, positive value or negative
    token."""
    for step, (token, x) in enumerate(zip(path.token, path.logp, strict=True)):
        if not (-np.inf < float(x) <= 0.0) or not 0 <= token < vocab:
            return step
    return len(path.token)


def build_tree(
    root: int,
    table_token: npt.NDArray[Any],
    table_logp: npt.NDArray[Any],
    budget: int,
    max_depth: int,
    paths: Sequence[Path] = (),
    vocab: int = 2**31 - 1,
) -> Tree:
    """The `budget` heaviest prefixes of a table and any number of paths, heaviest first.

    root: token of node 0. table_token: integers [L, K]; table_logp: float32 [L, K], rows descending. Every
    prefix that the table or a path proposes is a candidate; its weight is the float64 sum of its float32
    terms from the root down. Candidates are taken heaviest first; ties: table before paths, then the
    lexicographically smaller rank path, then the lower path index. A prefix taken before (same tokens from
    the root) is the same node. `source` names everyone who proposes the node, whatever the budget.
    """
    depths = min(len(table_token), max_depth)
    usable = [usable_ranks(table_token[d], table_logp[d], vocab) for d in range(depths)]
    # Ranks of each row without repetitions of a token: the same node, never heavier, as is all behind it.
    first = [
        [r for r in range(usable[d]) if table_token[d][r] not in table_token[d][:r]] for d in range(depths)
    ]
    ranks = [len(first[d]) for d in range(depths)]
    steps = [min(usable_steps(path, vocab), max_depth) for path in paths]
    logp = np.asarray(table_logp, dtype=np.float32).astype(np.float64)
    path_logp = [np.asarray(path.logp, dtype=np.float32).astype(np.float64) for path in paths]

    # A candidate is (-weight, path index + 1 or 0 for the table, rank tuple or step count): Python's tuple
    # order is the order above. Its prefix, the tokens from the root, is what makes two candidates the same
    # node.
    def table_candidate(rank_path: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        weight = 0.0
        for d, r in enumerate(rank_path):
            weight += float(logp[d, first[d][r]])
        return (-weight, 0, rank_path)

    def path_candidate(index: int, length: int) -> tuple[float, int, tuple[int, ...]]:
        weight = 0.0
        for d in range(length):
            weight += float(path_logp[index][d])
        return (-weight, index + 1, (length,))

    def prefix_of(candidate: tuple[float, int, tuple[int, ...]]) -> tuple[int, ...]:
        _, kind, key = candidate
        if kind == 0:
            return tuple(int(table_token[d][first[d][r]]) for d, r in enumerate(key))
        return tuple(int(t) for t in paths[kind - 1].token[: key[0]])

    heap = [table_candidate((0,))] if depths > 0 and ranks[0] > 0 else []
    heap += [path_candidate(i, 1) for i in range(len(paths)) if steps[i] > 0]
    heapq.heapify(heap)
    nodes: dict[tuple[int, ...], int] = {(): 0}
    weights = [0.0]
    while heap and len(nodes) <= budget:
        candidate = heapq.heappop(heap)
        negative_weight, kind, key = candidate
        prefix = prefix_of(candidate)
        if prefix not in nodes:
            nodes[prefix] = len(nodes)
            weights.append(-negative_weight)
        if kind == 0:
            depth = len(key)
            if key[-1] + 1 < ranks[depth - 1]:
                heapq.heappush(heap, table_candidate((*key[:-1], key[-1] + 1)))
            if depth < depths and ranks[depth] > 0:
                heapq.heappush(heap, table_candidate((*key, 0)))
        elif key[0] < steps[kind - 1]:
            heapq.heappush(heap, path_candidate(kind - 1, key[0] + 1))

    in_table = [{int(table_token[d][r]) for r in first[d]} for d in range(depths)]
    in_paths = {
        tuple(int(t) for t in paths[i].token[:n]) for i in range(len(paths)) for n in range(1, steps[i] + 1)
    }

    def source_of(prefix: tuple[int, ...]) -> int:
        if not prefix:
            return 0
        table = len(prefix) <= depths and all(t in in_table[d] for d, t in enumerate(prefix))
        return (FROM_TABLE if table else 0) | (FROM_PATH if prefix in in_paths else 0)

    return Tree(
        token=np.array([root] + [p[-1] for p in nodes if p], dtype=np.int32),
        parent=np.array([-1] + [nodes[p[:-1]] for p in nodes if p], dtype=np.int32),
        depth=np.array([len(p) for p in nodes], dtype=np.int32),
        source=np.array([source_of(p) for p in nodes], dtype=np.int32),
        weight=np.array(weights, dtype=np.float64),
    )


def ancestors(parent: npt.NDArray[Any], node: int) -> list[int]:
    """The nodes that `node` sees: from the root down to itself. parent: integers [N]."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parent[node])
    return path[::-1]


def visible(parent: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Boolean [N, N]: row i is true at the nodes that node i sees."""
    n = len(parent)
    mask = np.zeros((n, n), dtype=np.bool_)
    for i in range(n):
        mask[i, ancestors(parent, i)] = True
    return mask


def visibility(parent: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The same as a bitmask, uint32 [N, ceil(N / 32)], bit j % 32 of word j / 32."""
    mask = visible(parent)
    n = len(parent)
    padded = np.zeros((n, (n + 31) // 32 * 32), dtype=np.uint32)
    padded[:, :n] = mask
    shifts = np.arange(32, dtype=np.uint32)
    words: npt.NDArray[np.uint32] = (padded.reshape(n, -1, 32) << shifts).sum(axis=2, dtype=np.uint32)
    return words


@dataclass(frozen=True)
class Accepted:
    """path: rows to commit, the root first; emitted: the target's token after each of them; failed: the walk
    came to a row after which no token could be chosen."""

    path: list[int]
    emitted: list[int]
    failed: bool


def accept(
    token: npt.NDArray[Any],
    parent: npt.NDArray[Any],
    selected: npt.NDArray[Any],
    rows: int,
    limit: int,
    stops: Sequence[int] = (),
) -> Accepted:
    """Walk from the root while the target's token is a child among the first `rows` nodes.

    token, parent: integers [N]; selected: integers [N], the target's token after each node, -1 where there is
    none. The walk ends where plain decoding would: behind a token of `stops` and after `limit` tokens.
    """
    children = {(int(parent[i]), int(token[i])): i for i in range(rows - 1, 0, -1)}
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = 0
    while node is not None and len(path) < limit and not (emitted and emitted[-1] in stops):
        wanted = int(selected[node])
        if wanted < 0:
            return Accepted(path, emitted, True)
        path.append(node)
        emitted.append(wanted)
        node = children.get((node, wanted))
    return Accepted(path, emitted, False)
