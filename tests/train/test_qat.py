"""Quantisation-aware training: what the model multiplies by is what the file holds."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_engine.quantize import bf16_bits, dequantize, pack, quantize

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(48, 160, generator=generator) * torch.logspace(-6, 1, 48).unsqueeze(1)
    w[0, :32] = 0.0  # a group of zeros
    w[1, :32] = w[1, :32].abs()  # all on one side: the largest clips to 7
    return w


def test_forward_multiplies_by_the_bits_of_the_file() -> None:
    """Catches a scale that is rounded after the codes were chosen, another rule than q * s, and packing in another
    order."""
    from harness.train.qat import codes_and_scales, fake_quantized, packed

    w = weights()
    codes, scales = codes_and_scales(w)
    words = packed(codes).numpy()
    assert np.array_equal(words, pack(codes.numpy().astype(np.int8)))
    bits = bf16_bits(scales.numpy())
    value = dequantize(words, bits)
    assert np.array_equal(fake_quantized(w).numpy().view(np.uint32), value.view(np.uint32))


def test_codes_are_those_of_the_converter() -> None:
    """Catches a rule for scales that differs from `kdtree convert`'s minmax."""
    from harness.train.qat import codes_and_scales, packed

    w = weights()
    codes, scales = codes_and_scales(w)
    other = quantize(w.numpy(), "minmax")
    assert np.array_equal(bf16_bits(scales.numpy()), other.scales)
    assert np.array_equal(packed(codes).numpy(), other.words)


def test_gradient_passes_straight_through() -> None:
    """Catches a gradient that stops at the rounding, which is zero almost everywhere."""
    from harness.train.qat import fake_quantized

    w = weights().requires_grad_()
    factor = torch.randn(48, 160, generator=torch.Generator().manual_seed(4))
    (fake_quantized(w) * factor).sum().backward()
    assert torch.equal(w.grad, factor)
