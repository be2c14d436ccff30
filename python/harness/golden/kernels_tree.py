"""Kernel bundles of the round: tree build, tree attention, accept.

Tensors are named CASE.in.NAME and CASE.out.NAME. Integers, and weights of nodes, are exact; attention output
is float64 rounded to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import drafts, hashing
from harness.reference import ddtree
from harness.reference.model import softmax

Array = npt.NDArray[Any]
Case = dict[str, Array]
NAN, INF = float("nan"), float("inf")
DEEPEST = 64  # depth of the deepest node: kMaxDepth


def i32(x: Any) -> Array:
    """int32 array, possibly rank 0."""
    return np.array(x, dtype=np.int32)


def case(name: str, inputs: Case, outputs: Case) -> Case:
    """One case's tensors under their full names."""
    return {f"{name}.in.{k}": v for k, v in inputs.items()} | {
        f"{name}.out.{k}": v for k, v in outputs.items()
    }


def table(name: str, depth: int, width: int, step: int = 40, vocab: int = 1000) -> tuple[Array, Array]:
    """A made-up draft table: different tokens in a row, descending log-probabilities in 64ths (ties for small
    steps)."""
    token = [hashing.distinct(f"{name}/{d}", width, vocab) for d in range(depth)]
    falls = hashing.integers(f"{name}/falls", (depth, width), 0, step + 1)
    logp = (-np.cumsum(falls, axis=1) / 64).astype(np.float32)
    return i32(token).reshape(depth, width), logp


# ------------------------------------------------------------------------------------------------------------
# build


def build_case(
    name: str,
    token: Array,
    logp: Array,
    budget: int = 64,
    max_depth: int = 64,
    paths: Sequence[ddtree.Path] = (),
) -> Case:
    """Inputs and the expected tree. Paths are padded to DEEPEST with token -1 and NaN."""
    root = 7
    path_token = np.full((len(paths), DEEPEST), -1, dtype=np.int32)
    path_logp = np.full((len(paths), DEEPEST), NAN, dtype=np.float32)
    for i, p in enumerate(paths):
        path_token[i, : len(p.token)] = p.token
        path_logp[i, : len(p.token)] = p.logp
    tree = ddtree.build_tree(root, token, logp, budget, max_depth, paths)
    return case(
        name,
        {
            "root": i32(root),
            "budget": i32(budget),
            "max_depth": i32(max_depth),
            "table_token": i32(token),
            "table_logp": logp.astype(np.float32),
            "path_length": i32([len(p.token) for p in paths]),
            "path_token": path_token,
            "path_logp": path_logp,
        },
        {
            "token": tree.token,
            "parent": tree.parent,
            "depth": tree.depth,
            "source": tree.source,
            "weight": tree.weight,
            "visibility": ddtree.visibility(tree.parent).view(np.int32),
        },
    )


def poisoned(name: str, value: float, depth: int, rank: int) -> Case:
    """A table with one entry replaced."""
    token, logp = table("build/poisoned", 6, 8)
    logp[depth, rank] = value
    return build_case(name, token, logp)


