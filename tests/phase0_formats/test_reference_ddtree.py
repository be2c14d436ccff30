"""The oracle's draft trees against exhaustive enumeration: a heap that forgets a candidate, breaks a tie the
other way or merges wrongly differs from sorting every candidate there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.reference import ddtree

# Dyadic log-probabilities with few values: sums are exact and ties are common.
LOGP = st.integers(0, 6).map(lambda k: -k / 4)


@st.composite
def proposals(draw):
    depth, width = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    token = np.array(
        [draw(st.lists(st.integers(0, 5), min_size=width, max_size=width)) for _ in range(depth)],
        dtype=np.int32,
    ).reshape(depth, width)
    logp = np.array(
        [sorted(draw(st.lists(LOGP, min_size=width, max_size=width)), reverse=True) for _ in range(depth)],
        dtype=np.float32,
    ).reshape(depth, width)
    paths = [
        ddtree.Path([t for t, _ in steps], [x for _, x in steps])
        for steps in draw(st.lists(st.lists(st.tuples(st.integers(0, 5), LOGP), max_size=5), max_size=3))
    ]
    return token, logp, paths


def enumerate_all(token, logp, paths, max_depth):
    """Every prefix: {tokens: (-weight, kind, tie key)} of its best candidate, and {tokens: sources}."""
    best: dict[tuple[int, ...], tuple] = {}
    sources: dict[tuple[int, ...], int] = {}

    def offer(prefix, key, bit):
        best[prefix] = min(best.get(prefix, key), key)
        sources[prefix] = sources.get(prefix, 0) | bit

    for depth in range(1, min(len(token), max_depth) + 1):
        for ranks in itertools.product(range(token.shape[1]), repeat=depth):
            weight = sum(float(logp[d, r]) for d, r in enumerate(ranks))
            offer(
                tuple(int(token[d, r]) for d, r in enumerate(ranks)), (-weight, 0, ranks), ddtree.FROM_TABLE
            )
    for index, path in enumerate(paths):
        for length in range(1, min(len(path.token), max_depth) + 1):
            key = (-float(sum(path.logp[:length])), index + 1, (length,))
            offer(tuple(path.token[:length]), key, ddtree.FROM_PATH)
    return best, sources


def tokens_of(tree, node):
    return tuple(int(tree.token[j]) for j in ddtree.ancestors(tree.parent, node)[1:])


@given(proposals(), st.integers(0, 30), st.integers(1, 5))
def test_build_is_the_sorted_list_of_all_prefixes(proposal, budget, max_depth):
    token, logp, paths = proposal
    best, sources = enumerate_all(token, logp, paths, max_depth)
    wanted = sorted(best, key=lambda prefix: best[prefix])[:budget]
    tree = ddtree.build_tree(9, token, logp, budget, max_depth, paths)
    prefixes = [tokens_of(tree, i) for i in range(tree.count + 1)]
    assert prefixes == [(), *wanted]
    assert tree.weight.tolist() == [0.0] + [-best[p][0] for p in wanted]
    assert tree.source.tolist() == [0] + [sources[p] for p in wanted]
    assert tree.depth.tolist() == [len(p) for p in prefixes]


@given(proposals(), st.integers(0, 30))
def test_smaller_budget_is_a_prefix(proposal, budget):
    """A node numbered, weighted or credited differently under a larger budget breaks the truncation by
    budget."""
    token, logp, paths = proposal
    small = ddtree.build_tree(9, token, logp, budget, 5, paths)
    large = ddtree.build_tree(9, token, logp, 64, 5, paths).truncated(budget)
    for field in ("token", "parent", "depth", "source", "weight"):
        assert np.array_equal(getattr(small, field), getattr(large, field)), field


@pytest.mark.parametrize(
    ("row", "usable"),
    [
        ([-0.5, -1.0, -2.0], 3),
        ([-0.5, np.nan, -2.0], 1),
        ([np.nan, -1.0, -2.0], 0),
        ([-0.5, -np.inf, -np.inf], 1),
        ([np.inf, -1.0, -2.0], 0),
        ([0.25, -1.0, -2.0], 0),
        ([-1.0, -0.5, -2.0], 1),
        ([0.0, 0.0, 0.0], 3),
        ([-0.5, -0.5, -0.25], 2),
    ],
)
def test_a_row_ends_at_its_first_unusable_entry(row, usable):
    """NaN, infinity, a positive value or a rise must cost the rest of the row, never reach a node's
    weight."""
    tokens, logp = np.array([[3, 4, 5]]), np.array([row], dtype=np.float32)
    assert ddtree.usable_ranks(tokens[0], logp[0]) == usable
    tree = ddtree.build_tree(0, tokens, logp, 64, 4)
    assert tree.count == usable
    assert np.isfinite(tree.weight).all()


def test_negative_tokens_end_rows_and_paths():
    """-1 marks an empty slot; as a node it would match a target that could choose nothing (-1)."""
    tree = ddtree.build_tree(
        0,
        np.array([[3, -1, 5]]),
        np.zeros((1, 3), np.float32),
        64,
        4,
        [ddtree.Path([7, -1, 8], [0.0, 0.0, 0.0])],
    )
    assert tree.token.tolist() == [0, 3, 7]


@given(proposals(), st.integers(0, 40))
def test_visibility_is_parenthood_closed(proposal, budget):
    """Row i must be its parent's row plus itself; the bitmask must say the same as the ancestor list."""
    token, logp, paths = proposal
    tree = ddtree.build_tree(9, token, logp, budget, 5, paths)
    mask, words = ddtree.visible(tree.parent), ddtree.visibility(tree.parent)
    for i in range(tree.count + 1):
        expected = np.zeros(tree.count + 1, dtype=bool) if i == 0 else mask[tree.parent[i]].copy()
        expected[i] = True
        assert np.array_equal(mask[i], expected)
        bits = [j for j in range(tree.count + 1) if words[i, j // 32] >> np.uint32(j % 32) & np.uint32(1)]
        assert bits == ddtree.ancestors(tree.parent, i)


@given(
    proposals(),
    st.lists(st.integers(-1, 5), min_size=41, max_size=41),
    st.integers(1, 41),
    st.integers(1, 8),
    st.lists(st.integers(0, 5), max_size=1),
)
def test_accept_is_the_longest_agreeing_path(proposal, selected, rows, limit, stops):
    """Among all nodes whose whole path agrees with the target, accept must end at the deepest; a node past
    the verified rows must not be walked to. The cut must fall where token by token decoding would stop."""
    token, logp, paths = proposal
    tree = ddtree.build_tree(9, token, logp, 40, 5, paths)
    rows = min(rows, tree.count + 1)
    walk = ddtree.accept(tree.token, tree.parent, np.array(selected), rows, limit, stops)
    agreeing = []
    for i in range(rows):
        chain = ddtree.ancestors(tree.parent, i)
        if all(tree.token[b] == selected[a] for a, b in itertools.pairwise(chain)):
            agreeing.append(chain)
    chain = max(agreeing, key=len)
    text = [selected[i] for i in chain]
    ends = [n + 1 for n, t in enumerate(text) if t in stops] + [limit, len(text)]
    length = min(ends)
    missing = text.index(-1) if -1 in text[:length] else None
    assert walk.failed == (missing is not None)
    assert walk.path == chain[: length if missing is None else missing]
    assert walk.emitted == [selected[i] for i in walk.path]


def test_repeated_tokens_do_not_multiply():
    """K^L rank paths that all stand for one chain: a builder that follows each of them never returns."""
    tree = ddtree.build_tree(0, np.full((32, 64), 5), np.full((32, 64), -0.5, np.float32), 64, 64)
    assert tree.count == 32
    assert tree.depth.tolist() == list(range(33))


def test_tokens_outside_the_vocabulary_end_rows_and_paths():
    """A token id past the embedding would be read out of bounds by the target."""
    row, logp = np.array([[3, 10, 5]]), np.zeros((1, 3), np.float32)
    tree = ddtree.build_tree(0, row, logp, 64, 4, [ddtree.Path([7, 10, 8], [0.0, 0.0, 0.0])], vocab=10)
    assert tree.token.tolist() == [0, 3, 7]
