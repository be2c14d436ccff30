"""One .safetensors file: header checked whole before anything is used, tensors read on demand.

The format (a length, a JSON header, raw little-endian data) protects only readers that do the arithmetic:
offsets against shapes, shapes against the file's size, no holes, no overlaps. All of it happens in the
constructor. Tensors are read with pread into the caller's buffer, not mapped: a file that is cut short
while a model loads is then an error and not a SIGBUS. The file is opened once and checked by its descriptor.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from .config import LFS_POINTER, parse_json
from .errors import fail

__all__ = ["DTYPE_BYTES", "SafetensorsFile", "TensorEntry"]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_NAME = 512
_MAX_HEADER = 100_000_000  # the format's own cap


class TensorEntry(NamedTuple):
    """Where a tensor lies: `nbytes` bytes at absolute `offset` of `file`, row-major."""

    file: SafetensorsFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open, checked file; ``tensors`` maps names to entries in the order of their data.

    Raises EngineError: ``io`` where the operating system says no, ``bad_file`` for a file that breaks a rule.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never wait for a pipe
            info = os.fstat(self._fd)
        except OSError as error:
            self.close()
            fail("io", f"cannot open {path}: {error.strerror or error}", error)
        try:
            if not stat.S_ISREG(info.st_mode):
                self._bad("not a regular file")
            self.size = info.st_size
            if hasattr(os, "posix_fadvise"):
                # Reads here are large and planned. Taken for sequential ones, they would be split into the
                # kernel's read-ahead steps, which costs half the rate of a fast disk; taken for random ones,
                # each goes to the disk as it is.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (bytes) from `offset`; EngineError ``io`` where that is not possible."""
        while len(buffer) > 0:
            try:
                n = os.preadv(self._fd, [buffer], offset)
            except OSError as error:
                fail("io", f"cannot read {self.path} at byte {offset}: {error.strerror or error}", error)
            if n == 0:
                fail("io", f"{self.path} ended at byte {offset}: it was changed while it was read")
            buffer = buffer[n:]
            offset += n

    def _bad(self, message: str) -> Any:
        fail("bad_file", f"{self.path}: {message}")

    def _read_header(self) -> dict[str, TensorEntry]:
        if self.size < 8:
            self._bad(f"the file has {self.size} bytes; expected at least 8, the length of its header")
        raw = bytearray(8)
        self.read_into(memoryview(raw), 0)
        if LFS_POINTER.startswith(raw):
            self._bad("a pointer of Git LFS, not the weights themselves")
        (length,) = struct.unpack("<Q", raw)
        if length > _MAX_HEADER:
            self._bad(f"the header says that it has {length} bytes; at most {_MAX_HEADER} are allowed")
        if length > self.size - 8:
            self._bad(f"the file has {self.size} bytes, but its header alone needs {length + 8}: truncated")
        raw = bytearray(length)
        self.read_into(memoryview(raw), 8)
        header = parse_json(bytes(raw), f"{self.path}: the header")
        header.pop("__metadata__", None)

        base = 8 + length
        entries = [self._entry(name, value, base) for name, value in header.items()]
        entries.sort(key=attrgetter("offset", "nbytes"))
        end = base
        for entry in entries:
            if entry.offset != end:
                self._bad(f"tensor {entry.name} begins at byte {entry.offset}; expected {end}")
            end += entry.nbytes
        if end != self.size:
            what = "truncated" if self.size < end else "bytes follow the last tensor"
            self._bad(f"the file has {self.size} bytes; expected {end}, header and tensors: {what}")
        return {entry.name: entry for entry in entries}

    def _entry(self, name: str, value: Any, base: int) -> TensorEntry:
        if len(name) > _MAX_NAME:
            self._bad(f"a tensor has a name of {len(name)} characters; at most {_MAX_NAME} are allowed")
        if not name.isprintable() or not name:
            self._bad(f"a tensor is called {name!a}; expected printable characters")
        if not isinstance(value, dict) or value.keys() != _FIELDS:
            self._bad(f"tensor {name}: expected the fields dtype, shape and data_offsets")
        dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            self._bad(f"tensor {name}: dtype {dtype!r} is not known")
        if not _is_sizes(shape) or len(shape) > 8:
            self._bad(f"tensor {name}: shape is {shape!r}; expected at most 8 sizes")
        if not _is_sizes(span) or len(span) != 2 or span[0] > span[1]:
            self._bad(f"tensor {name}: data_offsets are {span!r}; expected [begin, end]")
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        if span[1] - span[0] != nbytes:
            self._bad(f"tensor {name}: {dtype} {shape} takes {nbytes} bytes; its offsets are {span}")
        return TensorEntry(self, name, dtype, tuple(shape), base + span[0], nbytes)


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110  # all() of a generator takes twice the time, of hundreds of thousands of lists
        if type(n) is not int or n < 0:
            return False
    return True
