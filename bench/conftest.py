"""Figures of the CPU kernels, each beside what the machine can do at that moment.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python -m pytest bench -o addopts= --benchmark-json=FILE

A figure on its own says little on a machine that others use too: before every ten rounds the yardstick runs (a plain
pass over as many bytes, or numpy's sgemm). `extra_info` holds the best and the median of both and their ratios, and the
floor that the ratio of the best rounds should reach: the best of many rounds is the least disturbed one.
KDTREE_BENCH_THREADS (default: one per core) and KDTREE_CPU_ISA choose the path.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kdtree_engine._native import ops
from machine import THREADS, Yardstick


@pytest.fixture(scope="session")
def yardstick() -> Yardstick:
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        assert name not in os.environ, f"{name} is set: numpy's sgemm would not be what this machine can do"
    return Yardstick()


@pytest.fixture
def measure(benchmark: BenchmarkFixture, yardstick: Yardstick) -> Callable[..., None]:
    """measure(call, reads=BYTES, flops=N, floor={"read": 0.8}): rounds of yardsticks and call in turn."""

    def run(
        call: Callable[[], object],
        reads: int = 0,
        flops: int = 0,
        floor: dict[str, float] | None = None,
        rounds: int = 15,
    ) -> None:
        sticks: dict[str, list[float]] = {}
        calls = 0

        def before() -> None:
            nonlocal calls
            calls += 1
            if calls % 10 != 1:
                return
            for _ in range(5):
                if reads:
                    sticks.setdefault("read", []).append(yardstick.read())
                if flops:
                    sticks.setdefault("sgemm", []).append(yardstick.sgemm())
            time.sleep(0.5)  # numpy's threads go on looking for work on the cores that are measured next

        benchmark.pedantic(call, setup=before, rounds=rounds, warmup_rounds=1)
        stats = benchmark.stats.stats  # type: ignore[union-attr]
        info: dict[str, Any] = benchmark.extra_info
        info["path"] = ops.description(THREADS)
        info["load_average"] = round(os.getloadavg()[0], 1)
        for name, amount, unit in (("read", reads, "GB/s"), ("sgemm", flops, "GFLOP/s")):
            if not amount:
                continue
            best, usual = max(sticks[name]), median(sticks[name])
            info[unit] = {"best": round(amount / stats.min / 1e9, 2), "median": round(amount / stats.median / 1e9, 2)}
            info[f"machine's {name}"] = {"best": round(best / 1e9, 2), "median": round(usual / 1e9, 2)}
            ratio = amount / stats.min / best
            info[f"ratio to {name}"] = {
                "best": round(ratio, 3),
                "median": round(amount / stats.median / usual, 3),
            }
            if floor and name in floor:
                info[f"floor of {name}"] = {"ratio": floor[name], "reached": ratio >= floor[name]}

    return run


@pytest.fixture(scope="session")
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["node"] = ""  # the host's name is nobody's business


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    output_json["command"] = "python -m pytest " + " ".join(
        a for a in config.invocation_params.args if not a.startswith("--benchmark-json")
    )
    output_json["python"] = sys.version.split()[0]
    output_json["numpy"] = np.__version__


def pytest_terminal_summary(terminalreporter: Any) -> None:
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    for b in getattr(session, "benchmarks", []):
        figures = ", ".join(f"{k} {v}" for k, v in b.extra_info.items() if k != "path")
        terminalreporter.write_line(f"{b.name}: {b.stats.median * 1e3:.3f} ms; {figures}")
