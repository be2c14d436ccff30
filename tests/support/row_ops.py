"""Every row op of the backend in one form, so that the same laws can be put to all of them.

A RowOp makes a pool of input rows and runs any selection of them; output i belongs to row i of the selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kernel_inputs import KINDS, MAX_ANCESTORS, angles, hostile_rows, matrix, normal, world

from kdtree_engine._native import ops

Arrays = dict[str, npt.NDArray[Any]]
Outputs = tuple[npt.NDArray[Any], ...]
POOL = 80
LATENT, ROPE, HEADS = 37, 10, 5


@dataclass
class RowOp:
    """rows: the pool, arrays that share their first axis. run(rows, **how): the op's outputs, first axis rows;
    `how` is threads, isa, live."""

    rows: Arrays
    run: Callable[..., Outputs]


def one(output: npt.NDArray[Any]) -> Outputs:
    return (output,)


def _linear(kind: str, accumulate: bool) -> RowOp:
    rng = np.random.default_rng(1)
    # Ragged, and large enough that one row's work is given to two threads.
    width, out = (100, 1037) if kind in ("f32", "bf16") else (160, 1037)
    w = matrix(rng, kind, out, width).packed
    rows: Arrays = {"x": hostile_rows(rng, POOL, width)}
    if not accumulate:
        return RowOp(rows, lambda r, **how: one(ops.linear(r["x"], w, **how)))
    rows["y"] = hostile_rows(rng, POOL, out)

    def run(r: Arrays, **how: Any) -> Outputs:
        y = r["y"].copy()
        ops.linear(r["x"], w, add_to=y, **how)
        return one(y)

    return RowOp(rows, run)


def _gated(kind: str) -> RowOp:
    rng = np.random.default_rng(2)
    gate, up = (matrix(rng, kind, 70, 96, 0.2).packed for _ in range(2))
    return RowOp({"x": hostile_rows(rng, POOL, 96)}, lambda r, **how: one(ops.gated_linear(r["x"], gate, up, **how)))


def _embed(kind: str) -> RowOp:
    rng = np.random.default_rng(3)
    table = matrix(rng, kind, 50, 45).packed
    rows: Arrays = {"token": rng.integers(0, 50, POOL).astype(np.int32)}
    return RowOp(rows, lambda r, **how: one(ops.embed(r["token"], table, **how)))


def _norm() -> RowOp:
    rng = np.random.default_rng(4)
    weight = normal(rng, 45)
    return RowOp({"x": hostile_rows(rng, POOL, 50)}, lambda r, **how: one(ops.rms_norm(r["x"], weight, 1e-6, **how)))


def _gather() -> RowOp:
    rng = np.random.default_rng(5)
    x = hostile_rows(rng, 90, 33)
    rows: Arrays = {"index": rng.integers(0, 90, POOL).astype(np.int32)}
    return RowOp(rows, lambda r, **how: one(ops.gather_rows(x, r["index"], 40, **how)[:, :33]))


def _absorb(kind: str, interleaved: bool) -> RowOp:
    rng = np.random.default_rng(6)
    nope = 64 if kind.startswith("w4") else 45
    key_up = matrix(rng, kind, HEADS * LATENT, nope).packed
    cos, sin = angles(300, ROPE)
    rows: Arrays = {
        "q": hostile_rows(rng, POOL, HEADS, nope + ROPE),
        "position": rng.integers(0, 300, POOL).astype(np.int32),
    }
    return RowOp(
        rows, lambda r, **how: one(ops.absorb_query(r["q"], key_up, cos, sin, interleaved, r["position"], **how))
    )


def _project(kind: str) -> RowOp:
    rng = np.random.default_rng(7)
    latent = 64 if kind.startswith("w4") else LATENT
    value_up = matrix(rng, kind, HEADS * 19, latent).packed
    rows: Arrays = {"o": hostile_rows(rng, POOL, HEADS, latent)}
    return RowOp(rows, lambda r, **how: one(ops.project_value(r["o"], value_up, **how)))


def _batch_rows(rng: np.random.Generator, lengths: list[int]) -> Arrays:
    """Prompt rows and tree rows of several sequences."""
    sequence = rng.integers(0, len(lengths), POOL).astype(np.int32)
    ancestors = np.full((POOL, MAX_ANCESTORS), -1, dtype=np.int32)
    count, prefix = np.zeros(POOL, dtype=np.int32), np.zeros(POOL, dtype=np.int32)
    for i in range(POOL):
        length = lengths[sequence[i]]
        if i % 4 == 0:  # a prompt row
            prefix[i] = rng.integers(1, length + 1)
            continue
        prefix[i] = length
        count[i] = rng.integers(1, MAX_ANCESTORS + 1)
        ancestors[i, : count[i]] = np.sort(rng.choice(65, count[i], replace=False))
    return {
        "sequence": sequence,
        "position": (prefix + count - 1).astype(np.int32),
        "prefix": prefix,
        "ancestor_count": count,
        "ancestors": ancestors,
    }


BATCH = ("sequence", "position", "prefix", "ancestor_count", "ancestors")


def _attend() -> RowOp:
    rng = np.random.default_rng(8)
    lengths = [1, 63, 64, 65, 200]
    w = world(rng, lengths, LATENT, ROPE)
    w.scratch[11, 3] = np.nan  # rows that see scratch row 11 are NaN; the others must not notice
    rows = _batch_rows(rng, lengths) | {"q": hostile_rows(rng, POOL, HEADS, w.width)}

    def run(r: Arrays, **how: Any) -> Outputs:
        batch = {name: r[name] for name in BATCH}
        return one(ops.attend(r["q"], w.pages, w.scratch, w.page_table, w.rope, 0.25, **batch, **how))

    return RowOp(rows, run)


def _write_latent() -> RowOp:
    rng = np.random.default_rng(9)
    sequences, width = 3, LATENT + ROPE
    weight = normal(rng, LATENT)
    cos, sin = angles(192, ROPE)
    page_table = np.arange(3 * sequences, dtype=np.int32)[::-1].reshape(sequences, 3).copy()
    # Each row has a slot of its own, wherever it stands.
    slot = rng.permutation(sequences * 192)[:POOL]
    tree = np.arange(POOL) % 3 == 0
    rows: Arrays = {
        "ckv": hostile_rows(rng, POOL, width),
        "sequence": (slot // 192).astype(np.int32),
        "position": (slot % 192).astype(np.int32),
        "prefix": np.where(tree, slot % 192, slot % 192 + 1).astype(np.int32),
        "ancestor_count": tree.astype(np.int32),
        "ancestors": np.zeros((POOL, MAX_ANCESTORS), dtype=np.int32),
    }

    def run(r: Arrays, **how: Any) -> Outputs:
        pages = np.full((9, 64, width), -1, dtype=np.int32).view(np.float32)
        scratch = np.full((POOL, width), -1, dtype=np.int32).view(np.float32)
        batch = {name: r[name] for name in BATCH}
        ops.write_latent(r["ckv"], weight, 1e-6, cos, sin, True, pages, scratch, page_table, **batch, **how)
        written = []
        for i in range(len(r["ckv"])):
            position, sequence = r["position"][i], r["sequence"][i]
            in_tree = r["ancestor_count"][i] > 0
            if not 0 <= position < 192:  # padding
                written.append(scratch[i])
            else:
                written.append(scratch[i] if in_tree else pages[page_table[sequence, position // 64], position % 64])
        return one(np.array(written))

    return RowOp(rows, run)


def _route(scoring: str, groups: tuple[int, int]) -> RowOp:
    rng = np.random.default_rng(10)
    gate = matrix(rng, "f32", 24, 50, 0.3).packed
    bias = normal(rng, 24) if scoring == "sigmoid_noaux_tc" else None
    rows: Arrays = {"x": hostile_rows(rng, POOL, 50)}
    return RowOp(
        rows, lambda r, **how: ops.route(r["x"], gate, bias, scoring, 4, *groups, normalize=True, scaling=2.5, **how)
    )


def _experts(kind: str, shared: bool) -> RowOp:
    rng = np.random.default_rng(11)
    hidden, inner, count, top_k = (96, 64, 7, 3) if kind.startswith("w4") else (50, 21, 7, 3)
    parts = [[matrix(rng, kind, *shape, 0.3).packed for _ in range(count)] for shape in ((inner, hidden),) * 2]
    down = [matrix(rng, kind, hidden, inner, 0.3).packed for _ in range(count)]
    experts = ops.Experts(parts[0], parts[1], down)
    rows: Arrays = {
        "x": hostile_rows(rng, POOL, hidden),
        "expert": np.array([rng.choice(count, top_k, replace=False) for _ in range(POOL)], dtype=np.int32),
        "weight": normal(rng, POOL, top_k),
        "shared": normal(rng, POOL, hidden),
        "y": normal(rng, POOL, hidden),
    }

    def run(r: Arrays, **how: Any) -> Outputs:
        y = r["y"].copy()
        ops.experts(r["x"], experts, r["expert"], r["weight"], r["shared"] if shared else None, y, **how)
        return one(y)

    return RowOp(rows, run)


DIM, KEY_HEADS, BLOCK = 18, 2, 9


def _draft_world(rng: np.random.Generator) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Pages and block of one draft layer, and a page table of one sequence out of order."""
    pages, block = normal(rng, 5, 64, 2, KEY_HEADS, DIM), normal(rng, 33, 2, KEY_HEADS, DIM)
    block[BLOCK:] = np.nan
    return pages, block, np.array([[3, 0, 4, 1]], dtype=np.int32)


