"""Inputs of golden bundles: integer hashes as dyadic numbers.

No random generator of a library, no transcendental function: every value is an integer times a power of two,
hence the same bits on every machine, in every numpy version, on any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def stream_of(name: str) -> int:
    """FNV-1a, 64 bits, of the name in UTF-8."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value


def split_mix(state: int, count: int) -> npt.NDArray[np.uint64]:
    """uint64 [count]: what SplitMix64 (Steele, Lea, Flood 2014) yields from a state."""
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def integers(name: str, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int64]:
    """int64 of a shape, uniform in low <= x < high (high - low at most 2^32)."""
    count = int(np.prod(shape, dtype=np.int64))
    scaled = (split_mix(stream_of(name), count) >> np.uint64(32)) * np.uint64(high - low) >> np.uint64(32)
    return (scaled.astype(np.int64) + low).reshape(shape)


def integer(name: str, low: int, high: int) -> int:
    """One such integer."""
    return int(integers(name, (1,), low, high)[0])


def distinct(name: str, count: int, high: int, without: tuple[int, ...] = ()) -> list[int]:
    """`count` different integers in 0 <= x < high, none of them in `without`."""
    found: list[int] = []
    for x in integers(name, (16 * count + 64,), 0, high).tolist():
        if x not in found and x not in without:
            found.append(x)
        if len(found) == count:
            return found
    raise ValueError(f"{name}: no {count} different integers below {high}")


def dyadic(name: str, shape: tuple[int, ...], amplitude: int, exponent: int) -> npt.NDArray[np.float32]:
    """float32: integers of magnitude <= amplitude, times 2^-exponent. Exact in bf16 too for amplitude <=
    256."""
    values: npt.NDArray[Any] = integers(name, shape, -amplitude, amplitude + 1).astype(np.float32)
    return values * np.float32(2.0**-exponent)


def of_rms(name: str, shape: tuple[int, ...], rms: float) -> npt.NDArray[np.float32]:
    """Dyadic values with about this root mean square and 7 to 8 significant bits."""
    exponent = 0
    while rms * 3.0**0.5 * 2.0**exponent < 128.0:
        exponent += 1
    return dyadic(name, shape, round(rms * 3.0**0.5 * 2.0**exponent), exponent)
