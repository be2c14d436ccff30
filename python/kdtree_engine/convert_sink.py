"""Where a conversion writes: a folder of safetensors, or a .kdtr bundle, shard by shard.

A target appears at one moment, complete. Until then a folder has no config.json and a bundle another name, so
nothing takes the half of one for a model. What is finished of it is remembered in a state file, shard by shard:
the same command run again goes on behind the last finished shard. Every shard is on the disk before the state says
so, and the state before the target appears.

For a folder the state is ``TARGET/conversion.json``; for a bundle it is ``TARGET.partial.json`` beside
``TARGET.partial``. A bundle's shards are stretches of one file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _kdtr_writer
from ._crc32c import combine, crc32c
from ._kdtr_rules import ALIGNMENT, DTYPE_NUMBERS, align_up
from .config import load_json
from .convert_plan import Job, Tally, Tensor
from .errors import fail
from .safetensors_file import DTYPE_BYTES

__all__ = ["BundleSink", "FolderSink", "Sink"]

STATE = "conversion.json"
_INDEX = "model.safetensors.index.json"


class Sink(ABC):
    """The parts of a target in the order in which they are written: ``begin(k)``, any number of ``write`` from
    any thread, ``finish(k)``; at last ``commit``. ``finished``: tallies of the shards that an earlier run
    has finished, by number; what ``finish`` remembers is added to it. ``complete``: an earlier run did it all and
    was stopped before it could clear away."""

    def __init__(self, target: Path, state: Path, shards: Sequence[Sequence[Job]], fingerprint: str) -> None:
        self.target = target
        self.shards = shards
        self.finished: dict[int, Tally] = {}
        self.complete = False
        self._state = state
        self._fingerprint = fingerprint
        self._fd = -1
        self._offsets: dict[str, int] = {}
        self._ours = False  # locked, and not another conversion's

    def __enter__(self) -> Sink:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Close everything; drop what is not finished."""

    @abstractmethod
    def begin(self, shard: int) -> None: ...

    @abstractmethod
    def finish(self, shard: int, tally: Tally) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    def write(self, name: str, offset: int, array: npt.NDArray[Any]) -> None:
        """Put a piece of a tensor at `offset` bytes from its beginning. Raises OSError."""
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        at = self._offsets[name] + offset
        while len(view) > 0:
            n = os.pwrite(self._fd, view, at)
            view, at = view[n:], at + n

    def load_state(self) -> dict[str, Any]:
        """What an earlier run left; empty where there was none. EngineError where it was another conversion."""
        if not self._state.exists():
            return {}
        state = load_json(self._state)
        if state.get("fingerprint") != self._fingerprint:
            fail(
                "invalid_argument",
                f"{self.target} is an unfinished conversion of another source or with other options "
                f"({self._state}); remove it to start anew",
            )
        done = state.get("shards", {})
        try:
            self.finished = {int(k): Tally(*map(float, v)) for k, v in done.items()}
        except (AttributeError, TypeError, ValueError) as error:
            fail("bad_file", f"{self._state} is damaged; remove the unfinished {self.target}", error)
        return state

    def save_state(self, **more: Any) -> None:
        state = {
            "about": "an unfinished conversion; the same kdtree convert goes on with it",
            "fingerprint": self._fingerprint,
            "shards": {str(k): list(tally) for k, tally in self.finished.items()},
            **more,
        }
        write_whole(self._state, json.dumps(state).encode())


def write_whole(path: Path, data: bytes) -> None:
    """A file that is whole or what it was before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _kdtr_writer.flush_folder(str(path.parent))


def _reserve(fd: int, size: int) -> None:
    """Take the space of a whole shard now: a full disk is better found before the work than after it."""
    os.ftruncate(fd, 0)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(fd, size)


def _check_space(target: Path, folder: Path, needed: int) -> None:
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if needed > free:
        fail("io", f"{target} needs {needed / 2**30:.2f} GiB more; its disk has {free / 2**30:.2f} GiB left")


def _lock(fd: int, target: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fail("io", f"another conversion is writing {target}", error)


class FolderSink(Sink):
    """``model-00001-of-0000N.safetensors`` with their index, or one ``model.safetensors``.

    `config` becomes config.json; `companions` are files that come along (the tokenizer's, the template's).
    Raises EngineError: ``invalid_argument`` where `target` holds something else.
    """

    def __init__(
        self,
        target: Path,
        shards: Sequence[Sequence[Job]],
        fingerprint: str,
        config: Mapping[str, Any],
        companions: Sequence[Path],
    ) -> None:
        super().__init__(target, target / STATE, shards, fingerprint)
        self._config = config
        self._companions = companions
        self._made = False
        with contextlib.suppress(FileExistsError):
            target.mkdir(parents=True)
            self._made = True
        self._folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(self._folder, target)
            if not self._state.exists() and any(target.iterdir()):
                fail("invalid_argument", f"{target} exists and is not empty; choose another name")
            self.load_state()
            self._ours = True
            for path in target.glob("*.tmp"):
                path.unlink()
            if (target / "config.json").exists():
                self.complete = True
                self._state.unlink()
                return
            self.finished = {k: v for k, v in self.finished.items() if (target / self.name(k)).exists()}
            left = (job.nbytes for k, jobs in enumerate(shards) if k not in self.finished for job in jobs)
            _check_space(target, target, sum(left))
            self.save_state()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._temporary.unlink()
        if self._ours and not self.complete and all(path.name == STATE for path in self.target.iterdir()):
            self._state.unlink(missing_ok=True)  # nothing to go on with
            if self._made:
                self.target.rmdir()
        os.close(self._folder)

    def name(self, shard: int) -> str:
        many = len(self.shards)
        return "model.safetensors" if many == 1 else f"model-{shard + 1:05}-of-{many:05}.safetensors"

    def begin(self, shard: int) -> None:
        # The order of the format's own library: large elements first, so that all are aligned; then by name.
        tensors = sorted(
            (tensor for job in self.shards[shard] for tensor in job.outputs),
            key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name),
        )
        header, size = _header(tensors)
        self._temporary = self.target / (self.name(shard) + ".tmp")
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _reserve(self._fd, len(header) + size)
        self._offsets = {}
        at = len(header)
        for tensor in tensors:
            self._offsets[tensor.name] = at
            at += tensor.nbytes
        self._offsets[""] = 0
        self.write("", 0, np.frombuffer(header, np.uint8))

    def finish(self, shard: int, tally: Tally) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.replace(self._temporary, self.target / self.name(shard))
        os.fsync(self._folder)
        self.finished[shard] = tally
        self.save_state()

    def commit(self) -> None:
        for path in self._companions:
            if not (self.target / path.name).exists():
                write_whole(self.target / path.name, path.read_bytes())
        if len(self.shards) > 1:
            names = {t.name: self.name(k) for k, jobs in enumerate(self.shards) for job in jobs for t in job.outputs}
            size = sum(job.nbytes for jobs in self.shards for job in jobs)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
            write_whole(self.target / _INDEX, json.dumps(index, indent=2).encode())
        write_whole(self.target / "config.json", (json.dumps(self._config, indent=2) + "\n").encode())
        self._state.unlink()


def _header(tensors: Sequence[Tensor]) -> tuple[bytes, int]:
    """Length, header and padding of a safetensors file, and the bytes of data behind them."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


