"""INT4: scales and codes against the numpy oracle, against every bf16 scale, and against compressed-tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness.reference import quant as oracle
from kdtree_engine import EngineError
from kdtree_engine.quantize import (
    GROUP,
    SCALE_RULES,
    ScaleRule,
    bf16_bits,
    dequantize,
    from_bf16_bits,
    pack,
    quantize,
    unpack,
)

F32 = npt.NDArray[np.float32]

FINITE = st.floats(-(2.0**126), 2.0**126, width=32)
ORDINARY = st.floats(-4, 4, width=32)
GRIDS = st.sampled_from([k / 2 for k in range(-16, 17)])  # quotients that are ties


@st.composite
def matrices(draw: st.DrawFn) -> F32:
    shape = (draw(st.integers(1, 3)), GROUP * draw(st.integers(1, 3)))
    return draw(hnp.arrays(np.float32, shape, elements=draw(st.sampled_from([FINITE, ORDINARY, GRIDS]))))


def errors(weight: F32, scales: F32) -> npt.NDArray[np.float64]:
    """Squared error of each group, in float64, with the best codes for `scales`."""
    groups = weight.reshape(-1, GROUP).astype(np.float64)
    scale = scales.reshape(-1, 1).astype(np.float64)
    codes = np.clip(np.rint(np.divide(groups, scale, out=np.zeros(groups.shape), where=scale > 0)), -8, 7)
    return np.square(groups - codes * scale).sum(axis=1)


@given(matrices())
def test_minmax_is_the_oracle(weight: F32) -> None:
    """Catches scales rounded after the codes were chosen, another divisor than 7.5, ties rounded away from even,
    and nibbles in another order."""
    made = quantize(weight, "minmax")
    words, scales = oracle.quantize_w4a16(weight, "bf16")
    assert np.array_equal(made.scales, oracle.bf16_bits(scales))
    assert np.array_equal(made.words, words)
    assert np.array_equal(dequantize(made.words, made.scales), oracle.dequantize(words, scales))


@given(matrices())
def test_mse_is_never_worse(weight: F32) -> None:
    """Catches a search that settles for less than it started from, and scales that are no scales."""
    made = {rule: quantize(weight, rule) for rule in SCALE_RULES}
    scales = from_bf16_bits(made["mse"].scales)
    assert np.isfinite(scales).all() and (scales >= 0).all()
    found, start = errors(weight, scales), errors(weight, from_bf16_bits(made["minmax"].scales))
    power = np.square(weight.reshape(-1, GROUP).astype(np.float64)).sum(axis=1)
    assert (found <= start + 1e-6 * power).all()
    assert np.array_equal(dequantize(made["mse"].words, made["mse"].scales), reread(weight, made["mse"].scales))


def reread(weight: F32, bits: npt.NDArray[np.uint16]) -> F32:
    """What the oracle makes of `weight` with given scales."""
    scale = np.repeat(oracle.from_bf16_bits(bits), GROUP, axis=1)
    ratio = np.divide(weight, scale, out=np.zeros(weight.shape), where=scale > 0, dtype=np.float64)
    return np.clip(np.rint(ratio), -8, 7).astype(np.float32) * scale


def every_scale(weight: F32) -> npt.NDArray[np.float64]:
    """The smallest squared error of each group over all bf16 scales that place the largest magnitude between
    3 and 16."""
    largest = np.abs(weight.reshape(-1, GROUP)).max(axis=1)
    first = bf16_bits(largest / np.float32(16)).astype(np.uint32)
    best = np.full(len(largest), np.inf)
    for step in range(310):  # 128 bf16 values an octave
        best = np.minimum(best, errors(weight, from_bf16_bits((first + step).astype(np.uint16))))
    return best


def weights_of(kind: str, groups: int = 4000) -> F32:
    rng = np.random.default_rng(5)
    shape = (groups, GROUP)
    made: dict[str, Any] = {
        "normal": lambda: rng.normal(size=shape),
        "heavy tails": lambda: rng.standard_t(4, size=shape),
        "laplace": lambda: rng.laplace(size=shape),
        "uniform": lambda: rng.uniform(-1, 1, size=shape),
    }
    return (made[kind]() * 0.02).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "laplace", "uniform"])
def test_mse_is_nearly_the_best_there_is(kind: str) -> None:
    """Catches a search that looks in too few places: the bound is what its documentation promises."""
    weight = weights_of(kind)
    best = every_scale(weight).sum()
    minmax, mse = (errors(weight, from_bf16_bits(quantize(weight, rule).scales)).sum() for rule in SCALE_RULES)
    assert best <= mse <= 1.001 * best
    assert minmax > 1.1 * best  # else there is nothing to find


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_error_and_power(rule: ScaleRule) -> None:
    """Catches a report that praises another matrix than the one written."""
    weight = weights_of("normal", 5000).reshape(1000, 160)
    made = quantize(weight, rule)
    left = weight.astype(np.float64) - dequantize(made.words, made.scales)
    assert made.error == pytest.approx(np.square(left).sum(), rel=1e-9)
    assert made.power == pytest.approx(np.square(weight.astype(np.float64)).sum(), rel=1e-9)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_rows_are_on_their_own(rule: ScaleRule) -> None:
    """Catches a result that depends on which rows are quantised together: conversions go by blocks of rows, and a
    resumed one by other blocks."""
    weight = weights_of("normal", 6000).reshape(1200, 160)
    whole = quantize(weight, rule)
    for rows in (slice(0, 1), slice(7, 500), slice(500, 1200), slice(1199, 1200)):
        part = quantize(weight[rows], rule)
        assert np.array_equal(part.words, whole.words[rows]) and np.array_equal(part.scales, whole.scales[rows])


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e30, 1e38])
def test_tiny_and_huge_weights(rule: ScaleRule, size: float) -> None:
    """Catches overflows and divisions by numbers that are too small, which give NaN scales."""
    weight = (np.linspace(-1, 1, 2 * GROUP) * size).astype(np.float32).reshape(2, GROUP)
    with np.errstate(all="raise", under="ignore"):
        made = quantize(weight, rule)
    value = dequantize(made.words, made.scales)
    assert np.isfinite(value).all()
    if size >= 1e-30:
        assert np.abs(value - weight).max() < 0.09 * size


def test_all_codes_occur() -> None:
    """Catches a range of 15 codes, and codes past the ends."""
    weight = np.linspace(-8, 7.4, 16 * GROUP, dtype=np.float32).reshape(GROUP, 16).T.copy().reshape(1, -1)
    for rule in SCALE_RULES:
        codes = unpack(quantize(weight, rule).words)
        assert codes.min() == -8 and codes.max() == 7
    assert set(unpack(quantize(weights_of("normal"), "minmax").words).ravel().tolist()) == set(range(-8, 8))


def test_words() -> None:
    """Catches nibbles in another order: the first element is the lowest nibble of the first word."""
    codes = np.arange(-8, 8, dtype=np.int8).reshape(1, 16)
    words = pack(codes)
    assert [hex(w & 0xFFFFFFFF) for w in words[0].tolist()] == ["0x76543210", "0xfedcba98"]
    assert np.array_equal(unpack(words), codes)


@given(hnp.arrays(np.int8, (3, 24), elements=st.integers(-8, 7)))
def test_packing_and_back(codes: npt.NDArray[np.int8]) -> None:
    """Catches codes that change on the way, and words that are not the oracle's."""
    assert np.array_equal(pack(codes), oracle.pack(codes))
    assert np.array_equal(unpack(pack(codes)), codes)


