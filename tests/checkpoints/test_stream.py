"""Reading ahead: every byte where it belongs, in bounded memory, in large reads, until told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine import EngineError
from kdtree_engine.checkpoint_stream import Piece, Stream


class Source:
    """Stands in for a file: bytes that name their place, and what was read."""

    def __init__(self, size: int = 1 << 20, seed: int = 0, delay: float = 0.0) -> None:
        self.data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.reads: list[tuple[int, int]] = []
        self.delay = delay
        self.path = Path(f"source{seed}")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if self.delay:
            time.sleep(self.delay)
        if offset + len(buffer) > self.data.nbytes:
            raise EngineError(f"{self.path} ended")
        self.reads.append((offset, len(buffer)))
        buffer[:] = self.data[offset : offset + len(buffer)].data


def piece(source: Source, offset: int, nbytes: int) -> Piece:
    return Piece(source, offset, nbytes)  # type: ignore[arg-type]


def check(plan: Sequence[Sequence[Piece]], window: int, ahead: int) -> None:
    count = 0
    with Stream(plan, window, ahead) as stream:
        for group, arrays in zip(plan, stream, strict=True):
            for p, a in zip(group, arrays, strict=True):
                source = p.file
                assert a.tobytes() == source.data[p.offset : p.offset + p.nbytes].tobytes()  # type: ignore[attr-defined]
                assert a.ctypes.data % 8 == p.offset % 8, "an aligned tensor must stay aligned"
            count += 1
    assert count == len(plan)


places = st.tuples(st.integers(0, 1), st.integers(0, 99_000), st.integers(1, 1000))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(places, min_size=1, max_size=3), max_size=40), st.integers(1, 5000), st.integers(1, 9000))
def test_any_plan_gets_its_own_bytes(groups: list[list[tuple[int, int, int]]], window: int, ahead: int) -> None:
    """Pieces that share windows, overlap, go backwards, change files, are larger than a window or than all the
    memory allowed: a buffer that is used again too early, or a reader that waits for its user who waits for
    it, shows here."""
    sources = [Source(100_000, 0), Source(100_000, 1)]
    plan = [[piece(sources[f], offset, n) for f, offset, n in group] for group in groups]
    check(plan, window, ahead)


def test_words_and_scales_that_lie_apart_are_two_sequential_streams() -> None:
    """safetensors sorts by dtype first: all words of a shard, then all scales. A seek per matrix would take
    hours on a disk that turns."""
    source = Source(1 << 20)
    plan = [[piece(source, i * 4096, 4096), piece(source, 600_000 + i * 512, 512)] for i in range(128)]
    check(plan, window=64 << 10, ahead=256 << 10)
    words = [r for r in source.reads if r[0] < 600_000]
    scales = [r for r in source.reads if r[0] >= 600_000]
    assert words == sorted(words) and scales == sorted(scales)
    assert len(words) == 128 * 4096 // (64 << 10) and len(scales) == 1
    assert sum(n for _, n in source.reads) == 128 * (4096 + 512), "nothing is read twice"


def test_neighbours_are_read_in_one_go_and_far_gaps_are_skipped() -> None:
    source = Source(4 << 20)
    check([[piece(source, i * 1000, 1000)] for i in range(100)], window=1 << 20, ahead=4 << 20)
    assert source.reads == [(0, 100_000)]
    source.reads.clear()
    check([[piece(source, 0, 1000)], [piece(source, 2 << 20, 1000)]], window=4 << 20, ahead=8 << 20)
    assert source.reads == [(0, 1000), (2 << 20, 1000)]


def test_memory_ahead_is_bounded() -> None:
    """A user slower than the disk must not find the whole checkpoint in memory."""
    source = Source(1 << 20)
    plan = [[piece(source, i * 10_000, 10_000)] for i in range(100)]
    with Stream(plan, window=10_000, ahead=30_000) as stream:
        for n, _ in enumerate(stream):
            time.sleep(0.002)
            assert len(source.reads) <= n + 4
            if n == 20:
                break


def reading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kdtree-read"]


@pytest.mark.parametrize("after", [0, 1, 7])
def test_leaving_early_ends_the_reader(after: int) -> None:
    source = Source(1 << 20, delay=0.001)
    plan = [[piece(source, i * 1000, 1000)] for i in range(500)]
    with pytest.raises(KeyboardInterrupt), Stream(plan, window=1000, ahead=5000) as stream:
        for n, _ in enumerate(stream):
            if n == after:
                raise KeyboardInterrupt
    assert not reading_threads() and len(source.reads) < 30


def test_an_error_of_the_reader_reaches_the_user() -> None:
    source = Source(1000)
    plan = [[piece(source, 0, 500)], [piece(source, 900, 500)]]
    seen = 0
    with pytest.raises(EngineError, match="source0 ended"), Stream(plan, window=500, ahead=5000) as stream:
        for _ in stream:
            seen += 1
    assert seen == 1 and not reading_threads()


def test_nothing_to_read() -> None:
    check([], 1000, 1000)
