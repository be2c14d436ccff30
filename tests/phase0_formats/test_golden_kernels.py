"""The CPU backend's ops on the kernel bundles: integer outputs exactly, float outputs within a stated
tolerance, on every instruction set of this machine.

Catches a rule of the definition that oracle and backend read differently: order of ties, ends of rows, where
a walk is cut, which keys a row sees, where a scale or a bias enters.
"""

from __future__ import annotations

import numpy as np
import pytest

from harness.golden import generate, hashing
from harness.reference import sampling
from kdtree_engine import EngineError, _native

ops = _native.ops


def available(isa):
    try:
        ops.description(1, isa)
    except EngineError:
        return False
    return True


ISAS = [isa for isa in ("portable", "avx2", "avx512") if available(isa)]


def cases_of(*families):
    """(family, case, inputs, outputs) of some bundles, as test parameters."""
    return [
        pytest.param(family, inputs, outputs, id=f"{family.removeprefix('kernel_')}-{name}")
        for family in families
        for name, (inputs, outputs) in generate.cases(generate.contiguous(generate.KERNELS[family]())).items()
    ]


@pytest.fixture(params=ISAS)
def run(request):
    return {"threads": 2, "isa": request.param}


def assert_close(result, expected, tolerance):
    """Within tolerance * max(1, largest expected value)."""
    assert result.shape == expected.shape
    difference = np.abs(result.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0)
    assert difference <= tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))


def test_portable_is_among_them():
    assert "portable" in ISAS


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_tree_build"))
def test_build(family, inputs, outputs):
    names = ("table_token", "table_logp", "path_length", "path_token", "path_logp")
    scalars = (int(inputs[k]) for k in ("budget", "max_depth", "root"))
    result = ops.build_tree(*(inputs[k] for k in names), *scalars)
    for name, value in zip(("token", "parent", "depth", "source", "weight"), result, strict=True):
        assert np.array_equal(value, outputs[name]), name
    rows = ops.tree_rows(result[0], result[1], len(result[0]) - 1, 0, 7)
    live, count, ancestors = rows[0], rows[5], rows[6]
    assert live == len(outputs["token"])
    for i in range(live):
        bits = [j for j in range(live) if outputs["visibility"].view(np.uint32)[i, j // 32] >> (j % 32) & 1]
        assert ancestors[i, : count[i]].tolist() == bits


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_accept"))
def test_accept(family, inputs, outputs):
    scalars = (int(inputs["rows"]), int(inputs["limit"]))
    path, emitted, failed = ops.accept(
        inputs["token"], inputs["parent"], inputs["selected"], *scalars, inputs["stops"]
    )
    assert path.tolist() == outputs["path"].tolist()
    assert emitted.tolist() == outputs["emitted"].tolist()
    assert failed == bool(outputs["failed"])


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_tree_attention"))
def test_attention(family, inputs, outputs, run):
    """Committed keys in pages that lie out of order, the tree's in scratch."""
    start, width = inputs["committed"].shape
    used = (start + 63) // 64
    pages = np.full((used + 2, 64, width), np.nan, dtype=np.float32)
    table = np.array([[used + 1 - i for i in range(used)] + [-1]], dtype=np.int32)
    for i in range(used):
        chunk = inputs["committed"][64 * i : 64 * i + 64]
        pages[table[0, i], : len(chunk)] = chunk
    rows = len(inputs["parent"])
    token = np.arange(rows, dtype=np.int32)
    batch = ops.tree_rows(token, inputs["parent"], rows - 1, 0, start)[2:]
    rope = width - outputs["o"].shape[2]
    batch = [np.ascontiguousarray(x[:rows]) for x in batch]
    scratch = np.full((65, width), np.nan, dtype=np.float32)  # the op wants room for the largest tree
    scratch[: len(inputs["scratch"])] = inputs["scratch"]
    o = ops.attend(inputs["q"], pages, scratch, table, rope, float(inputs["scale"]), *batch, **run)
    assert_close(o, outputs["o"], 3e-6)


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_rms_norm"))
def test_rms_norm(family, inputs, outputs, run):
    assert_close(ops.rms_norm(inputs["x"], inputs["weight"], float(inputs["eps"]), **run), outputs["y"], 1e-6)


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_rope"))
def test_rope(family, inputs, outputs, run):
    """The rope part of absorb_query; the table's rows stand for the positions."""
    x = inputs["x"]
    rows, heads, _ = x.shape
    q = np.concatenate([np.zeros((rows, heads, 1), np.float32), x], axis=2)
    key_up = ops.Matrix.f32(np.zeros((heads, 1), np.float32))
    at = np.arange(rows, dtype=np.int32)
    out = ops.absorb_query(q, key_up, outputs["cos"], outputs["sin"], bool(inputs["interleaved"]), at, **run)
    assert_close(out[..., 1:], outputs["y"], 1e-6)


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_route"))
def test_route(family, inputs, outputs, run):
    scoring = ("sigmoid_noaux_tc", "softmax_greedy")[int(inputs["scoring"])]
    numbers = (int(inputs[k]) for k in ("num_experts_per_tok", "n_group", "topk_group"))
    expert, weight = ops.route(
        inputs["x"],
        ops.Matrix.f32(inputs["gate"]),
        inputs.get("bias"),
        scoring,
        *numbers,
        bool(inputs["norm_topk_prob"]),
        float(inputs["routed_scaling_factor"]),
        **run,
    )
    assert np.array_equal(expert, outputs["expert"])
    assert_close(weight, outputs["weight"], 2e-6)


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_w4a16_matmul"))
def test_w4a16_matmul(family, inputs, outputs, run):
    scale = inputs["sc"] if "sc" in inputs else inputs["sc_bf16_bits"].astype(np.uint16)
    y = ops.linear(inputs["x"], ops.Matrix.w4a16(inputs["qw"], scale), **run)
    assert_close(y, outputs["y"], 2e-6)


def test_one_hot_inputs_read_single_weights(run):
    """Each output is one weight: exact, so a code or a scale in the wrong place cannot hide in a sum."""
    inputs, outputs = generate.cases(generate.KERNELS["kernel_w4a16_matmul"]())["one_hot"]
    y = ops.linear(inputs["x"], ops.Matrix.w4a16(inputs["qw"], inputs["sc"]), **run)
    assert np.array_equal(y, outputs["y"])


@pytest.mark.parametrize(("family", "inputs", "outputs"), cases_of("kernel_experts"))
def test_experts(family, inputs, outputs, run):
    def matrices(part):
        if part in inputs:
            return [ops.Matrix.f32(w) for w in inputs[part]]
        words, scales = inputs[f"{part}.qw"], inputs[f"{part}.sc"]
        return [ops.Matrix.w4a16(w, s) for w, s in zip(words, scales, strict=True)]

    experts = ops.Experts(matrices("gate"), matrices("up"), matrices("down"))
    y = inputs["y"].copy()
    ops.experts(inputs["x"], experts, inputs["expert"], inputs["weight"], inputs.get("shared"), y, **run)
    assert_close(y, outputs["y"], 2e-6)


SAMPLERS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 20},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.75, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
]


