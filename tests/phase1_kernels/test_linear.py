"""Matrix products of the CPU backend: the documented rule to the bit, exactness, every stored type."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from kernel_inputs import ISAS, KINDS, ROW_COUNTS, exact_dot, exact_fma, matrix, normal, same_bits, to_float32

from harness.reference import quant
from kdtree_engine._native import ops

SHAPES = [(1, 1), (3, 5), (4, 16), (5, 17), (37, 100), (66, 33), (8, 128), (9, 160), (130, 1000), (12, 2112)]


def stored_kinds(width: int) -> list[str]:
    return [k for k in KINDS if not k.startswith("w4") or width % 32 == 0]


def test_exact_helpers() -> None:
    """The yardstick itself: rounding of rationals against numpy's own conversions, and a sum that rounds twice in
    double precision but once in an fma."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2000) * 10.0 ** rng.integers(-44, 38, 2000)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    for value, want in zip(values, expected, strict=True):
        if np.isfinite(want):
            assert to_float32(Fraction(float(value))).tobytes() == want.tobytes(), value
    assert exact_fma(np.float32(1 + 2**-23), np.float32(1 + 2**-23), np.float32(-1)) == np.float32(2**-22 + 2**-46)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 40, 96, 100])
def test_dot_follows_the_documented_rule(isa: str, width: int) -> None:
    """Catches another number of lanes, another order, a product rounded before the sum, a tail that is summed apart:
    each of them is right by tolerance and wrong by the bit. Magnitudes from subnormal to 1e15."""
    rng = np.random.default_rng(width)
    for kind in stored_kinds(width):
        w = matrix(rng, kind, 6, width)
        x = (normal(rng, 5, width) * 10.0 ** rng.integers(-12, 12, (5, width))).astype(np.float32)
        x[4] = (x[4] * 1e-37).astype(np.float32)  # products below the normal range
        y = ops.linear(x, w.packed, isa=isa)
        for i in range(5):
            for o in range(6):
                assert y[i, o].tobytes() == exact_dot(x[i], w.values[o]).tobytes(), (kind, i, o)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_close_to_float64(isa: str, out: int, width: int) -> None:
    """Catches a wrong weight, row or column. Tolerance: a sum of n products rounds by at most n units of 2^-24 of the
    sum of magnitudes; 16 lanes shorten that to n / 16 + 5."""
    rng = np.random.default_rng(out * 10000 + width)
    for kind in stored_kinds(width):
        w = matrix(rng, kind, out, width)
        for rows in (1, 4, 7, 65):
            x = normal(rng, rows, width)
            wide = x.astype(np.float64) @ w.values.T.astype(np.float64)
            bound = (np.abs(x).astype(np.float64) @ np.abs(w.values).T.astype(np.float64)) * (width / 16 + 6) * 2.0**-24
            assert (np.abs(ops.linear(x, w.packed, isa=isa, threads=2) - wide) <= bound).all(), (kind, rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", ROW_COUNTS)
def test_small_integers_are_exact(isa: str, rows: int) -> None:
    """Catches any term added twice, left out or taken from a neighbour: with integers there is no rounding to hide
    behind, whatever the row count and the tiles."""
    rng = np.random.default_rng(rows)
    for width in (31, 128, 257, 416):
        w = rng.integers(-8, 8, (23, width)).astype(np.float32)
        x = rng.integers(-99, 100, (rows, width)).astype(np.float32)
        stored = {"f32": ops.Matrix.f32(w), "bf16": ops.Matrix.bf16(quant.bf16_bits(w))}
        if width % 32 == 0:
            ones = np.ones((23, width // 32), dtype=np.float32)
            stored["w4"] = ops.Matrix.w4a16(quant.pack(w.astype(np.int64)), ones)
        for kind, m in stored.items():
            assert np.array_equal(ops.linear(x, m, isa=isa), x @ w.T), (kind, width)


@pytest.mark.parametrize("isa", ISAS)
def test_stored_type_does_not_change_bits(isa: str) -> None:
    """Catches a scale applied after the sum, or an inexact widening: INT4 and bf16 must give the float32 product with
    the dequantised matrix, scales of either type, negative ones and zeros included."""
    rng = np.random.default_rng(3)
    for width in (32, 64, 96, 128, 160, 224, 2112):
        for kind in KINDS[1:]:
            w = matrix(rng, kind, 21, width)
            if kind == "w4_f32":
                scales = normal(rng, 21, width // 32)
                scales[::3] = 0.0
                codes = rng.integers(-8, 8, (21, width))
                w.packed = ops.Matrix.w4a16(quant.pack(codes), scales)
                w.values = codes.astype(np.float32) * np.repeat(scales, 32, axis=1)
            plain = ops.Matrix.f32(w.values)
            for rows in (1, 2, 3, 4, 5, 8, 33):
                x = normal(rng, rows, width)
                assert same_bits(ops.linear(x, w.packed, isa=isa), ops.linear(x, plain, isa=isa)), (kind, width, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_every_nibble_in_every_place(isa: str) -> None:
    """Catches a permuted nibble: one weight at a time is not zero, in a row of two and a half units of 128 inputs."""
    width = 320
    codes = np.zeros((width, width), dtype=np.int64)
    codes[np.arange(width), np.arange(width)] = np.arange(width) % 16 - 8
    w = ops.Matrix.w4a16(quant.pack(codes), np.full((width, width // 32), 0.5, dtype=np.float32))
    y = ops.linear(np.eye(width, dtype=np.float32), w, isa=isa)
    assert np.array_equal(y, codes.T.astype(np.float32) * np.float32(0.5))


def test_accumulate_adds_once() -> None:
    """Catches y used as the accumulator's start, which sums in another order than y + dot."""
    rng = np.random.default_rng(4)
    w = matrix(rng, "f32", 30, 70)
    x, y = normal(rng, 9, 70), normal(rng, 9, 30)
    expected = y + ops.linear(x, w.packed)
    ops.linear(x, w.packed, add_to=y)
    assert same_bits(y, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_linear_is_its_parts(kind: str) -> None:
    """Catches gate and up exchanged and another order of silu's operations: silu(g) * u with g / (1 + exp(-g)) from
    the backend's own exp, bit for bit, overflow of exp included."""
    rng = np.random.default_rng(5)
    gate, up = matrix(rng, kind, 70, 96), matrix(rng, kind, 70, 96)
    x = normal(rng, 7, 96, scale=8.0)
    g, u = ops.linear(x, gate.packed), ops.linear(x, up.packed)
    assert g.min() < -90  # exp(-g) overflows: silu is -0 there
    e = ops.exp(np.ascontiguousarray(-g).reshape(-1)).reshape(g.shape)
    assert same_bits(ops.gated_linear(x, gate.packed, up.packed), g / (np.float32(1) + e) * u)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_embedding_returns_the_table(kind: str) -> None:
    """Catches a row or column mixed up by the packed layout; widening must be exact."""
    rng = np.random.default_rng(6)
    for width in (1, 16, 31, 33, 100):
        table = matrix(rng, kind, 19, width)
        token = rng.permutation(19).astype(np.int32)
        assert same_bits(ops.embed(token, table.packed), table.values[token])


def test_norm_follows_the_documented_rule() -> None:
    """Catches a mean over the stride instead of the width, eps outside the root, an approximate reciprocal root, and
    (x * weight) * r in place of (x * r) * weight."""
    rng = np.random.default_rng(7)
    for width, stride in ((1, 1), (17, 17), (48, 60), (192, 192)):
        x, weight = normal(rng, 4, stride), normal(rng, width)
        for eps in (1e-6, 1e-5):
            y = ops.rms_norm(x, weight, eps)
            for i in range(4):
                mean = exact_dot(x[i, :width], x[i, :width]) / np.float32(width)
                r = np.float32(1) / np.sqrt(mean + np.float32(eps))
                assert same_bits(y[i], x[i, :width] * r * weight), (width, eps)


@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_have_their_own_matrices(interleaved: bool) -> None:
    """Catches head h multiplied with another head's rows (latent and v are no multiples of the block of four), and
    rope applied to the wrong pairs or with the wrong sign."""
    rng = np.random.default_rng(8)
    heads, latent, nope, rope, v = 3, 37, 21, 10, 11
    key_up, value_up = matrix(rng, "f32", heads * latent, nope), matrix(rng, "f32", heads * v, latent)
    q, o = normal(rng, 5, heads, nope + rope), normal(rng, 5, heads, latent)
    angle = rng.uniform(0, 6, (40, rope // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    position = rng.integers(0, 40, 5).astype(np.int32)
    out = ops.absorb_query(q, key_up.packed, cos, sin, interleaved, position, threads=2)
    projected = ops.project_value(o, value_up.packed, threads=2)
    for h in range(heads):
        part = ops.Matrix.f32(np.ascontiguousarray(key_up.values[h * latent : (h + 1) * latent]))
        assert same_bits(
            np.ascontiguousarray(out[:, h, :latent]), ops.linear(np.ascontiguousarray(q[:, h, :nope]), part)
        )
        part = ops.Matrix.f32(np.ascontiguousarray(value_up.values[h * v : (h + 1) * v]))
        assert same_bits(
            np.ascontiguousarray(projected[:, h * v : (h + 1) * v]), ops.linear(np.ascontiguousarray(o[:, h]), part)
        )
    half = rope // 2
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + (1 if interleaved else half)
    for i in range(5):
        c, s = cos[position[i]], sin[position[i]]
        for h in range(heads):
            x = q[i, h, nope:]
            for j in range(half):
                a, b = x[first[j]], x[second[j]]
                assert out[i, h, latent + first[j]] == exact_fma(a, c[j], -(b * s[j]))
                assert out[i, h, latent + second[j]] == exact_fma(b, c[j], a * s[j])