def _norm_rotate() -> RowOp:
    rng = np.random.default_rng(13)
    weight = normal(rng, DIM)
    cos, sin = angles(300, DIM)
    rows: Arrays = {
        "x": hostile_rows(rng, POOL, HEADS, DIM),
        "position": rng.integers(0, 300, POOL).astype(np.int32),
    }
    return RowOp(rows, lambda r, **how: one(ops.norm_rotate(r["x"], weight, 1e-5, cos, sin, r["position"], **how)))


def _write_key_value() -> RowOp:
    rng = np.random.default_rng(14)
    weight = normal(rng, DIM)
    cos, sin = angles(256, DIM)
    _, block, page_table = _draft_world(rng)
    rows: Arrays = {
        "k": hostile_rows(rng, POOL, KEY_HEADS, DIM),
        "v": hostile_rows(rng, POOL, KEY_HEADS, DIM),
        "position": rng.permutation(256)[:POOL].astype(np.int32),
    }

    def run(r: Arrays, **how: Any) -> Outputs:
        pages = np.full((5, 64, 2, KEY_HEADS, DIM), -1, dtype=np.int32).view(np.float32)
        ops.write_key_value(
            r["k"], r["v"], weight, 1e-5, cos, sin, r["position"], 0, False, pages, block, page_table, **how
        )
        unwritten = np.full((2, KEY_HEADS, DIM), -1, dtype=np.int32).view(np.float32)
        return one(np.array([
            pages[page_table[0, at // 64], at % 64] if at < 256 else unwritten for at in r["position"]
        ]))  # fmt: skip

    return RowOp(rows, run)


def _block_attend(window: int, causal: bool) -> RowOp:
    rng = np.random.default_rng(15)
    pages, block, page_table = _draft_world(rng)
    pages[page_table[0, 1], 3] = np.nan  # rows whose window reaches position 67 are NaN; the others must not notice
    start = 201
    rows: Arrays = {
        "q": hostile_rows(rng, POOL, 3 * KEY_HEADS, DIM),
        "position": (start + rng.integers(0, BLOCK, POOL)).astype(np.int32),
    }
    return RowOp(
        rows,
        lambda r, **how: one(
            ops.block_attend(
                r["q"], r["position"], start, 0, pages, block, page_table, BLOCK, window, causal, 0.3, **how
            )
        ),
    )


def _logits() -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(12)
    x = normal(rng, POOL, 700, scale=3.0)
    x[::7, rng.integers(0, 700, 5)] = np.nan
    x[3::7, rng.integers(0, 700, 300)] = -np.inf
    x[5] = -np.inf
    x[6] = 1.5
    x[8, 17] = np.inf
    x[9::7] = np.round(x[9::7])
    return x


def _top_k() -> RowOp:
    return RowOp({"x": _logits()}, lambda r, **how: ops.top_k(r["x"], 9, **how))


def _select(**params: float) -> RowOp:
    rows: Arrays = {"x": _logits(), "position": np.arange(POOL, dtype=np.int32) * 3}
    return RowOp(rows, lambda r, **how: one(ops.select(r["x"], r["position"], seed=77, **params, **how)))


ROW_OPS: dict[str, Callable[[], RowOp]] = {
    **{f"linear_{kind}": (lambda kind=kind: _linear(kind, False)) for kind in KINDS},  # type: ignore[misc]
    "linear_accumulate": lambda: _linear("f32", True),
    "gated_linear_f32": lambda: _gated("f32"),
    "gated_linear_w4": lambda: _gated("w4_bf16"),
    "embed_f32": lambda: _embed("f32"),
    "embed_bf16": lambda: _embed("bf16"),
    "rms_norm": _norm,
    "gather_rows": _gather,
    "absorb_query_interleaved": lambda: _absorb("f32", True),
    "absorb_query_halves": lambda: _absorb("bf16", False),
    "absorb_query_w4": lambda: _absorb("w4_f32", True),
    "project_value": lambda: _project("f32"),
    "project_value_w4": lambda: _project("w4_bf16"),
    "attend": _attend,
    "write_latent": _write_latent,
    "route_sigmoid": lambda: _route("sigmoid_noaux_tc", (1, 1)),
    "route_sigmoid_groups": lambda: _route("sigmoid_noaux_tc", (4, 2)),
    "route_softmax": lambda: _route("softmax_greedy", (1, 1)),
    "route_softmax_groups": lambda: _route("softmax_greedy", (4, 2)),
    "experts_f32": lambda: _experts("f32", True),
    "experts_w4": lambda: _experts("w4_bf16", True),
    "experts_no_shared": lambda: _experts("bf16", False),
    "norm_rotate": _norm_rotate,
    "write_key_value": _write_key_value,
    "block_attend": lambda: _block_attend(0, False),
    "block_attend_window": lambda: _block_attend(137, False),
    "block_attend_window_causal": lambda: _block_attend(70, True),
    "top_k": _top_k,
    "select_greedy": lambda: _select(),
    "select_temperature": lambda: _select(temperature=0.8),
    "select_top_k": lambda: _select(temperature=1.0, top_k=20),
    "select_top_p": lambda: _select(temperature=1.5, top_p=0.9),
    "select_everything": lambda: _select(temperature=1.2, top_k=200, top_p=0.95, min_p=0.01),
}