def tree_build() -> Case:
    """Every rule of the builder, one case each."""
    wide, ties = table("build/wide", 16, 64, 12), table("build/ties", 5, 6, 2)
    flat = (wide[0][:4, :6], np.full((4, 6), -0.5, dtype=np.float32))
    zeros = (wide[0][:3, :4], np.zeros((3, 4), dtype=np.float32))
    narrow, deep = table("build/narrow", 16, 1), table("build/deep", 32, 2, 20)
    empty = (np.zeros((0, 0), dtype=np.int32), np.zeros((0, 0), dtype=np.float32))
    small = table("build/small", 3, 3)
    doubled = (
        i32([[5, 6, 5, 8], [5, 5, 6, 9]]),
        np.array([[-0.5, -1, -2, -3], [-1, -1, -1.5, -4]], np.float32),
    )
    everywhere = (np.full((32, 64), 5, dtype=np.int32), np.full((32, 64), -0.5, dtype=np.float32))
    negative = (i32([[5, 6, -1, 8], [3, -1, 4, 9]]), doubled[1])
    greedy = [int(t) for t in small[0][:, 0]]
    chain = ddtree.Path(list(range(100, 164)), [-0.0625] * 64)
    other = ddtree.Path([greedy[0], 900, 901], [-0.25, -0.25, -0.25])
    same = ddtree.Path(greedy, [float(x) for x in small[1][:, 0]])
    heavy = ddtree.Path(greedy, [-0.015625] * 3)
    light = ddtree.Path(greedy, [-20.0] * 3)
    cases: Case = {}
    for budget in (0, 1, 2, 3, 7, 8, 16, 31, 32, 63, 64):
        cases |= build_case(f"wide_budget_{budget:02}", *wide, budget=budget)
    cases |= build_case("ties_many", *ties)
    cases |= build_case("ties_all_equal", *flat)
    cases |= build_case("ties_all_zero", *zeros)
    cases |= build_case("one_rank", *narrow)
    cases |= build_case("one_rank_budget_5", *narrow, budget=5)
    cases |= build_case("one_depth", wide[0][:1, :8], wide[1][:1, :8])
    cases |= build_case("one_entry", wide[0][:1, :1], wide[1][:1, :1])
    cases |= build_case("no_table", *empty)
    cases |= build_case("largest_depth", *deep)
    cases |= build_case("max_depth_1", *wide, max_depth=1)
    cases |= build_case("max_depth_3", *wide, max_depth=3)
    cases |= build_case("exhausted", *small)
    cases |= build_case("same_token_twice", *doubled)
    cases |= build_case("same_token_everywhere", *everywhere)
    cases |= build_case("negative_token", *negative)
    cases |= poisoned("nan_first", NAN, 0, 0)
    cases |= poisoned("nan_in_row", NAN, 0, 3)
    cases |= poisoned("nan_deeper", NAN, 2, 0)
    cases |= poisoned("minus_infinity", -INF, 1, 4)
    cases |= poisoned("plus_infinity", INF, 1, 0)
    cases |= poisoned("positive", 0.015625, 0, 2)
    cases |= poisoned("rising", -0.0, 1, 3)
    cases |= build_case("path_only", *empty, paths=[chain])
    cases |= build_case("path_only_budget_9", *empty, budget=9, paths=[chain])
    cases |= build_case("path_max_depth_4", *small, max_depth=4, paths=[chain])
    cases |= build_case("path_and_table", *small, paths=[other])
    cases |= build_case("path_equal_to_table", *small, paths=[same])
    cases |= build_case("path_heavier_than_table", *small, paths=[heavy])
    cases |= build_case("path_lighter_than_table", *small, budget=4, paths=[light])
    cases |= build_case(
        "paths_share_a_prefix", *small, paths=[other, ddtree.Path([greedy[0], 902], [-0.25, -0.25])]
    )
    cases |= build_case("paths_equal", *empty, paths=[other, other])
    cases |= build_case("path_empty", *small, paths=[ddtree.Path([], []), other])
    cases |= build_case("path_nan", *small, paths=[ddtree.Path([910, 911, 912], [-0.25, NAN, -0.25])])
    cases |= build_case("path_negative_token", *small, paths=[ddtree.Path([910, -1, 912], [-0.25] * 3)])
    planted = drafts.planted(
        "build/planted", [int(t) for t in hashing.integers("build/truth", (16,), 0, 320)], 320
    )
    cases |= build_case("planted", planted.token, planted.logp, max_depth=drafts.DEPTH)
    return cases


# ------------------------------------------------------------------------------------------------------------
# accept


def random_tree(name: str, nodes: int, fan: int = 6) -> ddtree.Tree:
    """A tree of a made-up table, `nodes` draft nodes."""
    return ddtree.build_tree(3, *table(name, 32, fan, 60), nodes, 32)


