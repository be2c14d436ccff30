"""Inputs of kernel tests: random matrices of every stored type, rows with bad neighbours, attention worlds."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.reference import quant
from kdtree_engine._native import Error, ops

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
MAX_ANCESTORS = 65
ROW_COUNTS = (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65)


def available_isas() -> list[str]:
    """The instruction sets that this machine can run, "portable" first."""
    found = []
    for isa in ("portable", "avx2", "avx512"):
        try:
            ops.description(1, isa)
        except Error:
            continue
        found.append(isa)
    return found


ISAS = available_isas()


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays hold the same bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_bits_or_nan(a: F32, b: F32) -> bool:
    """The same bytes but for what a NaN carries, which no rule fixes."""
    nan = np.isnan(a)
    return bool((nan == np.isnan(b)).all()) and np.where(nan, 0, a).tobytes() == np.where(nan, 0, b).tobytes()


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> F32:
    """Normal float32 values."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


@dataclass
class Matrix:
    """A matrix as the backend has it and as float32 numbers."""

    packed: ops.Matrix
    values: F32


def matrix(rng: np.random.Generator, kind: str, out: int, width: int, scale: float = 1.0) -> Matrix:
    """A random matrix [out, width]: f32, bf16, w4_f32 or w4_bf16 (by the type of the scales, some negative)."""
    weight = normal(rng, out, width, scale=scale)
    if kind == "f32":
        return Matrix(ops.Matrix.f32(weight), weight)
    if kind == "bf16":
        bits = quant.bf16_bits(weight)
        return Matrix(ops.Matrix.bf16(bits), quant.from_bf16_bits(bits))
    codes = rng.integers(-8, 8, (out, width))
    scales = normal(rng, out, width // quant.GROUP, scale=scale / 4)
    stored: npt.NDArray[Any] = scales
    if kind == "w4_bf16":
        stored = quant.bf16_bits(scales)
        scales = quant.from_bf16_bits(stored)
    values = codes.astype(np.float32) * np.repeat(scales, quant.GROUP, axis=1)
    return Matrix(ops.Matrix.w4a16(quant.pack(codes), stored), values)


KINDS = ("f32", "bf16", "w4_f32", "w4_bf16")


def hostile_rows(rng: np.random.Generator, rows: int, *shape: int) -> F32:
    """Rows of any magnitude; about a quarter hold a NaN, an infinity, or nothing else."""
    x = normal(rng, rows, *shape) * np.float32(10.0) ** rng.integers(-3, 4, (rows,) + (1,) * len(shape))
    x = x.astype(np.float32)
    for i in range(rows):
        kind = rng.integers(0, 12)
        if kind == 0:
            x[i] = np.nan
        elif kind in (1, 2):
            x[i].flat[rng.integers(0, x[i].size)] = (np.nan, np.inf)[kind - 1]
    return x


# ------------------------------------------------------------------------------------------------------------
# exact arithmetic, for rules that are promised to the bit


def to_float32(x: Fraction) -> np.float32:
    """A rational number rounded once to float32 (to nearest, ties to even; subnormals; no overflow)."""
    if x == 0:
        return np.float32(0.0)
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    result = np.float32(float(round(magnitude / unit) * unit))  # round() of a Fraction: half to even
    return -result if x < 0 else result


def exact_fma(a: Any, b: Any, c: Any) -> np.float32:
    """a * b + c of float32 values, rounded once."""
    return to_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def exact_dot(x: F32, w: F32) -> np.float32:
    """The dot product of docs/numerics.md: sixteen lanes by fma in ascending order, then the lane tree."""
    lanes = [np.float32(0.0)] * 16
    for k in range(len(x)):
        lanes[k % 16] = exact_fma(x[k], w[k], lanes[k % 16])
    for half in (8, 4, 2, 1):
        lanes = [np.float32(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


# ------------------------------------------------------------------------------------------------------------
# attention


@dataclass
class World:
    """Pages of several sequences in shuffled order, tree scratch, and the key sequence of each."""

    pages: F32  # [n, 64, width]
    scratch: F32  # [65, width]
    page_table: I32  # [sequences, pages per sequence]
    latent: int
    rope: int

    @property
    def width(self) -> int:
        return self.latent + self.rope

    def keys(self, sequence: int, prefix: int, ancestors: list[int]) -> F32:
        """The virtual key sequence of a row, [prefix + ancestors, width]."""
        pages = self.page_table[sequence, : (prefix + 63) // 64]
        committed = self.pages[pages].reshape(-1, self.width)[:prefix]
        return np.concatenate([committed, self.scratch[np.array(ancestors, dtype=np.int64)]])


def world(rng: np.random.Generator, lengths: list[int], latent: int, rope: int) -> World:
    """A world with room for `lengths` committed positions. What no row may read is NaN."""
    per_sequence = max(1, *((n + 63) // 64 for n in lengths))
    counts = [(n + 63) // 64 for n in lengths]
    order = rng.permutation(sum(counts) + 2)
    table = np.full((len(lengths), per_sequence), -1, dtype=np.int32)
    pages = np.full((len(order), 64, latent + rope), np.nan, dtype=np.float32)
    taken = 0
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[s, :count] = order[taken : taken + count]
        taken += count
        flat = np.full((count * 64, latent + rope), np.nan, dtype=np.float32)
        flat[:length] = normal(rng, length, latent + rope)
        pages[table[s, :count]] = flat.reshape(count, 64, -1)
    return World(pages, normal(rng, 65, latent + rope), table, latent, rope)


@dataclass
class Batch:
    """Rows of a forward: the arrays of RowBatch."""

    sequence: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    ancestors: list[list[int]] = field(default_factory=list)

    def add(self, sequence: int, prefix: int, ancestors: list[int]) -> None:
        """A tree row, or a prompt row where there are no ancestors."""
        self.sequence.append(sequence)
        self.prefix.append(prefix)
        self.ancestors.append(ancestors)
        self.position.append(prefix + len(ancestors) - 1)

    def arrays(self) -> dict[str, I32]:
        """As the ops take them; unused ancestor slots name a row far outside."""
        rows = len(self.prefix)
        ancestors = np.full((rows, MAX_ANCESTORS), 10**9, dtype=np.int32)
        for i, a in enumerate(self.ancestors):
            ancestors[i, : len(a)] = a
        return {
            "sequence": np.array(self.sequence, dtype=np.int32),
            "position": np.array(self.position, dtype=np.int32),
            "prefix": np.array(self.prefix, dtype=np.int32),
            "ancestor_count": np.array([len(a) for a in self.ancestors], dtype=np.int32),
            "ancestors": ancestors,
        }


def attend(w: World, q: F32, batch: Batch | dict[str, I32], scale: float = 0.25, **run: Any) -> F32:
    """The op on a world."""
    arrays = batch.arrays() if isinstance(batch, Batch) else batch
    return ops.attend(q, w.pages, w.scratch, w.page_table, w.rope, scale, **arrays, **run)


def attend_float64(w: World, q: F32, batch: Batch, scale: float = 0.25) -> npt.NDArray[np.float64]:
    """Softmax attention in float64, [rows, heads, latent]."""
    out = np.zeros((*q.shape[:2], w.latent))
    for i in range(len(q)):
        keys = w.keys(batch.sequence[i], batch.prefix[i], batch.ancestors[i]).astype(np.float64)
        s = q[i].astype(np.float64) @ keys.T * float(np.float32(scale))
        p = np.exp(s - s.max(axis=1, keepdims=True))
        out[i] = p / p.sum(axis=1, keepdims=True) @ keys[:, : w.latent]
    return out


def angles(positions: int, rope: int) -> tuple[F32, F32]:
    """cos and sin tables [positions, rope / 2]."""
    angle = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(rope // 2) / max(rope // 2, 1))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
