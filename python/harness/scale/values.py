"""Numbers that know where they come from, and the error of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["measured", "published", "modelled"]

GB = 1e9
GIB = float(2**30)


class ScaleError(ValueError):
    """A shape, layout, file or option that the arithmetic cannot serve. One sentence that names it."""


@dataclass(frozen=True)
class Sourced:
    """A number with its origin.

    kind: "measured" (by this project, on the hardware named), "published" (by the source named) or "modelled" (our
    estimate; `source` says from what).
    """

    value: float
    unit: str
    kind: Kind
    source: str

    def __float__(self) -> float:
        return float(self.value)
