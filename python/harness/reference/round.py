"""Decoding, plainly and with draft trees (counterpart of cpp/engine's round and session), greedy.

Both walk the same model; the tree round verifies all nodes in one forward, keeps the accepted path's cache
rows and drops the rest. Lossless by construction where the model's rows are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.reference import ddtree
from harness.reference.model import LayerCache, Model

Array = npt.NDArray[Any]
# (token of the root, its absolute position) -> draft tree
Draft = Callable[[int, int], ddtree.Tree]


@dataclass(frozen=True)
class Plain:
    """tokens [N]; logits [N, vocab], those behind each token; gap [N]: largest minus second largest logit."""

    tokens: list[int]
    logits: Array
    gap: Array


@dataclass(frozen=True)
class Round:
    """One verify: the tree, its root's position, and the walk, cut where the run ends."""

    tree: ddtree.Tree
    position: int
    accepted: ddtree.Accepted


@dataclass(frozen=True)
class Tree:
    """tokens [N]; logits [N, vocab]; rounds; target_forwards counts the prefill once."""

    tokens: list[int]
    logits: Array
    rounds: list[Round]

    @property
    def target_forwards(self) -> int:
        """Rounds and the prefill."""
        return len(self.rounds) + 1


def extend(cache: list[LayerCache], own: list[LayerCache], rows: Sequence[int]) -> list[LayerCache]:
    """The cache with some rows of a forward appended."""
    return [old.extended(new.select(rows)) for old, new in zip(cache, own, strict=True)]


def top_gap(logits: Array) -> Array:
    """[R]: largest minus second largest entry of each row."""
    top = -np.partition(-logits, 1, axis=-1)[..., :2]
    gap: Array = np.abs(top[..., 0] - top[..., 1])
    return gap


def decode_plain(model: Model, prompt: Sequence[int], count: int) -> Plain:
    """`count` greedy tokens after the prompt, one forward each."""
    out = model.forward(prompt, range(len(prompt)))
    cache, row = out.cache, out.logits[-1]
    tokens, logits = [int(row.argmax())], [row]
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        out = model.forward(tokens[-1:], [position], cache=cache)
        cache = extend(cache, out.cache, [0])
        logits.append(out.logits[0])
        tokens.append(int(out.logits[0].argmax()))
    return Plain(tokens, np.array(logits), top_gap(np.array(logits)))


def decode_ddtree(model: Model, prompt: Sequence[int], count: int, draft: Draft) -> Tree:
    """`count` greedy tokens after the prompt with a draft tree verified per forward."""
    out = model.forward(prompt, range(len(prompt)))
    cache = out.cache
    tokens, logits = [int(out.logits[-1].argmax())], [out.logits[-1]]
    rounds: list[Round] = []
    while len(tokens) < count:
        start = len(prompt) + len(tokens) - 1
        tree = draft(tokens[-1], start)
        seen = np.concatenate(
            [np.ones((tree.count + 1, start), dtype=np.bool_), ddtree.visible(tree.parent)], axis=1
        )
        out = model.forward(tree.token, start + tree.depth, seen, cache)
        walk = ddtree.accept(
            tree.token, tree.parent, out.logits.argmax(axis=-1), tree.count + 1, count - len(tokens)
        )
        cache = extend(cache, out.cache, walk.path)
        tokens += walk.emitted
        logits += [out.logits[i] for i in walk.path]
        rounds.append(Round(tree, start, walk))
    return Tree(tokens, np.array(logits), rounds)
