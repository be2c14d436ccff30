"""KDTR v1: named tensors in one file (docs/formats/kdtr-v1.md has the format and the numbered rules).

Reading::

    tensors = kdtr.read("model.kdtr")          # name -> read-only array, mapped, checksums verified
    file = kdtr.KdtrFile.open("model.kdtr")    # the same lazily: a mapping that makes arrays on demand

Writing::

    kdtr.write("model.kdtr", {"x": array, "config.layers": 6})

A file that breaks a rule is refused whole with :class:`KdtrError`, whose ``rule`` is the code in the
specification (``"E_OVERLAP"``). The C++ reader gives the same verdict on every file and the C++ writer the
same bytes.

**bfloat16.** numpy has no such type. Where ``ml_dtypes`` is installed, bf16 tensors are arrays of
``ml_dtypes.bfloat16``. Elsewhere they are arrays of :data:`BF16_BITS`, a dtype of one 16-bit field: it stays
what it is through slicing, reshaping and copying, and arithmetic on it is a TypeError, not nonsense.
:func:`is_bf16`, :func:`bf16_bits` and :func:`to_float32` serve both, and :func:`write` takes both.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _kdtr_rules as rules
from ._crc32c import crc32c
from ._kdtr_rules import KdtrError, TensorInfo
from ._kdtr_writer import write

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, StrPath
    from numpy.typing import NDArray

__all__ = [
    "BF16_BITS",
    "KdtrError",
    "KdtrFile",
    "TensorInfo",
    "bf16_bits",
    "check",
    "check_bytes",
    "is_bf16",
    "read",
    "to_float32",
    "write",
]

BF16_BITS: np.dtype[Any] = np.dtype([("bf16", "<u2")])
"""dtype of bf16 arrays where ml_dtypes is absent: one field ``bf16`` with the 16 bits."""

_NUMPY_DTYPES = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4", "u8": "|u1"}


@functools.cache
def _bf16_dtype() -> np.dtype[Any]:
    try:
        bfloat16: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        return BF16_BITS
    return bfloat16


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of arrays that hold tensors of dtype `name` (``"f32"``)."""
    return _bf16_dtype() if name == "bf16" else np.dtype(_NUMPY_DTYPES[name])


def is_bf16(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is bfloat16: ml_dtypes' or BF16_BITS."""
    return dtype.name == "bfloat16" or bool(dtype == BF16_BITS)


def bf16_bits(array: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of a bf16 array as a uint16 view of the same shape."""
    if not is_bf16(array.dtype):
        raise TypeError(f"expected a bf16 array, got dtype {array.dtype}")
    return array.view(np.uint16)


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """A bf16, f16 or f32 array widened to float32, exactly; an f32 array is returned as it is."""
    if is_bf16(array.dtype):
        return (bf16_bits(array).astype(np.uint32) << 16).view(np.float32)
    if array.dtype not in (np.float16, np.float32):
        raise TypeError(f"expected bf16, f16 or f32, got dtype {array.dtype}")
    return array.astype(np.float32, copy=False)


class KdtrFile(Mapping[str, "NDArray[Any]"]):
    """A checked file: a mapping from names, sorted, to read-only arrays that view it.

    Arrays are made when asked for and keep the map alive; nothing is copied. A file must not be changed in
    place while it is mapped (docs/formats/kdtr-v1.md, "Cost of a bad file").
    """

    def __init__(self, buffer: ReadableBuffer, label: str = "<memory>") -> None:
        """Check rules 4 to 38 on a bytes-like object, which must stay unchanged. Raises KdtrError."""
        self.label = label
        view = memoryview(buffer)
        self._buffer = (view.cast("B") if view.nbytes else memoryview(b"")).toreadonly()
        self._index = {info.name: info for info in rules.parse(self._buffer, label)}

    @classmethod
    def open(cls, path: StrPath) -> KdtrFile:
        """Map a regular file and check rules 1 to 38. Raises KdtrError."""
        label = os.fspath(path)
        try:
            # O_NONBLOCK: opening a pipe that nobody writes to must not wait. Regular files ignore it.
            fd = os.open(label, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise KdtrError(label, "E_OPEN", f"cannot be opened: {error.strerror}", "io") from error
        except ValueError as error:  # a NUL in the path
            raise KdtrError(label, "E_OPEN", f"cannot be opened: {error}", "io") from error
        try:
            status = os.fstat(fd)
            size = status.st_size
            regular = stat.S_ISREG(status.st_mode)
            mapped = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ) if regular and size else b""
        except (OSError, ValueError) as error:  # ValueError: the file has shrunk since fstat
            raise KdtrError(label, "E_MAP", f"cannot be mapped: {error}", "io") from error
        finally:
            os.close(fd)
        if not regular:
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise KdtrError(label, "E_NOT_REGULAR", f"is {what}, not a regular file", "io")
        return cls(mapped, label)

    def __getitem__(self, name: str) -> NDArray[Any]:
        info = self._index[name]
        dtype = numpy_dtype(info.dtype)
        if info.nbytes == 0:
            array = np.empty(info.shape, dtype)
        else:
            count = info.nbytes // dtype.itemsize
            # As bits first: numpy's own float types are the only ones that frombuffer is sure to know.
            bits = np.frombuffer(self._buffer, f"<u{dtype.itemsize}", count, info.offset)
            array = bits.view(dtype).reshape(info.shape)
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def names(self) -> list[str]:
        """All names, sorted by their UTF-8 bytes."""
        return list(self._index)

    def info(self, name: str) -> TensorInfo:
        """dtype, shape and place of a tensor, without touching its data. Raises KeyError."""
        return self._index[name]

    def infos(self) -> list[TensorInfo]:
        """What :meth:`info` says of every tensor, in file order."""
        return list(self._index.values())

    def verify_checksums(self) -> None:
        """Rule 39: compare the CRC-32C of every tensor. Raises KdtrError."""
        for info in self._index.values():
            crc = crc32c(self._buffer[info.offset : info.offset + info.nbytes])
            if crc != info.crc:
                raise KdtrError(
                    self.label,
                    "E_TENSOR_CRC",
                    f"tensor '{info.name}': checksum of its {info.nbytes} bytes is {crc:08x}, "
                    f"stored is {info.crc:08x}",
                )


def read(path: StrPath, *, checksums: bool = True) -> dict[str, NDArray[Any]]:
    """Read all tensors of a file: name -> read-only array (f64, f32, f16, i64, i32, u8; bf16: see above).

    The arrays view the mapped file. `checksums=False` leaves out rule 39, the only one that reads the data.
    Raises KdtrError, whose ``rule`` names what is wrong.
    """
    file = KdtrFile.open(path)
    if checksums:
        file.verify_checksums()
    return dict(file)


def check(path: StrPath, *, checksums: bool = True) -> str:
    """``"ok"``, or the code of the first rule that the file breaks."""
    try:
        file = KdtrFile.open(path)
        if checksums:
            file.verify_checksums()
    except KdtrError as error:
        return error.rule
    return "ok"


def check_bytes(data: ReadableBuffer, *, checksums: bool = True) -> str:
    """:func:`check` for a file's bytes in memory."""
    try:
        file = KdtrFile(data)
        if checksums:
            file.verify_checksums()
    except KdtrError as error:
        return error.rule
    return "ok"
