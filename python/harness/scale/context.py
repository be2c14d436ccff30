"""What the tables are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.scale.hardware import SYSTEMS, System
from harness.scale.layout import Layout, Small, tensor_parallel
from harness.scale.model import Assumptions
from harness.scale.routing import INDEPENDENT, Routing
from harness.scale.shapes import K26, Shape

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Context:
    """tp: width of tensor parallelism in the tables of one domain; tokens: cached positions of a sequence there."""

    shape: Shape = K26
    routing: Routing = INDEPENDENT
    systems: Sequence[System] = field(default_factory=lambda: tuple(SYSTEMS.values()))
    widths: Sequence[int] = WIDTHS
    tokens: int = 4096
    tp: int = 8
    small: Small = "sharded"

    @property
    def layout(self) -> Layout:
        return tensor_parallel(self.tp, self.small)

    @property
    def target(self) -> Assumptions:
        return Assumptions(routing=self.routing)

    @property
    def roofline(self) -> Assumptions:
        return Assumptions(nominal=True, communication=False, overhead=False, routing=self.routing)
