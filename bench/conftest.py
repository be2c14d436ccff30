"""Figures of kernels, steps and whole decodings, each beside what the machine can do at that moment.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python -m pytest bench -o addopts= --benchmark-json=FILE

A figure on its own says little on a machine that others use too: before every ten rounds the yardsticks run (a plain
pass over as many bytes, or numpy's sgemm). `extra_info` of each record (bench/records.py) holds the bytes that were
read and the operations, the rates of the best and the median round, the machine's own rates at that time, the floor
(what the machine's best rates would take), the state of the last cache and the clocks. More bytes per second than the
machine reads, from a working set of more than four times the last cache, fail the benchmark; less than that is
labelled `in cache`. `python -m harness.report` reads these files.

KDTREE_BENCH_THREADS (default: one per core) and KDTREE_CPU_ISA choose the path of the kernels; steps and decodings run
on KDTREE_BENCH_DEVICE (`auto`, `cpu`, `cuda`). Kernels on CUDA have a program of their own: bench/cuda.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kdtree_engine._native import ops
from machine import THREADS, Yardstick
from records import Record


@pytest.fixture(scope="session")
def yardstick() -> Yardstick:
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        assert name not in os.environ, f"{name} is set: numpy's sgemm would not be what this machine can do"
    return Yardstick()


@pytest.fixture
def measure(benchmark: BenchmarkFixture, yardstick: Yardstick) -> Callable[..., None]:
    """measure(call, reads=BYTES, flops=N, working_set=BYTES): rounds of yardsticks and a kernel's call in turn."""

    def run(
        call: Callable[[], object],
        reads: float = 0,
        flops: float = 0,
        working_set: float = 0,
        exact: bool = True,
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
        about = ops.description(THREADS)
        record = Record(
            yardstick.roofline, "cpu", about, bytes=reads, working_set=working_set, flops=flops, exact=exact
        )
        record.fill(benchmark, sticks)

    return run


@pytest.fixture(scope="session")
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["node"] = ""  # the host's name is nobody's business
    machine_info.get("cpu", {}).pop("flags", None)  # two hundred lines of every file; `path` says what is used


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    output_json["command"] = "python -m pytest " + " ".join(
        a for a in config.invocation_params.args if not a.startswith(("--benchmark-json", "--junitxml"))
    )
    output_json["python"] = sys.version.split()[0]
    output_json["numpy"] = np.__version__
    for b in output_json["benchmarks"]:
        b["stats"].pop("data", None)  # every round; the quartiles stay


def pytest_terminal_summary(terminalreporter: Any) -> None:
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    for b in getattr(session, "benchmarks", []):
        info = b.extra_info
        line = f"{b.name}: {b.stats.median * 1e3:.3f} ms"
        if "gb_per_second" in info:
            share = f", {info['percent_of_read']['median']} % of read" if "percent_of_read" in info else ""
            line += f"; {info['gb_per_second']['median']} GB/s ({info['cache']}{share})"
        if "gflops" in info:
            line += f"; {info['gflops']['median']} GFLOP/s"
        if "floor" in info:
            line += f"; {info['floor']['percent']} % of the floor ({info['floor']['by']})"
        if "accepted_length" in info:
            line += f"; {info['accepted_length']:.2f} tokens a round"
        terminalreporter.write_line(line)