def accept_case(
    name: str, tree: ddtree.Tree, selected: Array, rows: int, limit: int = 65, stops: Sequence[int] = ()
) -> Case:
    """Inputs and the expected walk."""
    walk = ddtree.accept(tree.token, tree.parent, selected, rows, limit, stops)
    return case(
        name,
        {
            "token": tree.token,
            "parent": tree.parent,
            "selected": i32(selected),
            "rows": i32(rows),
            "limit": i32(limit),
            "stops": i32(stops),
        },
        {"path": i32(walk.path), "emitted": i32(walk.emitted), "failed": i32(int(walk.failed))},
    )


def agreeing(tree: ddtree.Tree, node: int) -> Array:
    """Target tokens that lead the walk to a node; tokens no child has elsewhere."""
    selected = np.full(tree.count + 1, 5000, dtype=np.int32)
    chain = ddtree.ancestors(tree.parent, node)
    selected[chain[:-1]] = tree.token[chain[1:]]
    return selected


def accept() -> Case:
    """Walks of every kind: none, full depth, non-first children, cut by the verified rows, ended by -1."""
    cases: Case = {}
    chain = ddtree.build_tree(3, *table("accept/chain", 32, 1), 64, 64)
    tree, whole = random_tree("accept/tree", 64), drafts.BUDGET + 1
    deepest = int(tree.depth.argmax())
    cases |= accept_case("root_only", tree.truncated(0), i32([5]), 1)
    cases |= accept_case("nothing_agrees", tree, agreeing(tree, 0), whole)
    cases |= accept_case("chain_whole", chain, agreeing(chain, chain.count), chain.count + 1)
    cases |= accept_case("chain_broken", chain, agreeing(chain, 9), chain.count + 1)
    cases |= accept_case("deepest", tree, agreeing(tree, deepest), whole)
    cases |= accept_case("deepest_beyond_rows", tree, agreeing(tree, deepest), deepest)
    cases |= accept_case("last_node", tree, agreeing(tree, 64), whole)
    cases |= accept_case("last_node_beyond_rows", tree, agreeing(tree, 64), 64)
    branching = max(range(65), key=lambda i: drafts.branches_on(tree, ddtree.ancestors(tree.parent, i)))
    cases |= accept_case("children_that_are_not_first", tree, agreeing(tree, branching), whole)
    way = ddtree.ancestors(tree.parent, deepest)
    walk = [int(t) for t in tree.token[way[1:]]]
    cases |= accept_case("limit_1", tree, agreeing(tree, deepest), whole, 1)
    cases |= accept_case("limit_in_the_path", tree, agreeing(tree, deepest), whole, len(way) - 2)
    cases |= accept_case("limit_at_the_bonus", tree, agreeing(tree, deepest), whole, len(way))
    cases |= accept_case("limit_before_the_bonus", tree, agreeing(tree, deepest), whole, len(way) - 1)
    cases |= accept_case("stop_first", tree, agreeing(tree, deepest), whole, stops=[walk[0]])
    cases |= accept_case("stop_in_the_path", tree, agreeing(tree, deepest), whole, stops=[999999, walk[2]])
    cases |= accept_case("stop_is_the_bonus", tree, agreeing(tree, deepest), whole, stops=[5000])
    cases |= accept_case(
        "stop_off_the_path", tree, agreeing(tree, deepest), whole, stops=[int(tree.token[64])]
    )
    for at, name in ((0, "root"), (1, "second_row"), (len(way) - 1, "last_row")):
        nothing = agreeing(tree, deepest)
        nothing[way[at]] = -1
        cases |= accept_case(f"no_token_{name}", tree, nothing, whole)
    nothing = agreeing(tree, deepest)
    nothing[way[2]] = -1
    cases |= accept_case("no_token_behind_a_stop", tree, nothing, whole, stops=[walk[1]])
    cases |= accept_case("no_token_behind_the_limit", tree, nothing, whole, 2)
    aside = np.full(65, -1, dtype=np.int32)
    aside[way] = agreeing(tree, deepest)[way]
    cases |= accept_case("no_token_off_the_path", tree, aside, whole)
    elsewhere = np.full(65, tree.token[1], dtype=np.int32)
    cases |= accept_case("same_token_everywhere", tree, elsewhere, whole)
    for i in range(16):
        t = random_tree(f"accept/{i}", hashing.integer(f"accept/{i}/nodes", 1, 65), 2 + i % 3)
        choices = [
            int(t.token[j]) for j in hashing.integers(f"accept/{i}/selected", (t.count + 1,), 0, t.count + 1)
        ]
        to_end = agreeing(t, hashing.integer(f"accept/{i}/end", 0, t.count + 1))
        limit = hashing.integer(f"accept/{i}/limit", 1, 12)
        mixed = np.where(to_end == 5000, i32(choices), to_end)
        cases |= accept_case(f"random_{i:02}", t, mixed, t.count + 1, limit if i % 2 else 65)
    return cases


