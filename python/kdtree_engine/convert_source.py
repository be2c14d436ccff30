"""What a conversion reads: a checkpoint as matrices, whatever form they are stored in, row by row in float32.

A matrix is one tensor (f32, bf16, f16), three (INT4 of compressed-tensors), two (INT4 of a bundle; fp8 with block
scales) or a slice of a tensor that holds all experts of a layer. Nothing is read before rows are asked for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from . import _native, kdtr
from ._kdtr_rules import TensorInfo
from .checkpoint import naming
from .checkpoint_audit import Names
from .checkpoint_bundle import Bundle
from .checkpoint_folder import Folder
from .config import ModelConfig
from .config_quantization import BLOCK, GROUP
from .errors import fail
from .quantize import dequantize, from_bf16_bits

__all__ = ["EXPERT", "FLOATS", "Matrix", "Part", "Source", "Stored", "open_source"]

EXPERT = re.compile(r"(?:.*\.)?(?:layers|blocks)\.[0-9]+\.mlp\.experts\.[0-9]+\.(?:gate|up|down)_proj")
"""Modules of routed experts."""

FLOATS = ("F32", "BF16", "F16")
_FUSED = re.compile(r"((?:.*\.)?(?:layers|blocks)\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PARTS = ("weight_scale", "weight_shape", "weight_scale_inv")  # belong to the main tensor of their module
_NUMPY = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I32": "<i4", "F8_E4M3": "u1"}


class File(Protocol):
    path: Path

    def read_into(self, buffer: memoryview, offset: int) -> None: ...


class Part(NamedTuple):
    """Bytes of a file that hold a tensor, row-major; dtypes are called as in safetensors."""

    file: File
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows of the first dimension, flat in the others: [stop - start, n]. bf16 comes as its bits."""
        dtype = np.dtype(_NUMPY[self.dtype])
        width = math.prod(self.shape[1:])
        raw = np.empty((stop - start) * width * dtype.itemsize, np.uint8)
        self.file.read_into(raw.data, self.offset + start * width * dtype.itemsize)
        return raw.view(dtype).reshape(stop - start, width)


