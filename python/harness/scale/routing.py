"""How many distinct experts a step touches: independent uniform routing, a published correction, or a measurement.

Every distinct expert's weights are read once, so this number, not the number of rows, is what a wide verify step costs.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harness.scale.values import ScaleError

Floats = npt.NDArray[np.float64]
LARGEST_EXPERT_COUNT = 1000  # binomials of larger sets overflow float64


class Routing(Protocol):
    """Expected distinct experts of one MoE layer."""

    @property
    def name(self) -> str:
        """For table headings."""
        ...

    def distinct(self, experts: int, top_k: int, rows: int) -> float:
        """Of `rows` rows that choose top_k experts each: the expected number of distinct ones."""
        ...

    def busiest(self, experts: int, top_k: int, rows: int, ranks: int) -> float:
        """The same on the rank with most of them, experts being dealt to `ranks` ranks at random."""
        ...


def _check(experts: int, top_k: int, rows: int, ranks: int = 1) -> None:
    if not 1 <= top_k <= experts <= LARGEST_EXPERT_COUNT:
        raise ScaleError(f"top-{top_k} of {experts} experts: expected 1 <= top_k <= experts <= {LARGEST_EXPERT_COUNT}")
    if rows < 1:
        raise ScaleError(f"{rows} rows: expected at least 1")
    if not 1 <= ranks <= experts:
        raise ScaleError(f"{experts} experts over {ranks} ranks: expected 1 to {experts} ranks")


def independent_distinct(experts: int, top_k: int, rows: int) -> float:
    """experts * (1 - (1 - top_k / experts) ** rows): uniform choices, independent between rows."""
    _check(experts, top_k, rows)
    return experts * -math.expm1(rows * math.log1p(-top_k / experts)) if top_k < experts else float(experts)


@lru_cache(maxsize=64)
def distinct_distribution(experts: int, top_k: int, rows: int) -> Floats:
    """[experts + 1] probability of d distinct experts, independent uniform routing.

    A Markov chain over rows: given d so far, the new ones of the next row are hypergeometric.
    """
    _check(experts, top_k, rows)
    chances = _new_experts(experts, top_k)
    p = np.zeros(experts + 1)
    p[0] = 1.0
    for _ in range(rows):
        after = np.zeros_like(p)
        for new in range(top_k + 1):
            after[new:] += (p * chances[:, new])[: experts + 1 - new]
        p = after
    p.flags.writeable = False  # it is shared by all callers
    return p


@lru_cache(maxsize=8)
def _new_experts(experts: int, top_k: int) -> Floats:
    """[d, new]: probability that a row's top_k experts hold `new` that are not among d given ones."""
    ways = math.comb(experts, top_k)
    return np.array(
        [
            [math.comb(experts - d, new) * math.comb(d, top_k - new) / ways for new in range(top_k + 1)]
            for d in range(experts + 1)
        ]
    )


@lru_cache(maxsize=32)
def busiest_of(experts: int, ranks: int) -> Floats:
    """[experts + 1] expected maximum per rank of d experts drawn without replacement, exactly.

    Ranks hold experts // ranks experts, the first experts % ranks one more. The number of draws with at most m on every
    rank is the coefficient of x^d in the product of the ranks' truncated binomial polynomials.
    """
    _check(experts, 1, 1, ranks)
    small, larger = divmod(experts, ranks)
    ways = np.array([math.comb(experts, d) for d in range(experts + 1)], dtype=np.float64)
    expected = np.zeros(experts + 1)
    for most in range(small + bool(larger)):
        at_most = _power(_binomials(small, most), ranks - larger, experts)
        if larger:
            at_most = _multiply(at_most, _power(_binomials(small + 1, most), larger, experts), experts)
        held = np.zeros(experts + 1)
        held[: len(at_most)] = at_most
        expected += 1.0 - held / ways
    expected.flags.writeable = False  # it is shared by all callers
    return expected


def _binomials(n: int, most: int) -> Floats:
    return np.array([math.comb(n, k) for k in range(min(n, most) + 1)], dtype=np.float64)


def _multiply(a: Floats, b: Floats, degree: int) -> Floats:
    return np.convolve(a, b)[: degree + 1]


def _power(base: Floats, exponent: int, degree: int) -> Floats:
    result = np.ones(1)
    while exponent:
        if exponent & 1:
            result = _multiply(result, base, degree)
        exponent >>= 1
        if exponent:
            base = _multiply(base, base, degree)
    return result


def _busiest_of_mean(experts: int, ranks: int, distinct: float) -> float:
    """busiest_of at a mean that is no integer, linear between its neighbours."""
    return float(np.interp(distinct, np.arange(experts + 1), busiest_of(experts, ranks)))


