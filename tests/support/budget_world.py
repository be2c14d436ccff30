"""Worlds for the budget: synthetic costs, drafters and targets, and a clock that only these numbers move.

A drafter knows, for each depth, a distribution over a few ranks; the target agrees with rank r of depth d with
exactly its probability (less off the spine, as measured on real drafters), unless the world says that drafts are
useless now. `claim` is what the drafter says instead of the truth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kdtree_engine import _native

TABLE, PATH = 1, 2
SIZES: list[int] = list(_native.CostTable.sizes)
RANKS = 8
OFF_SPINE = 0.3  # of the drafter's own probability
NO_TOKEN = -7
PATH_SECONDS = 1e-5


def sparse_moe(nodes: int, overhead: float = 4e-3) -> float:
    """Kimi K2 on eight GPUs: 384 experts, 8 a token, every distinct one read once, and a fixed overhead."""
    experts = 384 * (1 - (1 - 8 / 384) ** (nodes + 1))
    return overhead + (21 + 60 * experts * 0.0248) / (8 * 1790 * 0.8)


def dense(nodes: int) -> float:
    """Reading the weights is everything."""
    return 10e-3 + 5e-5 * nodes


def row_by_row(nodes: int) -> float:
    """An engine that reads its weights once per row: drafts hardly ever pay."""
    return 10e-3 * (1 + 0.9 * nodes)


COSTS = {"sparse_moe": sparse_moe, "dense": dense, "row_by_row": row_by_row}


@dataclass
class Tree:
    token: list[int] = field(default_factory=lambda: [-1])
    parent: list[int] = field(default_factory=lambda: [-1])
    source: list[int] = field(default_factory=lambda: [0])
    weight: list[float] = field(default_factory=lambda: [0.0])
    truth: list[float] = field(default_factory=lambda: [1.0])  # probability of each node, given its parent
    spine: list[bool] = field(default_factory=lambda: [True])

    @property
    def arrays(self) -> tuple[list[int], list[int], list[int], list[float]]:
        return self.token, self.parent, self.source, self.weight

    def add(self, parent: int, source: int, weight: float, truth: float, spine: bool) -> int:
        self.token.append(len(self.token) + 1000)
        self.parent.append(parent)
        self.source.append(source)
        self.weight.append(weight)
        self.truth.append(truth if spine or self.spine[parent] else truth * OFF_SPINE)
        self.spine.append(spine)
        return len(self.token) - 1


@dataclass
class World:
    cost: Callable[[int], float]
    sure: Callable[[np.random.Generator], float] | None  # probability of rank 1; None: no table
    draft_seconds: float = 1e-3
    depth: int = 7
    useful: Callable[[int], bool] = lambda emitted: True
    claim: Callable[[float], float] = lambda p: p
    path: list[float] = field(default_factory=list)  # what a path claims for its steps; its truth is `path_truth`
    path_truth: float = 0.0
    noise: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    @property
    def available(self) -> int:
        return (TABLE if self.sure else 0) | (PATH if self.path else 0)

    def seconds(self, nodes: int) -> float:
        """Of a verify, which runs at the next captured size; other work only ever adds time."""
        size = next(s for s in SIZES if s >= nodes)
        return self.cost(size) * (1 + self.noise * abs(self.rng.standard_normal()))

    def draft(self, asked: int) -> Tree:
        """The 64 likeliest prefixes, best first."""
        tree, heap, number = Tree(), [], 0
        rows: list[np.ndarray] = []
        if asked & TABLE and self.sure:
            for _ in range(self.depth):
                first = self.sure(self.rng)
                rows.append(np.array([first, *((1 - first) * 0.8 * 0.5 ** np.arange(1, RANKS))]))

        def push_table(parent: int, depth: int, rank: int, base: float) -> None:
            nonlocal number
            if depth < len(rows) and rank < RANKS:
                weight = base + np.log(self.claim(rows[depth][rank]))
                heapq.heappush(heap, (-weight, number, TABLE, parent, depth, rank, base))
                number += 1

        def push_path(parent: int, depth: int, base: float) -> None:
            nonlocal number
            if asked & PATH and depth < len(self.path):
                heapq.heappush(heap, (-(base + np.log(self.path[depth])), number, PATH, parent, depth, 0, base))
                number += 1

        push_table(0, 0, 0, 0.0)
        push_path(0, 0, 0.0)
        while heap and len(tree.token) <= 64:
            weight, _, source, parent, depth, rank, base = heapq.heappop(heap)
            if source == PATH:
                node = tree.add(parent, PATH, -weight, self.path_truth, tree.spine[parent])
                push_path(node, depth + 1, -weight)
                continue
            node = tree.add(parent, TABLE, -weight, float(rows[depth][rank]), tree.spine[parent] and rank == 0)
            push_table(parent, depth, rank + 1, base)
            push_table(node, depth + 1, 0, -weight)
        return tree

    def walk(self, tree: Tree, nodes: int, emitted: int) -> tuple[list[int], list[int]]:
        path, tokens, at = [0], [], 0
        useful = self.useful(emitted)
        while True:
            draw, chosen = self.rng.random(), -1
            for i in range(at + 1, nodes + 1):
                if tree.parent[i] != at or not useful:
                    continue
                draw -= tree.truth[i]
                if draw < 0:
                    chosen = i
                    break
            tokens.append(tree.token[chosen] if chosen > 0 else NO_TOKEN)
            if chosen < 0:
                return path, tokens
            path.append(chosen)
            at = chosen


@dataclass
class Outcome:
    tokens: int
    seconds: float
    rounds: list[tuple[int, int, int, int]]  # emitted before, sources asked, nodes verified, tokens emitted

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Memory:
    """What an engine keeps between sessions."""

    def __init__(self) -> None:
        self.costs = _native.CostTable()
        self.budget: _native.Budget | None = None


def simulate(
    world: World,
    tokens: int,
    fixed: int = -1,
    memory: Memory | None = None,
    repeats: Callable[[int], float] = lambda emitted: 0.0,
) -> Outcome:
    """One answer of `tokens` tokens in the world; `fixed` >= 0: with that budget always. `memory`: of the engine, a
    fresh one where none is given."""
    *_, last = answer(world, tokens, fixed, memory, repeats)
    return last


def answer(
    world: World,
    tokens: int,
    fixed: int = -1,
    memory: Memory | None = None,
    repeats: Callable[[int], float] = lambda emitted: 0.0,
) -> Iterator[Outcome]:
    """The same, round by round: the outcome so far. As in the engine, costs and one draft are timed before the first is
    paid for, and what was learned is left behind when the answer ends."""
    memory = memory or Memory()
    costs, budget = memory.costs, _native.Budget(fixed, memory.budget, tokens)
    clock, emitted, rounds = 0.0, 0, list[tuple[int, int, int, int]]()
    while emitted < tokens:
        if fixed < 0 and costs.plain_known:
            if not costs.measured:
                costs.measure(world.seconds)
            budget.expect_draft(TABLE, world.draft_seconds)
            budget.expect_draft(PATH, PATH_SECONDS)
        asked = budget.sources(world.available, costs, repeats(emitted))
        tree = world.draft(asked)
        nodes = budget.choose(*tree.arrays, costs)
        path, new = world.walk(tree, nodes, emitted)
        verify = world.seconds(nodes)
        table = world.draft_seconds if asked & TABLE else 0.0
        paths = PATH_SECONDS if asked & PATH else 0.0
        clock += verify + table + paths
        rounds.append((emitted, asked, nodes, len(new)))
        emitted += len(new)
        costs.observe(nodes, verify)
        budget.observe(*tree.arrays, nodes, path, new, asked, table, paths, verify, costs)
        if emitted >= tokens:
            memory.budget = budget
        yield Outcome(emitted, clock, rounds)
