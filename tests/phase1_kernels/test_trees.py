"""Tree ops of the backend on arrays, against the oracle; their refusals."""

from __future__ import annotations

import numpy as np
import pytest

from harness.reference import ddtree
from kdtree_engine._native import Error, ops

NO_PATHS = (np.zeros(0, np.int32), np.zeros((0, 64), np.int32), np.zeros((0, 64), np.float32))


def random_table(rng: np.random.Generator, depth: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    token = np.array([rng.permutation(1000)[:width] for _ in range(depth)], dtype=np.int32)
    logp = -np.sort(rng.integers(0, 200, (depth, width)) / 32, axis=1).astype(np.float32)
    return token.reshape(depth, width), logp.reshape(depth, width)


def test_build_and_rows_against_the_oracle() -> None:
    """Catches arrays that are copied short, a budget or depth that is not passed on, and ancestor lists in another
    order or to another node."""
    rng = np.random.default_rng(0)
    for case in range(40):
        depth, width = int(rng.integers(0, 33)), int(rng.integers(1, 65))
        token, logp = random_table(rng, depth, width)
        budget, limit = int(rng.integers(0, 65)), int(rng.integers(0, 40))
        count = int(rng.integers(0, 4))
        paths = [
            ddtree.Path(
                [int(t) for t in rng.integers(0, 1000, int(rng.integers(1, 30)))],
                [],
            )
            for _ in range(count)
        ]
        paths = [ddtree.Path(p.token, (-rng.integers(0, 64, len(p.token)) / 32).tolist()) for p in paths]
        path_token, path_logp = np.zeros((count, 64), np.int32), np.zeros((count, 64), np.float32)
        for i, p in enumerate(paths):
            path_token[i, : len(p.token)], path_logp[i, : len(p.token)] = p.token, p.logp
        length = np.array([len(p.token) for p in paths], dtype=np.int32)
        got = ops.build_tree(token, logp, length, path_token, path_logp, budget, limit, 7)
        want = ddtree.build_tree(7, token, logp, budget, limit, paths)
        for name, values in zip(("token", "parent", "depth", "source", "weight"), got, strict=True):
            assert np.array_equal(values, getattr(want, name)), (case, name)

        nodes = int(rng.integers(0, 65))
        live, row_token, sequence, position, prefix, ancestor_count, ancestors = ops.tree_rows(
            got[0], got[1], nodes, 3, 100
        )
        assert live == min(nodes, want.count) + 1
        for i in range(live):
            chain = ddtree.ancestors(want.parent, i)
            assert ancestors[i, : ancestor_count[i]].tolist() == chain
            assert (row_token[i], sequence[i], prefix[i]) == (want.token[i], 3, 100)
            assert position[i] == 100 + want.depth[i]
        assert (row_token[live:] == -1).all() and (ancestor_count[live:] == -1).all()  # padding is not written


def test_accept_cuts_where_plain_decoding_ends() -> None:
    """Catches a walk past the limit, past a stop, or into rows that were not verified, and an error behind the cut
    that is reported all the same."""
    token = np.array([1, 2, 3, 4], dtype=np.int32)
    parent = np.array([-1, 0, 1, 2], dtype=np.int32)
    selected = np.array([2, 3, 4, -1], dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)

    def walk(live: int, limit: int, stops: np.ndarray = none) -> tuple[list[int], list[int], bool]:
        path, emitted, failed = ops.accept(token, parent, selected, live, limit, stops)
        return path.tolist(), emitted.tolist(), failed

    assert walk(4, 99) == ([0, 1, 2], [2, 3, 4], True)
    assert walk(4, 3) == ([0, 1, 2], [2, 3, 4], False)
    assert walk(4, 1) == ([0], [2], False)
    assert walk(3, 99) == ([0, 1, 2], [2, 3, 4], False)
    assert walk(1, 99) == ([0], [2], False)
    assert walk(4, 99, np.array([9, 3], dtype=np.int32)) == ([0, 1], [2, 3], False)


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 65},
        {"budget": -1},
        {"max_depth": 65},
        {"depth": 33},
        {"width": 65},
        {"length": 65},
        {"length": -1},
    ],
)
def test_build_refuses_what_does_not_fit(change: dict[str, int]) -> None:
    """Catches sizes beyond the arrays that the rest of the engine allocates: one sentence with the numbers."""
    depth, width = change.get("depth", 4), change.get("width", 8)
    token, logp = np.zeros((depth, width), np.int32), np.zeros((depth, width), np.float32)
    length = np.array([change.get("length", 2)], dtype=np.int32)
    paths = (length, np.zeros((1, 64), np.int32), np.zeros((1, 64), np.float32))
    with pytest.raises(Error) as error:
        ops.build_tree(token, logp, *paths, change.get("budget", 8), change.get("max_depth", 64), 7)
    assert error.value.code == "invalid_argument" and str(next(iter(change.values()))) in str(error.value)


def test_rows_refuse_a_parent_that_comes_later() -> None:
    """Catches an ancestor list that is copied from a row that is not written yet."""
    token, parent = np.zeros(3, np.int32), np.array([-1, 2, 0], dtype=np.int32)
    with pytest.raises(Error, match="node 1 has parent 2"):
        ops.tree_rows(token, parent, 2, 0, 0)
