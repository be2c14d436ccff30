"""What stands beside the times of a benchmark, in `extra_info`; `python -m harness.report` reads it."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from kdtree_engine.benchmark import Roofline
from kdtree_engine.cli.bench import clocks


def rates(amount: float, best: float, usual: float) -> dict[str, float]:
    """10^9 per second of the best and the median round."""
    return {"best": round(amount / best / 1e9, 3), "median": round(amount / usual / 1e9, 3)}


class Record:
    """What goes into `extra_info` of one benchmark.

    `bytes`: read by one call, `bytes_are` exactly or at least so many; `working_set`: bytes between two reads of the
    same one; `flops` of one call. `sticks`: the machine's rates while it ran, in bytes and operations per second.
    """

    def __init__(
        self, roofline: Roofline, device: str, path: str, *, bytes: float = 0, working_set: float = 0,
        flops: float = 0, exact: bool = True,
    ) -> None:  # fmt: skip
        self.roofline, self.device, self.path = roofline, device, path
        self.bytes, self.flops, self.exact = bytes, flops, exact
        self.working_set = working_set or bytes

    def fill(self, benchmark: BenchmarkFixture, sticks: dict[str, list[float]]) -> None:
        if benchmark.stats is None:  # --benchmark-disable: run, not timed
            return
        stats = benchmark.stats.stats
        info: dict[str, Any] = benchmark.extra_info
        info |= {"device": self.device, "path": self.path, "load_average": round(os.getloadavg()[0], 1)}
        info["clocks"] = clocks(self.device, self.path)
        info["last_level_cache"] = self.roofline.cache
        floors: dict[str, float] = {}
        if self.bytes:
            state = self.roofline.state(self.working_set)
            best = max(sticks["read"])
            # The median round is judged: a clock that is wrong is wrong in all of them.
            rate = self.bytes / stats.median
            best = self.roofline.check(benchmark.name, self.working_set, rate, best)
            info |= {
                "bytes": int(self.bytes),
                "bytes_are": "exact" if self.exact else "at least",
                "working_set": int(self.working_set),
                "cache": state,
                "gb_per_second": rates(self.bytes, stats.min, stats.median),
                "machine_read_gb_per_second": {
                    "best": round(best / 1e9, 3), "median": round(median(sticks["read"]) / 1e9, 3),
                },
            }  # fmt: skip
            if state == "cold":
                floors["memory"] = self.bytes / best
                info["percent_of_read"] = {
                    "best": round(100 * self.bytes / stats.min / best, 1),
                    "median": round(100 * rate / median(sticks["read"]), 1),
                }
        if self.flops:
            info["flops"] = int(self.flops)
            info["gflops"] = rates(self.flops, stats.min, stats.median)
            if "sgemm" in sticks:
                best = max(sticks["sgemm"])
                info["machine_gflops"] = {
                    "best": round(best / 1e9, 3), "median": round(median(sticks["sgemm"]) / 1e9, 3),
                }  # fmt: skip
                floors["arithmetic"] = self.flops / best
        if floors:
            by = max(floors, key=lambda name: floors[name])
            info["floor"] = {"seconds": floors[by], "by": by, "percent": round(100 * floors[by] / stats.median, 1)}
