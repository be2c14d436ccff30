"""The golden kernel bundles, run through the backend's ops: integers exact, floats within 1e-5 of the largest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_inputs import ISAS, Batch, World, attend

from harness.golden import generate
from harness.reference import ddtree
from kdtree_engine._native import ops

Arrays = dict[str, Any]
CASES = {
    f"{bundle}/{name}": (bundle, case)
    for bundle, make in generate.KERNELS.items()
    for name, case in generate.cases(generate.contiguous(make())).items()
}


def of(bundle: str) -> Any:
    names = [name for name, (b, _) in CASES.items() if b == bundle]
    return pytest.mark.parametrize("name", names)


def near(got: np.ndarray, want: np.ndarray) -> bool:
    """Tolerance: 1e-5 of the largest expected value, at least of 1."""
    return got.shape == want.shape and bool(np.abs(got - want).max(initial=0) <= 1e-5 * max(1.0, np.abs(want).max()))


def test_there_are_cases() -> None:
    """Catches a loader that finds nothing and lets every test below pass."""
    count = {b: sum(1 for bundle, _ in CASES.values() if bundle == b) for b in generate.KERNELS}
    assert count["kernel_tree_build"] + count["kernel_tree_attention"] + count["kernel_accept"] >= 27
    assert min(count.values()) >= 4, count


@of("kernel_tree_build")
def test_tree_build(name: str) -> None:
    a, want = CASES[name][1]
    token, logp = a["table_token"], a["table_logp"]
    if token.shape[1] == 0:
        token, logp = np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    count, stride = a["path_token"].shape
    path_token, path_logp = np.zeros((count, 64), np.int32), np.zeros((count, 64), np.float32)
    path_token[:, :stride], path_logp[:, :stride] = a["path_token"], a["path_logp"]
    got = ops.build_tree(
        token, logp, a["path_length"], path_token, path_logp, int(a["budget"]), int(a["max_depth"]), int(a["root"])
    )
    for field, values in zip(("token", "parent", "depth", "source", "weight"), got, strict=True):
        assert np.array_equal(values, want[field]), field


@of("kernel_accept")
def test_accept(name: str) -> None:
    a, want = CASES[name][1]
    stops = np.atleast_1d(a.get("stops", np.zeros(0, np.int32))).astype(np.int32)
    limit = int(a.get("limit", 2**31 - 1))
    path, emitted, failed = ops.accept(a["token"], a["parent"], a["selected"], int(a["rows"]), limit, stops)
    assert np.array_equal(path, want["path"]) and np.array_equal(emitted, want["emitted"])
    if "failed" in want:
        assert failed == bool(want["failed"])


@of("kernel_tree_attention")
def test_tree_attention(name: str) -> None:
    a, want = CASES[name][1]
    start, width = a["committed"].shape
    rows, latent = len(a["parent"]), want["o"].shape[2]
    count = max(1, (start + 63) // 64)
    pages = np.full((count * 64, width), np.nan, dtype=np.float32)
    pages[:start] = a["committed"]
    scratch = np.full((65, width), np.nan, dtype=np.float32)
    scratch[:rows] = a["scratch"]
    table = np.arange(count, dtype=np.int32)[None]
    w = World(pages.reshape(count, 64, width), scratch, table, latent, width - latent)
    batch = Batch()
    for i in range(rows):
        batch.add(0, start, ddtree.ancestors(a["parent"], i))
    for isa in ISAS:
        assert near(attend(w, a["q"], batch, scale=float(a["scale"]), isa=isa, threads=2), want["o"]), isa


@of("kernel_rms_norm")
def test_rms_norm(name: str) -> None:
    a, want = CASES[name][1]
    y = ops.rms_norm(a["x"], a["weight"], float(a["eps"]))
    assert np.abs(y - want["y"]).max() <= 1e-5 * np.abs(want["y"]).max(initial=0)


@of("kernel_rope")
def test_rope(name: str) -> None:
    """Through absorb_query with a nope part of width 1: the last values of each head are the rotated ones."""
    a, want = CASES[name][1]
    rows, heads, rope = a["x"].shape
    key_up = ops.Matrix.f32(np.ones((heads, 1), dtype=np.float32))
    q = np.concatenate([np.ones((rows, heads, 1), dtype=np.float32), a["x"]], axis=2)
    row = np.arange(rows, dtype=np.int32)  # the case's tables have a row per position that it names
    cos, sin = want["cos"].reshape(rows, rope // 2), want["sin"].reshape(rows, rope // 2)
    out = ops.absorb_query(np.ascontiguousarray(q), key_up, cos, sin, bool(a["interleaved"]), row)
    assert near(out[:, :, 1:], want["y"])


@of("kernel_route")
def test_route(name: str) -> None:
    a, want = CASES[name][1]
    expert, weight = ops.route(
        a["x"],
        ops.Matrix.f32(a["gate"]),
        a.get("bias"),
        "softmax_greedy" if int(a["scoring"]) else "sigmoid_noaux_tc",
        int(a["num_experts_per_tok"]),
        int(a["n_group"]),
        int(a["topk_group"]),
        bool(a["norm_topk_prob"]),
        float(a["routed_scaling_factor"]),
    )
    assert np.array_equal(expert, want["expert"]) and near(weight, want["weight"])


@of("kernel_w4a16_matmul")
def test_w4a16_matmul(name: str) -> None:
    a, want = CASES[name][1]
    scales = a["sc"] if "sc" in a else a["sc_bf16_bits"].astype(np.uint16)
    w = ops.Matrix.w4a16(a["qw"], scales)
    for isa in ISAS:
        assert near(ops.linear(a["x"], w, isa=isa, threads=2), want["y"]), isa


@of("kernel_experts")
def test_experts(name: str) -> None:
    a, want = CASES[name][1]

    def part(key: str) -> list[ops.Matrix]:
        if key in a:
            return [ops.Matrix.f32(np.ascontiguousarray(m)) for m in a[key]]
        pairs = zip(a[f"{key}.qw"], a[f"{key}.sc"], strict=True)
        return [ops.Matrix.w4a16(np.ascontiguousarray(q), np.ascontiguousarray(s)) for q, s in pairs]

    experts = ops.Experts(part("gate"), part("up"), part("down"))
    for isa in ISAS:
        y = a["y"].copy()
        ops.experts(a["x"], experts, a["expert"], a["weight"], a.get("shared"), y, isa=isa, threads=2)
        assert near(y, want["y"]), isa
