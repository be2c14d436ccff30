"""INT4 packing and quantisation in the oracle: nibble order, rounding, the scale that codes are chosen
with."""

from __future__ import annotations

import numpy as np
import pytest

from harness.reference import quant


def test_known_row():
    """Highest nibble first, or another offset than 8, gives other words."""
    words = quant.pack(np.arange(-8, 8, dtype=np.int8)[None])
    assert words.view(np.uint32).tolist() == [[0x76543210, 0xFEDCBA98]]


def test_bytes_are_pairs_of_elements():
    """On a little-endian machine byte b holds element 2b in its low nibble (the layout other tools read)."""
    codes = np.random.default_rng(1).integers(-8, 8, (3, 64))
    packed = quant.pack(codes).astype("<i4").view(np.uint8)
    assert np.array_equal(packed & 15, codes[:, 0::2] + 8)
    assert np.array_equal(packed >> 4, codes[:, 1::2] + 8)


def test_unpack_inverts_pack():
    codes = np.random.default_rng(2).integers(-8, 8, (5, 96)).astype(np.int8)
    assert np.array_equal(quant.unpack(quant.pack(codes)), codes)


@pytest.mark.parametrize("scale_dtype", ["f32", "bf16"])
def test_codes_are_chosen_with_the_rounded_scale(scale_dtype):
    """Rounding the scale after the codes were chosen leaves errors of more than half a step."""
    weight = np.random.default_rng(3).normal(size=(64, 128)).astype(np.float32)
    words, scale = quant.quantize_w4a16(weight, scale_dtype)
    codes, step = quant.unpack(words), np.repeat(scale, quant.GROUP, axis=1).astype(np.float64)
    inner = (codes > -8) & (codes < 7)  # the others may be clipped

    def steps_off(codes):
        return np.abs(codes * step - weight.astype(np.float64))[inner] / step[inner]

    assert steps_off(codes).max() <= 0.5
    late = np.rint(weight.astype(np.float64) / np.repeat(quant.group_scales(weight), quant.GROUP, axis=1))
    if scale_dtype == "bf16":
        assert np.array_equal(quant.from_bf16_bits(quant.bf16_bits(scale)), scale)
        assert steps_off(late).max() > 0.5


def test_all_sixteen_codes_occur():
    """A symmetric -7..7 grid would never exercise code -8 in a kernel."""
    weight = np.random.default_rng(4).uniform(-1, 1, (64, 256)).astype(np.float32)
    codes = quant.unpack(quant.quantize_w4a16(weight)[0])
    assert sorted(set(codes.ravel().tolist())) == list(range(-8, 8))


def test_group_of_zeros():
    """0 / 0 in a pruned group must not become NaN."""
    weight = np.zeros((2, 64), dtype=np.float32)
    weight[:, 32:] = 1.0
    words, scale = quant.quantize_w4a16(weight)
    assert scale[:, 0].tolist() == [0.0, 0.0]
    assert np.array_equal(quant.dequantize(words, scale)[:, :32], weight[:, :32])


def test_groups_run_along_the_input():
    """A scale applied per column, or groups of another width, moves the step from one group to its
    neighbour."""
    weight = np.ones((2, 96), dtype=np.float32)
    weight[0, 32:64], weight[1, 64:] = 8.0, 64.0
    _, scale = quant.quantize_w4a16(weight)
    assert np.allclose(scale * 7.5, [[1, 8, 1], [1, 1, 64]])


def test_dequantise_rounds_once():
    """code * scale in float32, not through bf16: the W4A16 product has the bits of the float32 product."""
    codes = np.arange(-8, 8, dtype=np.int8).repeat(2)[None]
    scale = np.array([[np.float32(0.1)]])
    exact = codes.astype(np.float64) * np.float64(scale[0, 0])
    assert np.array_equal(quant.dequantize(quant.pack(codes), scale), exact.astype(np.float32))
    assert not np.array_equal(quant.from_bf16_bits(quant.bf16_bits(exact.astype(np.float32))), exact)


def test_bf16_scales_dequantise_from_their_bits():
    weight = np.random.default_rng(5).normal(size=(4, 64)).astype(np.float32)
    words, scale = quant.quantize_w4a16(weight, "bf16")
    assert np.array_equal(quant.dequantize(words, quant.bf16_bits(scale)), quant.dequantize(words, scale))


def test_bf16_rounds_to_nearest_even():
    """Truncation, or ties away from zero, changes these."""
    x = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 1.0039064, np.inf, 3.4e38], dtype=np.float32)
    assert quant.bf16_bits(x).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x3F81, 0x7F80, 0x7F80]


@pytest.mark.parametrize(("call", "width"), [(quant.quantize_w4a16, 40), (quant.pack, 12)])
def test_ragged_widths_are_refused(call, width):
    with pytest.raises(ValueError, match=str(width)):
        call(np.zeros((2, width)))
