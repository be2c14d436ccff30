"""Distinct experts: closed form, exact distributions against enumeration, measured curves."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.scale import routing
from harness.scale.routing import INDEPENDENT, ExcessRouting
from harness.scale.values import ScaleError


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 8.0), (2, 15.8), (4, 31.0), (8, 59.5), (16, 109.8), (32, 188.2), (64, 284.2)]
)
def test_published_distinct_experts_of_k2(rows: int, expected: float) -> None:
    """Catches an error in D(N), on which every verify cost stands."""
    assert INDEPENDENT.distinct(384, 8, rows) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("experts", "top_k", "rows"), [(384, 8, 1), (384, 8, 16), (384, 8, 64), (64, 6, 9), (5, 5, 3)])
def test_distribution_has_the_closed_form_mean(experts: int, top_k: int, rows: int) -> None:
    """Catches an error in the Markov chain: its mean is known."""
    p = routing.distinct_distribution(experts, top_k, rows)
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    assert float(p @ np.arange(experts + 1)) == pytest.approx(INDEPENDENT.distinct(experts, top_k, rows), rel=1e-12)


@pytest.mark.parametrize(("experts", "ranks"), [(6, 2), (6, 3), (7, 3), (8, 5), (6, 6), (6, 1)])
def test_busiest_rank_against_every_draw(experts: int, ranks: int) -> None:
    """Catches an error in the generating functions, uneven ranks included: small cases are enumerated."""
    owner = [rank for rank in range(ranks) for _ in range(experts // ranks + (rank < experts % ranks))]
    for drawn in range(experts + 1):
        maxima = [
            max(Counter(owner[e] for e in chosen).values(), default=0)
            for chosen in itertools.combinations(range(experts), drawn)
        ]
        assert routing.busiest_of(experts, ranks)[drawn] == pytest.approx(np.mean(maxima), abs=1e-12)


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 2.57), (2, 4.11), (4, 6.73), (8, 11.15), (16, 18.27), (32, 28.45), (64, 39.71)]
)
def test_busiest_of_eight_ranks_of_k2(rows: int, expected: float) -> None:
    """Catches a drift of the exact figures. Simulated ones (2.48, 4.04, 6.73, 11.12, 18.29, 28.36, 39.66) differ from
    them by their noise."""
    assert INDEPENDENT.busiest(384, 8, rows, 8) == pytest.approx(expected, abs=0.006)


def test_busiest_of_eight_ranks_by_simulation() -> None:
    """Catches an exact figure that is exactly wrong: 20,000 draws, standard error 0.006."""
    random = np.random.default_rng(1)
    ranks = np.argpartition(random.random((20_000, 384)), 8, axis=1)[:, :8] // 48
    most = np.array([np.bincount(row).max() for row in ranks])
    assert most.mean() == pytest.approx(INDEPENDENT.busiest(384, 8, 1, 8), abs=4 * most.std() / len(most) ** 0.5)


def test_excess_lies_between_one_row_and_independence() -> None:
    """Catches the share being taken of the whole instead of the excess."""
    assert ExcessRouting(1.0).distinct(384, 8, 16) == INDEPENDENT.distinct(384, 8, 16)
    assert ExcessRouting(0.0).distinct(384, 8, 16) == 8.0
    half = ExcessRouting(0.5).distinct(384, 8, 16)
    assert half == pytest.approx((8.0 + INDEPENDENT.distinct(384, 8, 16)) / 2)
    assert ExcessRouting(0.5).busiest(384, 8, 16, 8) < INDEPENDENT.busiest(384, 8, 16, 8)


def curve(**changes: Any) -> dict[str, Any]:
    good = {"experts": 384, "top_k": 8, "source": "a trace", "points": [[1, 8], [4, 23.0], [8, 41.0]]}
    return good | changes


def write(folder: Path, data: Any) -> Path:
    path = folder / "curve.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_measured_curve(tmp_path: Path) -> None:
    """Catches interpolation off by one point, and extrapolation beyond what was measured."""
    measured = routing.resolve(str(write(tmp_path, curve())))
    assert [measured.distinct(384, 8, n) for n in (1, 2, 4, 6, 8)] == [8.0, 13.0, 23.0, 32.0, 41.0]
    assert measured.busiest(384, 8, 4, 8) == pytest.approx(routing.busiest_of(384, 8)[23])
    assert "a trace" in measured.name
    with pytest.raises(ScaleError, match="up to 8 rows, 9 asked for"):
        measured.distinct(384, 8, 9)
    with pytest.raises(ScaleError, match="top-8 of 384"):
        measured.distinct(256, 8, 4)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ([], "an object"),
        ({k: v for k, v in curve().items() if k != "source"}, "an object"),
        (curve(unit="experts"), "an object"),
        (curve(experts="384"), "experts is '384'"),
        (curve(top_k=True), "top_k is True"),
        (curve(top_k=385), "top-385"),
        (curve(experts=2000), "2000"),
        (curve(source=" "), "source"),
        (curve(points=[]), "first point"),
        (curve(points=[[2, 15]]), "first point"),
        (curve(points=[[1, 8], [2]]), "pairs"),
        (curve(points=[[1, 8], [2.5, 9]]), "pairs"),
        (curve(points=[[1, 8], [2, float("nan")]]), "pairs"),
        (curve(points=[[1, 8], [1, 9]]), "does not continue"),
        (curve(points=[[1, 8], [4, 20], [8, 19.9]]), "does not continue"),
        (curve(points=[[1, 8], [2, 16.1]]), "more than 16"),
        (curve(points=[[1, 8], [64, 384.5]]), "more than 384"),
    ],
)
def test_bad_curves_are_refused(tmp_path: Path, data: Any, named: str) -> None:
    """Catches a measurement that cannot be one going on as a table."""
    path = write(tmp_path, data)
    with pytest.raises(ScaleError) as refused:
        routing.load(path)
    assert named in str(refused.value)


@pytest.mark.parametrize("text", ["excess:", "excess:1.1", "excess:-0.1", "excess:nan", "excess:x", "no-such.json"])
def test_bad_routing_names(text: str) -> None:
    """Catches a share outside 0 to 1, and a traceback for a file that is not there."""
    with pytest.raises(ScaleError):
        routing.resolve(text)


@pytest.mark.parametrize("arguments", [(8, 9, 1, 1), (8, 0, 1, 1), (8, 2, 0, 1), (8, 2, 1, 9), (8, 2, 1, 0)])
def test_impossible_routing(arguments: tuple[int, int, int, int]) -> None:
    """Catches numbers that would give a plausible wrong answer."""
    with pytest.raises(ScaleError):
        INDEPENDENT.busiest(*arguments)