def test_scales_in_float32() -> None:
    """Catches a reader that takes float32 scales, as bundles have them, for bf16."""
    weight = weights_of("normal", 64).reshape(8, -1)
    words, scales = oracle.quantize_w4a16(weight, "f32")
    assert np.array_equal(dequantize(words, scales), oracle.dequantize(words, scales))


@given(hnp.arrays(np.uint32, 50))
def test_bf16(bits: npt.NDArray[np.uint32]) -> None:
    """Catches ties that are not rounded to even, overflow that is no infinity, and NaN that becomes one."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(bf16_bits(x)[~nan], expected[~nan])
    assert np.isnan(from_bf16_bits(bf16_bits(x)[nan])).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_number_no_scale(rule: ScaleRule, value: float) -> None:
    """Catches a broken weight that becomes a whole group of nonsense."""
    weight = weights_of("normal", 3000).reshape(1500, 64).copy()
    weight[1203, 40] = value
    with pytest.raises(EngineError, match="expert 3 holds a NaN or an infinity in row 1203") as caught:
        quantize(weight, rule, "expert 3")
    assert caught.value.code == "not_finite"


def test_weights_that_overflow() -> None:
    """Catches a finite weight whose stored value is infinite: -8 times a scale that is rounded up."""
    with pytest.raises(EngineError, match="expert 3 holds weights that are too large"):
        quantize(np.full((1, GROUP), -3.4e38, np.float32), "minmax", "expert 3")


def test_widths() -> None:
    """Catches a last group that is padded silently."""
    with pytest.raises(EngineError, match="expert 3 has 48 inputs, which are no multiple of the group size 32"):
        quantize(np.zeros((2, 48), np.float32), "mse", "expert 3")


@pytest.mark.torch
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_compressed_tensors_reads_what_we_write(rule: ScaleRule) -> None:
    """Catches a layout that only we understand: the library's own decompression gives our values, rounded to
    bf16 as it rounds."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = weights_of("heavy tails", 600).reshape(200, 96)
    made = quantize(weight, rule)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP),
    )
    state = {
        "weight_packed": torch.from_numpy(made.words),
        "weight_scale": torch.from_numpy(made.scales.view(np.int16)).view(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    value = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert value.dtype == torch.bfloat16
    ours = bf16_bits(dequantize(made.words, made.scales))
    assert np.array_equal(value.view(torch.int16).numpy().view(np.uint16), ours)
