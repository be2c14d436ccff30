"""INT4 W4A16: choosing scales and codes, packing them, and back.

The format is that of the released Kimi checkpoints (compressed-tensors ``pack-quantized``): symmetric groups of 32
along the input dimension, scales in bf16, codes -8 to 7 stored as nibbles code + 8, eight to an int32 word, lowest
nibble first. Its value is code * scale.

Two rules for the scale of a group:

- ``minmax``: the largest magnitude / 7.5, which spreads the range over all 16 codes (compressed-tensors' own
  rule, and the numpy oracle's: same bits);
- ``mse``: the scale with the smallest squared error that a search finds. It starts from 24 ways to place the
  largest magnitude, takes for the best of them the scale that least squares give for its codes, and settles
  among the bf16 values around that. Its error is never above that of ``minmax``, and on weights of the usual
  distributions within 0.1 per cent of what trying every bf16 value finds (tests/tools/test_quantize.py).

Either way the scale is rounded to bf16 *first* and the codes are chosen for the rounded scale, since that is what a
reader multiplies by. A row's result depends on that row alone.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from .errors import fail

__all__ = [
    "GROUP",
    "SCALE_RULES",
    "Quantised",
    "ScaleRule",
    "bf16_bits",
    "dequantize",
    "from_bf16_bits",
    "pack",
    "quantize",
    "unpack",
]

GROUP = 32
ScaleRule = Literal["minmax", "mse"]
SCALE_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]

_BLOCK = 4096  # groups at a time: the search's arrays stay in the second-level cache
# Where the largest magnitude of a group lands among the codes: 7.5 is minmax, more clips it, less wastes range.
_PLACES = np.concatenate([np.linspace(4.5, 6.5, 4, endpoint=False), np.linspace(6.5, 9.5, 15), np.linspace(9.9, 12, 5)])
_NEIGHBOURS = (0, 1, -1, 2, -2)  # bf16 values around the least-squares scale


class Quantised(NamedTuple):
    """``words`` int32 [out, in / 8], ``scales`` bf16 bits as uint16 [out, in / 32]; ``error`` and ``power``: sums
    of (weight - value)^2 and of weight^2 over the matrix, for reports."""

    words: npt.NDArray[np.int32]
    scales: U16
    error: float
    power: float


def bf16_bits(x: npt.NDArray[Any]) -> U16:
    """Round float32 to bf16, to nearest, ties to even: the bits. A NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def from_bf16_bits(bits: U16) -> F32:
    """Widen bf16 bits to float32, which is exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantize(weight: F32, rule: ScaleRule = "mse", name: str = "the matrix") -> Quantised:
    """Quantise a float32 matrix [out, in].

    Raises EngineError: ``bad_model`` where `in` is no multiple of 32, ``not_finite`` for NaN, infinity and weights
    near the end of float32; both name the matrix as `name`.
    """
    out, width = weight.shape
    if width % GROUP:
        fail("bad_model", f"{name} has {width} inputs, which are no multiple of the group size {GROUP}")
    groups = np.ascontiguousarray(weight, np.float32).reshape(-1, GROUP)
    scales = np.empty(len(groups), np.uint16)
    codes = np.empty(groups.shape, np.int8)
    error = power = 0.0
    for start in range(0, len(groups), _BLOCK):
        part = groups[start : start + _BLOCK]
        largest = np.abs(part).max(axis=1)
        if not np.isfinite(largest).all():
            row = (start + int(np.flatnonzero(~np.isfinite(largest))[0])) * GROUP // width
            fail("not_finite", f"{name} holds a NaN or an infinity in row {row}")
        bits = _minmax(largest)
        if rule == "mse":
            bits = _search(part, largest, bits)
        chosen = _codes(part, bits)
        scales[start : start + _BLOCK] = bits
        codes[start : start + _BLOCK] = chosen
        with np.errstate(over="ignore", invalid="ignore"):  # -8 times a scale near the end of float32
            difference = part - chosen * from_bf16_bits(bits)[:, None]
        error += float(np.square(difference, dtype=np.float64).sum())
        power += float(np.square(part, dtype=np.float64).sum())
        if not np.isfinite(error):
            fail("not_finite", f"{name} holds weights that are too large to be quantised")
    return Quantised(pack(codes.reshape(out, width)), scales.reshape(out, width // GROUP), error, power)


def _minmax(largest: F32) -> U16:
    return bf16_bits((largest.astype(np.float64) / 7.5).astype(np.float32))


def _codes(groups: F32, bits: U16) -> npt.NDArray[np.int8]:
    """The nearest codes (ties to even) to float64 quotients, as the oracle takes them."""
    scale = from_bf16_bits(bits).astype(np.float64)[:, None]
    ratio = np.divide(groups, scale, out=np.zeros(groups.shape), where=scale > 0.0)
    return np.clip(np.rint(ratio, out=ratio), -8, 7, out=ratio).astype(np.int8)


def _search(groups: F32, largest: F32, minmax: U16) -> U16:
    """Scales with small squared errors. Groups are columns here: sums over a group are then sums of rows."""
    safe = np.where(largest > 0, largest, np.float32(1))
    x: F32 = np.ascontiguousarray((groups / safe[:, None]).T, np.float32)  # up to 1, also of tiny weights
    q, product = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    gain = np.zeros(len(groups), np.float32)
    scale = np.zeros(len(groups), np.float32)
    for place in _PLACES.astype(np.float32):
        _nearest(np.multiply(x, place, out=q))
        xq = np.multiply(x, q, out=product).sum(axis=0)
        qq = np.maximum(np.multiply(q, q, out=product).sum(axis=0), np.float32(1))
        # With these codes the best scale is xq / qq, and the error it leaves is sum(x^2) - xq^2 / qq.
        reached = xq * xq / qq
        better = reached > gain
        np.copyto(gain, reached, where=better)
        np.copyto(scale, xq / qq, where=better)
    around = bf16_bits(scale * safe).astype(np.int32)
    best, left = minmax.copy(), _error(x, q, product, minmax, safe)
    for step in _NEIGHBOURS:
        bits = np.clip(around + step, 0, 0x7F7F).astype(np.uint16)
        error = _error(x, q, product, bits, safe)
        better = error < left
        np.copyto(best, bits, where=better)
        np.copyto(left, error, where=better)
    return best


def _nearest(q: F32) -> None:
    np.rint(q, out=q)
    np.minimum(q, np.float32(7), out=q)
    np.maximum(q, np.float32(-8), out=q)


def _error(x: F32, q: F32, product: F32, bits: U16, safe: F32) -> F32:
    """Squared error of each group, relative to the square of its largest magnitude; `q` and `product` are scratch."""
    scale = from_bf16_bits(bits) / safe
    np.divide(x, np.where(scale > 0, scale, np.float32(np.inf)), out=q)
    _nearest(q)
    np.multiply(q, scale, out=q)
    np.subtract(x, q, out=q)
    error: F32 = np.multiply(q, q, out=product).sum(axis=0)
    return error


def pack(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
    """Codes -8 to 7, int8 [out, in], to int32 words [out, in / 8]."""
    nibbles = (codes + np.int8(8)).view(np.uint8)
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(pairs).view("<i4")


def unpack(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
    """int32 words [out, in / 8] to codes, int8 [out, in]."""
    pairs = np.ascontiguousarray(words, "<i4").view(np.uint8)
    nibbles = np.empty((pairs.shape[0], 2 * pairs.shape[1]), np.uint8)
    np.bitwise_and(pairs, np.uint8(15), out=nibbles[:, 0::2])
    np.right_shift(pairs, np.uint8(4), out=nibbles[:, 1::2])
    return nibbles.view(np.int8) - np.int8(8)


def dequantize(words: npt.NDArray[np.int32], scales: npt.NDArray[Any]) -> F32:
    """float32 [out, in]: code * scale, rounded once (bf16 scales: exact). `scales`: float32, or bf16 bits as
    uint16, [out, in / 32]."""
    wide = from_bf16_bits(scales) if scales.dtype == np.uint16 else scales.astype(np.float32, copy=False)
    codes = unpack(words)
    values = codes.reshape(*wide.shape, GROUP) * wide[:, :, None]
    return values.reshape(codes.shape)