# ------------------------------------------------------------------------------------------------------------
# attention


def attention_case(name: str, tree: ddtree.Tree, start: int, heads: int, latent: int, rope: int) -> Case:
    """Rows of a tree over `start` committed positions and their ancestors, one softmax each."""
    width, rows = latent + rope, tree.count + 1
    q = hashing.dyadic(f"attend/{name}/q", (rows, heads, width), 255, 7)
    committed = hashing.dyadic(f"attend/{name}/committed", (start, width), 255, 7)
    scratch = hashing.dyadic(f"attend/{name}/scratch", (rows, width), 255, 7)
    scale = np.float32(round(64 * 3.0 * float(width) ** -0.5) / 64)
    keys = np.concatenate([committed, scratch]).astype(np.float64)
    visible = np.concatenate([np.ones((rows, start), dtype=np.bool_), ddtree.visible(tree.parent)], axis=1)
    scores = q.astype(np.float64).transpose(1, 0, 2) @ keys.T * float(scale)
    out = softmax(np.where(visible, scores, -np.inf)) @ keys[:, :latent]
    return case(
        name,
        {
            "q": q,
            "committed": committed,
            "scratch": scratch,
            "parent": tree.parent,
            "depth": tree.depth,
            "scale": np.array(scale, dtype=np.float32),
        },
        {"o": out.transpose(1, 0, 2).astype(np.float32)},
    )


def tree_attention() -> Case:
    """Trees of every form over prefixes around the chunk borders, chains included that cross one."""
    cases: Case = {}
    root = random_tree("attend/root", 0)
    chain = ddtree.build_tree(3, *table("attend/chain", 32, 1), 64, 64)
    long_chain = ddtree.build_tree(
        3,
        np.zeros((0, 0), np.int32),
        np.zeros((0, 0), np.float32),
        64,
        64,
        [ddtree.Path([1] * 64, [-0.5] * 64)],
    )
    star = ddtree.build_tree(3, *table("attend/star", 1, 64), 64, 64)
    for start in (0, 1, 62, 63, 64, 65, 127, 128, 200):
        cases |= attention_case(f"root_{start:03}", root, start, 2, 48, 16)
    for start in (0, 40, 63, 64):
        cases |= attention_case(f"chain_{start:03}", chain, start, 2, 48, 16)
        cases |= attention_case(f"tree_{start:03}", random_tree(f"attend/tree/{start}", 64), start, 2, 48, 16)
    cases |= attention_case("long_chain_010", long_chain, 10, 1, 32, 8)
    cases |= attention_case("long_chain_063", long_chain, 63, 1, 32, 8)
    cases |= attention_case("star_061", star, 61, 1, 32, 8)
    cases |= attention_case("ragged_widths", random_tree("attend/ragged", 17, 3), 70, 3, 72, 24)
    cases |= attention_case("k2_widths", random_tree("attend/k2", 6, 3), 66, 2, 512, 64)
    for i in range(8):
        nodes = hashing.integer(f"attend/{i}/nodes", 1, 33)
        start = hashing.integer(f"attend/{i}/start", 0, 140)
        cases |= attention_case(f"random_{i}", random_tree(f"attend/{i}", nodes, 3), start, 2, 40, 8)
    return cases
