"""INT4: whole steps (one round over N nodes) and whole decodings, plain against DDTree, at Moonlight's widths.

Drafts are planted from the plain run: the truth at random ranks, broken at random depths. They show what the mechanism
costs and gains at the accepted length that stands beside them, not what a drafter does.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from engines import Bench


@pytest.fixture(scope="module")
def model() -> Bench:
    return Bench("int4", layers=4)


@pytest.mark.parametrize("nodes", [0, 4, 16, 64])
def test_step_int4(benchmark: BenchmarkFixture, model: Bench, nodes: int) -> None:
    model.run(benchmark, "planted" if nodes else "none", nodes, rounds=9, steps=True)


@pytest.mark.parametrize("budget", ["plain", 8, 16, "auto"])
def test_decode_int4(benchmark: BenchmarkFixture, model: Bench, budget: int | str) -> None:
    plain = budget == "plain"
    model.run(benchmark, "none" if plain else "planted", 0 if plain else budget, rounds=5, steps=False)
