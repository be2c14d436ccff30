"""What a conversion writes: from a checkpoint's matrices to tensors of the target, and to pieces of work.

Made from headers alone, so the size of everything is known before the first byte is written, and each piece of work
(some rows of a matrix) knows where its result goes: pieces can be done in any order, by any number of threads,
with memory for the pieces in work only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from .convert_source import Matrix, Part, Source
from .errors import fail
from .quantize import GROUP, ScaleRule, bf16_bits, from_bf16_bits, quantize
from .safetensors_file import DTYPE_BYTES

__all__ = ["RESTS", "TARGETS", "Job", "Rest", "Tally", "Target", "Tensor", "Unit", "in_shards", "plan", "units"]

Target = Literal["int4", "bf16", "f32", "same"]
Rest = Literal["same", "bf16", "f32"]
TARGETS: tuple[Target, ...] = get_args(Target)
RESTS: tuple[Rest, ...] = get_args(Rest)

_UNIT_WEIGHTS = 1 << 22  # of a matrix at a time: 16 MiB in float32
_UNIT_BYTES = 1 << 24  # of what is only copied
_DTYPES = {"bf16": "BF16", "f32": "F32"}

Write = Callable[[str, int, Any], None]
"""(tensor's name, offset in bytes, contiguous array): puts a piece of a tensor where it belongs."""


class Tensor(NamedTuple):
    """A tensor of the target; dtypes are called as in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Job(NamedTuple):
    """One matrix on its way. ``copy``: the bytes of each of `parts` (None: the shape of the matrix, in int32);
    ``float``: in floating point; ``int4``: quantised."""

    kind: Literal["copy", "float", "int4"]
    matrix: Matrix
    outputs: tuple[Tensor, ...]
    parts: tuple[Part | None, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs)

    @property
    def read_bytes(self) -> int:
        if self.kind == "copy":
            return sum(part.nbytes for part in self.parts if part is not None)
        return sum(part.nbytes for part in (self.matrix.main, self.matrix.scales) if part is not None)


class Tally(NamedTuple):
    """Sums over quantised weights: matrices, squared errors, squared weights."""

    matrices: float = 0
    error: float = 0
    power: float = 0

    def __add__(self, other: object) -> Tally:
        assert isinstance(other, Tally)
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


class Unit(NamedTuple):
    """A piece of work: bytes `start` to `stop` of output `output` for a copy, else rows."""

    job: Job
    output: int
    start: int
    stop: int

    @property
    def read_bytes(self) -> int:
        if self.job.kind == "copy":
            return self.stop - self.start if self.job.parts[self.output] is not None else 0
        rows = self.job.matrix.shape[0] if self.job.matrix.shape else 1
        return self.job.read_bytes * self.stop // rows - self.job.read_bytes * self.start // rows

    def run(self, write: Write, rule: ScaleRule) -> Tally:
        """Do it. Raises EngineError, and OSError where `write` does."""
        job, matrix = self.job, self.job.matrix
        if job.kind == "copy":
            name = job.outputs[self.output].name
            part = job.parts[self.output]
            if part is None:
                write(name, 0, _shape_of(matrix))
            else:
                data = np.empty(self.stop - self.start, np.uint8)
                part.file.read_into(data.data, part.offset + self.start)
                write(name, self.start, data)
            return Tally()
        rows = matrix.rows(self.start, self.stop)
        if job.kind == "float":
            (tensor,) = job.outputs
            out: npt.NDArray[Any] = rows if tensor.dtype == "F32" else bf16_bits(rows)
            if not np.isfinite(rows if tensor.dtype == "F32" else from_bf16_bits(out)).all():
                where = f"{matrix.main.file.path}: {matrix.name}"
                fail("not_finite", f"{where} holds a NaN, or a weight that is none in {tensor.dtype}")
            write(tensor.name, self.start * out.shape[1] * out.itemsize, out)
            return Tally()
        made = quantize(rows, rule, f"{matrix.main.file.path}: {matrix.name}")
        arrays: tuple[npt.NDArray[Any], ...] = (made.words, made.scales)
        for tensor, array in zip(job.outputs, arrays, strict=False):
            write(tensor.name, self.start * array.shape[1] * array.itemsize, array)
        last = self.stop == matrix.shape[0]
        if last and len(job.outputs) == 3:
            write(job.outputs[2].name, 0, _shape_of(matrix))
        return Tally(float(last), made.error, made.power)


def _shape_of(matrix: Matrix) -> Any:
    """The weight_shape of a matrix; EngineError where the source has one that says something else."""
    if matrix.sizes is not None:
        raw = np.empty(matrix.sizes.nbytes, np.uint8)
        matrix.sizes.file.read_into(raw.data, matrix.sizes.offset)
        sizes = raw.view("<i8" if matrix.sizes.dtype == "I64" else "<i4")
        if tuple(sizes.tolist()) != matrix.shape:
            where = f"{matrix.sizes.file.path}: {matrix.module}.weight_shape"
            fail("bad_model", f"{where} is {sizes.tolist()}; expected {list(matrix.shape)}")
    return np.array(matrix.shape, "<i4")


def units(jobs: Sequence[Job]) -> Iterator[Unit]:
    """The pieces of some jobs, in the order of the files that are read."""
    for job in jobs:
        if job.kind == "copy":
            for i, tensor in enumerate(job.outputs):
                for start in range(0, max(tensor.nbytes, 1), _UNIT_BYTES):
                    yield Unit(job, i, start, min(start + _UNIT_BYTES, tensor.nbytes))
            continue
        rows = job.matrix.shape[0] if job.matrix.shape else 1
        step = max(1, _UNIT_WEIGHTS // max(1, math.prod(job.matrix.shape[1:])))
        for start in range(0, rows, step):
            yield Unit(job, 0, start, min(start + step, rows))


def in_shards(jobs: Sequence[Job], most: int) -> list[list[Job]]:
    """Runs of jobs of at most `most` bytes, or of one job that is larger."""
    shards: list[list[Job]] = []
    size = 0
    for job in jobs:
        if not shards or size + job.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += job.nbytes
    return shards


def plan(source: Source, to: Target, rest: Rest, bundle: bool) -> list[Job]:
    """The jobs of a conversion, in the order of the source's files. `bundle`: the target is a .kdtr bundle, which
    holds the model's own tensors under the engine's names; a folder holds whatever the source does.

    Raises EngineError: ``unsupported`` for what the target cannot hold, ``bad_model`` for widths that do not
    divide into groups.
    """
    jobs = [_job(matrix, to, rest, bundle) for matrix in source.matrices if not bundle or matrix.canonical is not None]
    if to == "int4" and not any(job.matrix.is_expert for job in jobs):
        fail("unsupported", f"{source.path} has no routed experts, so there is nothing to quantise")
    if bundle and source.config.tie_word_embeddings:
        jobs += [_renamed(job) for job in jobs if job.matrix.canonical == "model.embed_tokens.weight"]
    return jobs


def _renamed(job: Job) -> Job:
    (tensor,) = job.outputs
    return job._replace(outputs=(tensor._replace(name="lm_head.weight"),))


def _job(matrix: Matrix, to: Target, rest: Rest, bundle: bool) -> Job:
    name = matrix.canonical if bundle else matrix.name
    assert name is not None
    module = name.removesuffix(".weight")
    wanted = _form(matrix, to, rest)
    if wanted == "int4":
        if matrix.shape[1] % GROUP:
            where = f"{matrix.main.file.path}: {matrix.name}"
            fail("bad_model", f"{where} has {matrix.shape[1]} inputs, which are no multiple of the group size {GROUP}")
        return Job("int4", matrix, _int4_tensors(module, matrix.shape, "BF16", bundle))
    if wanted is not None:
        return Job("float", matrix, (Tensor(name, wanted, matrix.shape),))
    if matrix.form == "int4":
        assert matrix.scales is not None
        outputs = _int4_tensors(module, matrix.shape, matrix.scales.dtype, bundle)
        return Job("copy", matrix, outputs, (matrix.main, matrix.scales, None)[: len(outputs)])
    if matrix.form == "fp8":
        assert matrix.scales is not None
        if bundle:
            where = f"{matrix.main.file.path}: {matrix.name}"
            fail("unsupported", f"{where} is fp8, which a .kdtr bundle cannot hold; choose int4, bf16 or f32")
        scales = Tensor(f"{name}_scale_inv", matrix.scales.dtype, matrix.scales.shape)
        return Job("copy", matrix, (Tensor(name, "F8_E4M3", matrix.shape), scales), (matrix.main, matrix.scales))
    return Job("copy", matrix, (Tensor(name, matrix.main.dtype, matrix.shape),), (matrix.main,))


def _int4_tensors(module: str, shape: tuple[int, ...], scales: str, bundle: bool) -> tuple[Tensor, ...]:
    words = Tensor(f"{module}.qw" if bundle else f"{module}.weight_packed", "I32", (shape[0], shape[1] // 8))
    scale = Tensor(f"{module}.sc" if bundle else f"{module}.weight_scale", scales, (shape[0], shape[1] // GROUP))
    return (words, scale) if bundle else (words, scale, Tensor(f"{module}.weight_shape", "I32", (2,)))


def _form(matrix: Matrix, to: Target, rest: Rest) -> str | None:
    """``"int4"``, a floating-point dtype, or None for as it is."""
    if to == "same" or matrix.form == "other":
        return None
    if to == "int4":
        if matrix.is_expert:
            return None if matrix.form == "int4" else "int4"
        if matrix.form == "int4":
            return None
        dtype = _DTYPES.get(rest, "BF16" if matrix.form == "fp8" else matrix.main.dtype)
    else:
        dtype = _DTYPES[to]
    if matrix.name.endswith("e_score_correction_bias") and dtype == "BF16":
        return None  # a router's bias in bf16 is another router
    return None if matrix.form == "plain" and matrix.main.dtype == dtype else dtype
