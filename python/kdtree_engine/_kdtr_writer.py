"""The KDTR writer: the same tensors give the same bytes, and a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import _kdtr_rules as rules
from ._crc32c import crc32c
from ._kdtr_rules import KdtrError

if TYPE_CHECKING:
    from _typeshed import StrPath
    from numpy.typing import ArrayLike, NDArray

_NUMBERS = {"f8": 1, "f4": 2, "f2": 3, "i8": 5, "i4": 6, "u1": 7}  # numpy's kind and size -> dtype number
_BF16 = rules.DTYPE_NUMBERS["bf16"]

_counter = itertools.count()


class Entry(NamedTuple):
    """A tensor as the index describes it; ``number`` is its dtype's."""

    name: bytes
    number: int
    shape: tuple[int, ...]
    nbytes: int
    crc: int


class _Tensor(NamedTuple):
    entry: Entry
    data: NDArray[np.uint8]  # flat, little-endian


def _prepare(name: str, value: ArrayLike, label: str) -> _Tensor:
    def refuse(rule: str, sentence: str) -> KdtrError:
        return KdtrError(label, rule, sentence, "invalid_argument")

    try:
        raw_name = name.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate
        raise refuse("E_NAME_UTF8", f"tensor name {name!r} is not UTF-8") from error
    if rule := rules.name_rule(raw_name):
        raise refuse(
            rule,
            f"tensor name {name[:80]!r} of {len(raw_name)} bytes must be UTF-8 of 1 to "
            rf"{rules.MAX_NAME_BYTES} bytes without control characters, '/', '\' and '..'",
        )
    array = np.asarray(value)
    if array.dtype.name == "bfloat16" or array.dtype == np.dtype([("bf16", "<u2")]):
        number, array = _BF16, np.asarray(array, order="C").view(np.uint16)
    else:
        kind = f"{array.dtype.kind}{array.dtype.itemsize}"
        if kind not in _NUMBERS:
            known = " ".join(rules.DTYPE_NUMBERS)
            raise refuse("E_DTYPE", f"tensor '{name}': dtype {array.dtype} is none of {known}")
        number = _NUMBERS[kind]
        array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    if array.ndim > rules.MAX_RANK:
        raise refuse("E_RANK", f"tensor '{name}': rank {array.ndim}, at most {rules.MAX_RANK}")
    shape_rule, _ = rules.tensor_bytes(array.shape, array.itemsize)
    if shape_rule is not None:
        raise refuse(shape_rule, f"tensor '{name}': shape {list(array.shape)} is not storable")
    data = array.reshape(-1).view(np.uint8)
    return _Tensor(Entry(raw_name, number, array.shape, data.nbytes, crc32c(data.data)), data)


def layout(tensors: list[Entry], label: str) -> tuple[bytes, bytes, list[int]]:
    """Header and index of a file with these tensors, which are sorted by name, and where their data begin."""
    names = b"".join(t.name for t in tensors)
    index_bytes = len(tensors) * rules.RECORD.size + len(names)
    for rule, what, value, most in (
        ("E_COUNT", "tensors", len(tensors), rules.MAX_TENSORS),
        ("E_INDEX_BYTES", "bytes of index", index_bytes, rules.MAX_INDEX_BYTES),
    ):
        if value > most:
            raise KdtrError(label, rule, f"{value} {what}, at most {most}", "invalid_argument")

    data_offset = rules.align_up(rules.HEADER.size + index_bytes)
    end = data_offset
    name_offset = 0
    records = []
    offsets = []
    for t in tensors:
        dims = t.shape + (0,) * (rules.MAX_RANK - len(t.shape))
        records.append(
            rules.RECORD.pack(
                name_offset, len(t.name), t.number, len(t.shape), *dims, end, t.nbytes, t.crc, 0
            )
        )
        name_offset += len(t.name)
        offsets.append(end)
        end = rules.align_up(end + t.nbytes)
    index = b"".join(records) + names
    fields = (
        rules.MAGIC, rules.GUARD, rules.MAJOR, rules.MINOR, rules.HEADER.size, end,
        rules.HEADER.size, index_bytes, data_offset, len(tensors), rules.ALIGNMENT, 0, 0, crc32c(index),
    )  # fmt: skip
    header = rules.HEADER.pack(*fields, 0)[: rules.HEADER_CRC_AT]
    return header + crc32c(header).to_bytes(4, "little"), index, offsets


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[: 1 << 30]) :]


def _create_beside(folder: str) -> tuple[int, str]:
    while True:
        path = os.path.join(folder, f".kdtr-{os.getpid()}-{next(_counter)}.tmp")
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path
        except FileExistsError:  # left by a process of the same number that was killed
            continue


def flush_folder(folder: str) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # a folder that may be written but not read: the file stands, unflushed
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot flush a folder say so
            raise
    finally:
        os.close(fd)


def write(path: StrPath, tensors: Mapping[str, ArrayLike]) -> None:
    """Write tensors to a file that appears whole or not at all, replacing what was there.

    `tensors` maps names to arrays, of any shape up to rank 8, of float64, float32, float16, bfloat16
    (ml_dtypes' or BF16_BITS), int64, int32 or uint8; or to Python ints (stored as i64) and floats (f64),
    which become scalars. The order of the mapping does not matter: names are sorted.

    Raises KdtrError: ``invalid_argument`` for tensors that cannot be stored, before anything is written;
    ``io`` (rule ``E_WRITE``) where the system fails: `path` is then what it was, nothing lies beside it.
    """
    label = os.fspath(path)
    prepared = sorted((_prepare(name, value, label) for name, value in tensors.items()), key=lambda t: t.entry.name)
    header, index, _ = layout([t.entry for t in prepared], label)

    temporary = ""
    fd = -1
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(label).st_mode):
                raise KdtrError(label, "E_NOT_REGULAR", "exists and is not a regular file", "io")
        folder = os.path.dirname(label) or "."
        fd, temporary = _create_beside(folder)
        position = 0
        pieces: list[bytes | memoryview] = [header, index, *(t.data.data for t in prepared)]
        for piece in pieces:
            _write_all(fd, memoryview(piece))
            position += len(piece)
            padding = -position % rules.ALIGNMENT
            if piece is not header:
                _write_all(fd, memoryview(bytes(padding)))
                position += padding
        os.fsync(fd)
        closing, fd = fd, -1
        os.close(closing)
        os.rename(temporary, label)
        temporary = ""
        flush_folder(folder)
    except OSError as error:
        sentence = f"writing failed: {error.strerror} (errno {error.errno})"
        raise KdtrError(label, "E_WRITE", sentence, "io") from error
    finally:
        if fd >= 0:
            os.close(fd)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