@pytest.mark.parametrize("settings", SAMPLERS)
def test_select(settings, run):
    """The oracle's choice wherever float32 cannot have decided otherwise; ties in the logits are frequent."""
    rows, vocab = 65, 1000
    logits = hashing.dyadic("select/logits", (rows, vocab), 400, 6)
    position = np.arange(100, 100 + rows, dtype=np.int32)
    settings = settings | {"seed": 0x123456789ABCDEF0, "choice": 3}
    token = ops.select(logits, position, **settings, **run)
    compared = 0
    for i in range(rows):
        expected = sampling.select(logits[i], int(position[i]), sampling.SampleParams(**settings))
        if expected.margin > 1e-5 or settings.get("temperature", 0.0) == 0.0:
            assert token[i] == expected.token, i
            compared += 1
    assert compared >= 0.9 * rows
    alone = ops.select(logits[7:8].copy(), position[7:8].copy(), **settings, **run)
    assert alone[0] == token[7]


def test_select_without_a_choice(run):
    logits = np.zeros((4, 40), dtype=np.float32)
    logits[1, 39], logits[2], logits[3, 5] = np.nan, -np.inf, 1.0
    for temperature in (0.0, 1.0):
        token = ops.select(logits, np.zeros(4, np.int32), temperature=temperature, top_k=1, **run)
        assert (token[1], token[2], token[3]) == (-1, -1, 5)


def test_philox_and_gumbel(run):
    """Same words as the oracle; noise as close as float32 lets it be."""
    counter = hashing.integers("philox", (4,), 0, 2**32).astype(np.uint32)
    words = ops.philox(counter, np.array([7, 9], dtype=np.uint32), run["isa"])
    assert np.array_equal(words, sampling.philox4x32(counter[None], (7, 9))[0])
    token = np.arange(20000, dtype=np.int32)
    noise = ops.gumbel(token, 77, 5 + 2**40, 2, run["isa"])
    assert_close(noise, sampling.gumbel(token, 77, 5 + 2**40, 2).astype(np.float32), 1e-6)
