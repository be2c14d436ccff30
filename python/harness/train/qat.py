"""Quantisation-aware training: the forward pass multiplies by what the INT4 file will hold.

Groups of 32 along the inputs; scale = largest magnitude / 7.5, rounded to bf16; code = nearest (ties to even) of
weight / scale, -8 to 7; value = code * scale, which is exact in float32 (the rule ``minmax`` of
`kdtree_engine.quantize`). The gradient passes straight through, as if the rounding were not there.
"""

from __future__ import annotations

import torch

__all__ = ["codes_and_scales", "fake_quantized", "packed"]

GROUP = 32


def codes_and_scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., in] and scales [..., in / 32], both float32 (the scales are bf16 numbers), of float32 weights
    [..., in]. A group of zeros has scale 0."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 7.5).to(torch.bfloat16).float()
    code = (groups / scale.clamp_min(1e-30)).round().clamp(-8, 7)
    return code.flatten(-2), scale.squeeze(-1)


def fake_quantized(weight: torch.Tensor) -> torch.Tensor:
    """The INT4 values of float32 `weight`, bit for bit what a reader of the file computes; the gradient of the
    result is the gradient of `weight`."""
    with torch.no_grad():
        code, scale = codes_and_scales(weight)
        value = (code.unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(-2)
    return value + (weight - weight.detach())  # plus zero: the value keeps its bits


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., out, in] to int32 words [..., out, in / 8]: nibble = code + 8, lowest nibble first."""
    nibbles = (codes.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=codes.device))).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