class Matrix(NamedTuple):
    """``name`` as stored, of the weight in floating point (``….weight``); ``canonical`` is the engine's own, None
    for what loading ignores. ``main`` and, for int4 and fp8, ``scales``; ``sizes``: the weight_shape of a folder,
    None for a bundle. ``form`` other: a tensor that is no weight in floating point, copied as it is."""

    name: str
    canonical: str | None
    form: Literal["plain", "int4", "fp8", "other"]
    shape: tuple[int, ...]
    main: Part
    scales: Part | None = None
    sizes: Part | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def is_expert(self) -> bool:
        return self.name.endswith(".weight") and EXPERT.fullmatch(self.module) is not None

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.main, self.scales, self.sizes) if part is not None)

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """float32 [stop - start, n]: exact for every form but fp8 and INT4 with f32 scales, whose products are
        rounded once."""
        main = self.main.rows(start, stop)
        if self.form == "plain":
            return _widened(main)
        assert self.scales is not None
        if self.form == "int4":
            return dequantize(main, self.scales.rows(start, stop))
        first = start // BLOCK
        scales = _widened(self.scales.rows(first, -(-stop // BLOCK)))
        by_row = np.repeat(scales, BLOCK, axis=0)[start - first * BLOCK : stop - first * BLOCK]
        values: npt.NDArray[np.float32] = _fp8_values()[main]
        return values * np.repeat(by_row, BLOCK, axis=1)[:, : main.shape[1]]


def _widened(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return from_bf16_bits(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)


@cache
def _fp8_values() -> npt.NDArray[np.float32]:
    """The 256 values of e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, NaN all ones."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6))
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


class Stored(NamedTuple):
    """A tensor as its file describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Source:
    """An audited checkpoint. Close it, or use it in a ``with``.

    ``matrices`` in the order of the files; ``stored``: every tensor of the files; ``files``.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        matrices: Sequence[Matrix],
        stored: Sequence[Stored],
        files: Sequence[Path],
        close: Callable[[], None],
    ) -> None:
        self.path = path
        self.config = config
        self.matrices = list(matrices)
        self.stored = list(stored)
        self.files = list(files)
        self.close = close

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(path: Path, checksums: bool = True) -> Source:
    """Open and audit a Hugging Face folder or a .kdtr bundle; the same errors as loading it. Without `checksums`
    no data is read."""
    if path.is_dir():
        folder = Folder(path)
        try:
            folder.check_extent()
            folder.audit(_expected(path, folder.config))
            matrices = list(_of_folder(folder))
        except BaseException:
            folder.close()
            raise
        stored = [Stored(e.name, e.dtype, e.shape, e.nbytes) for e in folder.entries.values()]
        return Source(path, folder.config, matrices, stored, folder.files, folder.close)
    if not path.exists():
        fail("io", f"{path} does not exist; expected a model folder or a .kdtr bundle")
    if path.suffix != ".kdtr":
        fail("bad_file", f"{path} is neither a folder nor a .kdtr bundle")
    bundle = Bundle(path, checksums=checksums)
    bundle.check_extent()
    expected = _expected(path, bundle.config)
    bundle.audit(expected)
    infos = kdtr.KdtrFile.open(path).infos()
    raw = _RawFile(path)
    try:
        matrices = list(_of_bundle(raw, infos, {name: tuple(shape) for name, shape, _ in expected}))
    except BaseException:
        raw.close()
        raise
    stored = [Stored(t.name, t.dtype, t.shape, t.nbytes) for t in infos]
    return Source(path, bundle.config, matrices, stored, [path], raw.close)


def _expected(path: Path, config: ModelConfig) -> list[tuple[str, list[int], bool]]:
    with naming(path, "bad_model"):
        return _native.EngineBuilder(dict(config.fields), "cpu", 1).expected()


def _of_folder(folder: Folder) -> Iterator[Matrix]:
    names = Names(folder.config)
    entries = {name: Part(e.file, e.offset, e.nbytes, e.dtype, e.shape) for name, e in folder.entries.items()}
    for name, part in entries.items():
        module, _, kind = name.rpartition(".")
        if kind in _PARTS and (f"{module}.weight" in entries or f"{module}.weight_packed" in entries):
            continue
        weight = f"{module}.weight"
        if kind == "weight_packed":
            scales, sizes = (_required(entries, f"{module}.{k}", name) for k in ("weight_scale", "weight_shape"))
            shape = (part.shape[0], 8 * part.shape[1])
            yield Matrix(weight, names.canonical(weight), "int4", shape, part, scales, sizes)
        elif part.dtype == "F8_E4M3":
            scales = _required(entries, f"{name}_scale_inv", name)
            yield Matrix(name, names.canonical(name), "fp8", part.shape, part, scales)
        elif (fused := _FUSED.fullmatch(name)) is not None and len(part.shape) == 3:
            yield from _experts(fused[1], fused[2], part, names)
        else:
            form: Literal["plain", "other"] = "plain" if part.dtype in FLOATS else "other"
            yield Matrix(name, names.canonical(name), form, part.shape, part)


def _required(entries: Mapping[str, Part], name: str, main: str) -> Part:
    """The audit has seen this for the model's own tensors, but not for those that loading ignores."""
    if name not in entries:
        fail("bad_model", f"{entries[main].file.path}: {main} is there, but {name} is missing")
    return entries[name]


def _experts(base: str, kind: str, part: Part, names: Names) -> Iterator[Matrix]:
    """The matrices of [E, rows, columns], expert by expert; gate rows come before up rows."""
    experts, rows, columns = part.shape
    halves = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
    shape = (rows // len(halves), columns)
    nbytes = part.nbytes // (experts * len(halves))
    for i in range(experts * len(halves)):
        name = f"{base}.{i // len(halves)}.{halves[i % len(halves)]}.weight"
        slice_ = Part(part.file, part.offset + i * nbytes, nbytes, part.dtype, shape)
        yield Matrix(name, names.canonical(name), "plain", shape, slice_)


_KDTR_DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "i32": "I32"}


def _of_bundle(
    file: _RawFile, infos: Sequence[TensorInfo], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[Matrix]:
    """The builder would check shapes and dtypes; here nobody else does."""
    tensors = {t.name: t for t in infos if t.name.startswith(("model.", "lm_head."))}

    def part(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Part:
        info = tensors[name]
        if info.shape != shape or info.dtype not in dtypes:
            fail(
                "bad_model",
                f"{file.path}: {name} is {info.dtype} {list(info.shape)}; expected {' or '.join(dtypes)} {list(shape)}",
            )
        return Part(file, info.offset, info.nbytes, _KDTR_DTYPES[info.dtype], info.shape)

    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind == "sc":
            continue
        if kind != "qw":
            main = part(name, expected[name], ("f32", "bf16", "f16"))
            yield Matrix(name, name, "plain", main.shape, main)
            continue
        shape = expected[weight := f"{module}.weight"]
        words = part(name, (shape[0], shape[1] // 8), ("i32",))
        scales = part(f"{module}.sc", (shape[0], shape[1] // GROUP), ("f32", "bf16"))
        yield Matrix(weight, weight, "int4", shape, words, scales)


class _RawFile:
    """A bundle's bytes, read and not mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        while len(buffer) > 0:
            n = os.preadv(self._fd, [buffer], offset)
            if n == 0:
                fail("io", f"{self.path} ended at byte {offset}: it was changed while it was read")
            buffer, offset = buffer[n:], offset + n
