"""Reading a checkpoint at the rate of its disk: large sequential reads, ahead of whoever uses the bytes.

A plan of small pieces (a tensor, a third of an INT4 matrix) becomes *windows*: runs of a file that are read
in one go. Neighbouring pieces share a window. The parts of an INT4 matrix often lie far apart, because
safetensors sorts by dtype before name (all the words of a shard, then all its scales); each part then has a
window of its own, and the disk sees a few interleaved sequential streams, not a seek per matrix.

One thread reads windows in the order of their first use, at most `AHEAD` bytes of them at a time. So memory
is bounded by AHEAD or by the largest piece, whichever is more, and the CPU lays out one matrix while the
disk delivers the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .safetensors_file import SafetensorsFile

__all__ = ["AHEAD", "WINDOW", "Piece", "Stream"]

WINDOW = 32 << 20
"""Bytes of one read; a larger piece is a window of its own."""

AHEAD = 4 * WINDOW
"""Bytes of windows that are being read, or have been and are not used up."""

_GAP = 64 << 10  # unwanted bytes between two pieces that are cheaper read than skipped
_ALIGN = 64  # bytes of a file keep their alignment in memory, so that arrays are as aligned as the file is

Bytes = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """`nbytes` bytes at `offset` of `file`."""

    file: SafetensorsFile
    offset: int
    nbytes: int


@dataclass(eq=False)
class _Window:
    file: SafetensorsFile
    start: int
    end: int
    users: int = 0
    data: Bytes | None = None
    storage: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def size(self) -> int:
        return self.end - self.start


class Stream:
    """Iterates over `plan`, a sequence of groups of pieces, yielding the bytes of each group's pieces.

    The arrays of a group are valid until the next group is asked for. Use it in a ``with``: leaving it ends
    the reading thread, also in the middle. Raises EngineError ``io`` where a file cannot be read.
    """

    def __init__(self, plan: Sequence[Sequence[Piece]], window: int = WINDOW, ahead: int = AHEAD) -> None:
        self._plan = plan
        self._ahead = ahead
        self._windows, self._where = _layout(plan, window)
        self._spare: list[Bytes] = []
        self._held = 0  # bytes of windows between their reading and their last use
        self._stopped = False
        self._starved = False  # the user waits for a window
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_all, name="kdtree-read", daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Iterator[list[Bytes]]:
        at = 0
        for group in self._plan:
            windows = self._where[at : at + len(group)]
            at += len(group)
            pieces = []
            for window, piece in zip(windows, group, strict=True):
                data = self._wait(window)
                pieces.append(data[piece.offset - window.start :][: piece.nbytes])
            yield pieces
            self._release(windows)

    def _wait(self, window: _Window) -> Bytes:
        if window.data is None:
            with self._changed:
                self._starved = True
                self._changed.notify_all()
                while window.data is None and self._error is None:
                    self._changed.wait()
                self._starved = False
        if window.data is None:
            assert self._error is not None
            raise self._error
        return window.data

    def _release(self, windows: Sequence[_Window]) -> None:
        for window in windows:
            window.users -= 1
            if window.users == 0:
                with self._changed:
                    self._held -= window.size
                    if window.storage.nbytes <= self._ahead:
                        self._spare.append(window.storage)
                    window.data, window.storage = None, np.empty(0, np.uint8)
                    self._changed.notify_all()

    def _read_all(self) -> None:
        try:
            for window in self._windows:
                with self._changed:
                    # Windows come in the order of their first use. So a user who waits, waits for this one
                    # or for none, and it has to be read whatever is held.
                    while self._held + window.size > self._ahead and not self._starved and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        return
                    self._held += window.size
                    first = window.start % _ALIGN
                    window.storage = self._storage(first + window.size)
                data = window.storage[first : first + window.size]
                window.file.read_into(data.data, window.start)
                with self._changed:
                    window.data = data
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _storage(self, nbytes: int) -> Bytes:
        """A spare buffer that fits without much waste, or a new one. Reuse saves touching fresh pages."""
        fitting = [s for s in self._spare if nbytes <= s.nbytes <= 2 * nbytes + (1 << 20)]
        if fitting:
            best = min(fitting, key=lambda s: s.nbytes)
            self._spare = [s for s in self._spare if s is not best]
            return best
        while self._spare and sum(s.nbytes for s in self._spare) + self._held > self._ahead:
            self._spare.pop(0)
        return _aligned(nbytes)


def _aligned(nbytes: int) -> Bytes:
    raw = np.empty(nbytes + _ALIGN, np.uint8)
    skip = -raw.ctypes.data % _ALIGN
    return raw[skip : skip + nbytes]


def _layout(plan: Sequence[Sequence[Piece]], most: int) -> tuple[list[_Window], list[_Window]]:
    """The windows in the order of their first use, and for each piece of the plan, in order, its window."""
    windows: list[_Window] = []
    where: list[_Window] = []
    open_ones: list[_Window] = []  # of the latest groups: pieces may join them
    for group in plan:
        joined: list[_Window] = []
        for piece in group:
            window = _joinable(open_ones, piece, most) or _joinable(joined, piece, most)
            if window is None:
                window = _Window(piece.file, piece.offset, piece.offset + piece.nbytes)
                windows.append(window)
            window.end = max(window.end, piece.offset + piece.nbytes)
            window.users += 1
            where.append(window)
            joined.append(window)
        # A window that this group passed over stays open: the next matrix may go on where it ends.
        kept = [w for w in open_ones if w not in joined and w.file is joined[0].file] if joined else open_ones
        open_ones = list(dict.fromkeys([*joined, *kept]))[:_STREAMS]
    return windows, where


_STREAMS = 4  # windows of one file that grow side by side


def _joinable(windows: Sequence[_Window], piece: Piece, most: int) -> _Window | None:
    end = piece.offset + piece.nbytes
    for window in windows:
        if (
            window.file is piece.file
            and window.start <= piece.offset <= window.end + _GAP
            and (end <= window.end or end - window.start <= most)
        ):
            return window
    return None
