"""INT4 W4A16: symmetric groups of 32 along the input dimension, eight nibbles a word, lowest nibble first.

value = (nibble - 8) * scale[out, group]. The layout is that of compressed-tensors' pack-quantized format
(int32 [out, in / 8] and scales [out, in / 32]), so words copy verbatim.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

GROUP = 32
ScaleDType = Literal["f32", "bf16"]


def bf16_bits(x: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16, nearest even: uint16 bits of the same shape. x must be finite or infinite, not
    NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return rounded.astype(np.uint16)


def from_bf16_bits(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bf16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def group_scales(weight: npt.NDArray[Any], scale_dtype: ScaleDType = "f32") -> npt.NDArray[np.float32]:
    """Scales of a matrix: float32 [out, in / 32], amax / 7.5 rounded to the scale's dtype.

    7.5 spreads the range over all 16 codes: -amax becomes -8, +amax clips to 7 (the minmax rule of
    compressed-tensors). A group of zeros has scale 0.
    """
    out, width = weight.shape
    if width % GROUP:
        raise ValueError(f"input dimension {width} is no multiple of {GROUP}")
    amax = np.abs(weight.astype(np.float64)).reshape(out, width // GROUP, GROUP).max(axis=2)
    scale = (amax / 7.5).astype(np.float32)
    return from_bf16_bits(bf16_bits(scale)) if scale_dtype == "bf16" else scale


def quantize_w4a16(
    weight: npt.NDArray[Any], scale_dtype: ScaleDType = "f32"
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Quantise float [out, in] to packed words int32 [out, in / 8] and scales float32 [out, in / 32].

    Codes are chosen with the *rounded* scales, since those are what the reader will multiply by. Scales come
    as float32 in either case; with "bf16" every one of them is a bf16 value (store `bf16_bits` of them).
    """
    scale = group_scales(weight, scale_dtype)
    divisor = np.repeat(scale.astype(np.float64), GROUP, axis=1)
    ratio = np.divide(weight.astype(np.float64), divisor, out=np.zeros(weight.shape), where=divisor > 0.0)
    return pack(np.clip(np.rint(ratio), -8, 7).astype(np.int8)), scale


def pack(codes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Codes in [-8, 7], [out, in], to int32 words [out, in / 8]: nibble = code + 8, lowest nibble first."""
    out, width = codes.shape
    if width % 8:
        raise ValueError(f"input dimension {width} is no multiple of 8")
    nibbles = (codes.astype(np.int64) + 8).astype(np.uint32).reshape(out, width // 8, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    return np.ascontiguousarray(words).view(np.int32)


def unpack(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
    """int32 words [out, in / 8] to codes int8 [out, in] in [-8, 7]."""
    bits = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))
    codes = (bits & np.uint32(15)).astype(np.int8) - np.int8(8)
    return codes.reshape(len(words), -1)


def dequantize(words: npt.NDArray[np.int32], scale: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 [out, in]: code * scale, rounded once. scale: float32 or uint16 (bf16 bits) [out, in / 32]."""
    wide = from_bf16_bits(scale) if scale.dtype == np.uint16 else scale.astype(np.float32)
    return unpack(words).astype(np.float32) * np.repeat(wide, GROUP, axis=1)