_KDTR = {"F32": "f32", "BF16": "bf16", "F16": "f16", "I32": "i32"}


class BundleSink(Sink):
    """One .kdtr file. `fields` are the config's."""

    def __init__(
        self, target: Path, shards: Sequence[Sequence[Job]], fingerprint: str, fields: Mapping[str, float]
    ) -> None:
        partial = target.with_name(target.name + ".partial")
        super().__init__(target, partial.with_name(partial.name + ".json"), shards, fingerprint)
        self._partial = partial
        if target.exists():
            if not self._state.exists() or partial.exists():
                fail("invalid_argument", f"{target} exists; choose another name")
            self.load_state()
            self._state.unlink()
            self.complete = True
            return
        scalars = {f"config.{key}".encode(): np.float64(value).tobytes() for key, value in fields.items()}
        entries = [_kdtr_writer.Entry(name, DTYPE_NUMBERS["f64"], (), 8, crc32c(v)) for name, v in scalars.items()]
        for job in (job for jobs in shards for job in jobs):
            entries += [
                _kdtr_writer.Entry(t.name.encode(), DTYPE_NUMBERS[_KDTR[t.dtype]], t.shape, t.nbytes, 0)
                for t in job.outputs
            ]
        self._entries = sorted(entries, key=lambda entry: entry.name)
        header, index, offsets = _kdtr_writer.layout(self._entries, str(target))
        self._head = len(header) + len(index)
        self._offsets = {e.name.decode(): at for e, at in zip(self._entries, offsets, strict=True)}
        self._size = align_up(offsets[-1] + self._entries[-1].nbytes)
        self._crcs: dict[str, int] = {}
        self._pieces: dict[str, list[tuple[int, int, int]]] = {}  # (offset, bytes, crc) of the shard in work
        self._mutex = threading.Lock()
        self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(self._fd, target)
            self._crcs = {str(k): int(v) for k, v in self.load_state().get("crcs", {}).items()}
            self._ours = True
            if os.fstat(self._fd).st_size != self._size:
                self.finished = {}
                _check_space(target, target.parent, self._size)
                _reserve(self._fd, self._size)
            self.save_state(crcs=self._crcs)
            for name, value in scalars.items():
                super().write(name.decode(), 0, np.frombuffer(value, np.uint8))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._ours and not self.finished and not self.complete:  # nothing to go on with
            self._partial.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)

    def begin(self, shard: int) -> None:
        self._pieces = {tensor.name: [] for job in self.shards[shard] for tensor in job.outputs}

    def write(self, name: str, offset: int, array: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        super().write(name, offset, data)
        piece = (offset, data.nbytes, crc32c(data.data))
        with self._mutex:
            self._pieces[name].append(piece)

    def finish(self, shard: int, tally: Tally) -> None:
        os.fdatasync(self._fd)
        for name, pieces in self._pieces.items():
            crc = 0
            for _, nbytes, piece in sorted(pieces):
                crc = combine(crc, piece, nbytes)
            self._crcs[name] = crc
        self.finished[shard] = tally
        self.save_state(crcs=self._crcs)

    def commit(self) -> None:
        entries = [e._replace(crc=self._crcs.get(e.name.decode(), e.crc)) for e in self._entries]
        header, index, _ = _kdtr_writer.layout(entries, str(self.target))
        assert len(header) + len(index) == self._head and self._size % ALIGNMENT == 0
        self._offsets[""] = 0
        super().write("", 0, np.frombuffer(header + index, np.uint8))
        os.fsync(self._fd)
        os.rename(self._partial, self.target)
        _kdtr_writer.flush_folder(str(self.target.parent))
        self._state.unlink()