@dataclass(frozen=True)
class IndependentRouting:
    """Uniform and independent between rows: an upper estimate for the rows of one tree, which share their context."""

    name: str = "independent"

    def distinct(self, experts: int, top_k: int, rows: int) -> float:
        return independent_distinct(experts, top_k, rows)

    def busiest(self, experts: int, top_k: int, rows: int, ranks: int) -> float:
        _check(experts, top_k, rows, ranks)
        return float(distinct_distribution(experts, top_k, rows) @ busiest_of(experts, ranks))


INDEPENDENT = IndependentRouting()


@dataclass(frozen=True)
class ExcessRouting:
    """Only a share of the experts that independent rows would add to the first row's."""

    share: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ScaleError(f"excess share {self.share}: expected 0 to 1")

    @property
    def name(self) -> str:
        return f"{self.share:g} of the excess"

    def distinct(self, experts: int, top_k: int, rows: int) -> float:
        return top_k + self.share * (independent_distinct(experts, top_k, rows) - top_k)

    def busiest(self, experts: int, top_k: int, rows: int, ranks: int) -> float:
        _check(experts, top_k, rows, ranks)
        return _busiest_of_mean(experts, ranks, self.distinct(experts, top_k, rows))


@dataclass(frozen=True)
class MeasuredRouting:
    """A measured curve, linear between its points. Made by `load`; never extrapolated."""

    source: str
    experts: int
    top_k: int
    rows: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"measured ({self.source})"

    def distinct(self, experts: int, top_k: int, rows: int) -> float:
        _check(experts, top_k, rows)
        if (experts, top_k) != (self.experts, self.top_k):
            raise ScaleError(
                f"{self.source}: measured on top-{self.top_k} of {self.experts} experts, the model has top-{top_k} of "
                f"{experts}"
            )
        at = bisect_left(self.rows, rows)
        if at == len(self.rows):
            raise ScaleError(f"{self.source}: measured up to {self.rows[-1]} rows, {rows} asked for")
        if self.rows[at] == rows:
            return self.values[at]
        share = (rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return self.values[at - 1] + share * (self.values[at] - self.values[at - 1])

    def busiest(self, experts: int, top_k: int, rows: int, ranks: int) -> float:
        _check(experts, top_k, rows, ranks)
        return _busiest_of_mean(experts, ranks, self.distinct(experts, top_k, rows))


def load(path: Path) -> MeasuredRouting:
    """A curve from JSON: {"experts": E, "top_k": k, "source": TEXT, "points": [[rows, mean distinct experts], ...]}.

    The points start at 1 row, rows increase, distinct experts start at k, never fall and stay within k * rows and E.
    Raises ScaleError that names the file and the first entry that does not fit.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ScaleError(f"{path}: no readable JSON ({error})") from error
    if not isinstance(data, dict) or set(data) != {"experts", "top_k", "source", "points"}:
        raise ScaleError(f"{path}: expected an object with experts, top_k, source and points")
    experts, top_k, points = data["experts"], data["top_k"], data["points"]
    for name, value in (("experts", experts), ("top_k", top_k)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ScaleError(f"{path}: {name} is {value!r}, expected an integer")
    _check(experts, top_k, 1)
    if not isinstance(data["source"], str) or not data["source"].strip():
        raise ScaleError(f"{path}: source is {data['source']!r}, expected a text that says what was measured")
    if not isinstance(points, list) or not all(_is_point(point) for point in points):
        raise ScaleError(f"{path}: points must be pairs [rows, distinct experts]")
    if not points or points[0] != [1, top_k]:
        raise ScaleError(f"{path}: the first point must be [1, {top_k}]")
    for (rows, distinct), (more_rows, more) in pairwise(points):
        if more_rows <= rows or more < distinct:
            raise ScaleError(f"{path}: point [{more_rows}, {more}] does not continue [{rows}, {distinct}]")
        if more > min(experts, top_k * more_rows):
            raise ScaleError(f"{path}: point [{more_rows}, {more}] is more than {min(experts, top_k * more_rows)}")
    return MeasuredRouting(
        data["source"].strip(),
        experts,
        top_k,
        tuple(int(rows) for rows, _ in points),
        tuple(float(distinct) for _, distinct in points),
    )


def _is_point(point: object) -> bool:
    if not isinstance(point, list) or len(point) != 2:
        return False
    rows, distinct = point
    return (
        isinstance(rows, int)
        and not isinstance(rows, bool)
        and rows >= 1
        and isinstance(distinct, (int, float))
        and not isinstance(distinct, bool)
        and math.isfinite(distinct)
    )


def resolve(routing: str) -> Routing:
    """ "independent", "excess:SHARE", or the path of a measured curve."""
    if routing == "independent":
        return INDEPENDENT
    if routing.startswith("excess:"):
        try:
            return ExcessRouting(float(routing.removeprefix("excess:")))
        except ValueError as error:
            if isinstance(error, ScaleError):
                raise
            raise ScaleError(f"routing {routing!r}: expected excess:SHARE with a number from 0 to 1") from error
    return load(Path(routing))
