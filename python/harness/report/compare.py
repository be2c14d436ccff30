"""Two runs side by side: faster, slower, or within what noise explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.results import Figure, Run

RESOLUTION = 0.02  # relative: differences below it are never called one


@dataclass(frozen=True)
class Comparison:
    """`change`: time of the new one over the old one, less 1; `bound`: what noise explains, relative, None where a file
    does not say how its times spread."""

    old: Figure
    new: Figure
    change: float
    bound: float | None

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return "spread unknown"
        if abs(math.log1p(self.change)) <= self.bound:
            return "within noise"
        return "faster" if self.change < 0 else "slower"


def compare(old: Figure, new: Figure) -> Comparison:
    """The noise of both medians together, and how much the machine itself changed: its own rates were measured beside
    both (memory or sgemm, whichever changed more)."""
    change = new.seconds / old.seconds - 1
    if old.noise is None or new.noise is None:
        return Comparison(old, new, change, 0.0 if change == 0 else None)
    pairs = ((old.read, new.read), (old.sgemm, new.sgemm))
    drift = max((abs(math.log(b / a)) for a, b in pairs if a and b), default=0.0)
    return Comparison(old, new, change, max(RESOLUTION, math.hypot(old.noise, new.noise) + drift))


def common(old: Run, new: Run) -> list[Comparison]:
    """Of the benchmarks that both have, in the new one's order."""
    before = {(f.phase, f.name): f for f in old.figures}
    return [compare(before[f.phase, f.name], f) for f in new.figures if (f.phase, f.name) in before]


def only_in(one: Run, other: Run) -> Sequence[str]:
    """Names of benchmarks that the other run does not have."""
    names = {(f.phase, f.name) for f in other.figures}
    return [f.name for f in one.figures if (f.phase, f.name) not in names]
