"""What the machine can do: the yardsticks that every figure stands beside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from kdtree_engine._native import ops
from kdtree_engine.benchmark import Roofline

THREADS = int(os.environ.get("KDTREE_BENCH_THREADS", len(os.sched_getaffinity(0))))
SET_BYTES = 256 << 20  # weights of one measurement: many times any last-level cache


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Yardstick:
    """What the machine can do: bytes read per second, float32 operations per second."""

    def __init__(self) -> None:
        self.stream = np.ones(SET_BYTES // 4, dtype=np.float32)
        self.a = np.ones((1024, 4096), dtype=np.float32)
        self.b = np.ones((4096, 1024), dtype=np.float32)
        self.roofline = Roofline(self.best_read, ops.last_level_cache(), SET_BYTES)

    def read(self) -> float:
        return SET_BYTES / seconds(lambda: ops.stream_sum(self.stream, threads=THREADS))

    def best_read(self, size: int, passes: int) -> float:
        return max(self.read() for _ in range(passes))

    def sgemm(self) -> float:
        return 2 * 1024 * 4096 * 1024 / seconds(lambda: self.a @ self.b)
