"""The curves of the plots, as numbers: computed without a plot library, so that a test can tell a stale picture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.scale import hardware, inventory, model
from harness.scale.context import Context
from harness.scale.layout import data_parallel_attention, tensor_parallel
from harness.scale.model import Work
from harness.scale.routing import INDEPENDENT, ExcessRouting
from harness.scale.tables_cluster import CLUSTER, EP_CONTEXT
from harness.scale.values import GB

MS = 1e3
PLOT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Curve:
    """dashed: a second family in the same picture. points: markers without a line."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False
    points: bool = False


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]

    def digest(self) -> str:
        """Of everything that is drawn, numbers to six digits: what the picture is of."""
        drawn = [
            [c.label, [f"{v:.6g}" for v in c.x], [f"{v:.6g}" for v in c.y], c.dashed, c.points] for c in self.curves
        ]
        text = json.dumps([self.title, self.x_label, self.y_label, drawn])
        return hashlib.sha256(text.encode()).hexdigest()


def step_bytes(context: Context) -> Plot:
    """Weight bytes of a step against its rows."""
    shape = context.shape
    expert, rest = inventory.expert_bytes(shape) * shape.moe_layers, inventory.non_expert_bytes(shape)
    curves = []
    for routing in (INDEPENDENT, ExcessRouting(0.7), ExcessRouting(0.5)):
        read = [(routing.distinct(shape.experts, shape.top_k, n) * expert + rest) / GB for n in PLOT_WIDTHS]
        curves.append(Curve(f"{routing.name}", PLOT_WIDTHS, tuple(read)))
    curves.append(Curve("non-expert weights alone", PLOT_WIDTHS, (rest / GB,) * len(PLOT_WIDTHS), dashed=True))
    title = f"{shape.name}: weight bytes of one step"
    return Plot(title, "rows of the step (1 + tree nodes)", "GB", tuple(curves))


def break_even(context: Context) -> Plot:
    """Tokens a round must emit, and what published drafters emit."""
    curves = []
    for system in context.systems:
        needed = [
            model.speculative_round(
                system, context.shape, context.layout, Work(rows=n, context=context.tokens), context.target
            ).break_even
            for n in PLOT_WIDTHS
        ]
        curves.append(Curve(system.title, PLOT_WIDTHS, tuple(needed)))
    published = hardware.ACCEPTANCES
    x, y = tuple(float(a.rows) for a in published), tuple(a.tokens for a in published)
    curves.append(Curve("published drafters: tokens a round", x, y, points=True))
    title = f"{context.shape.name}, TP{context.tp}: tokens a round must emit, DFlash's pass included"
    return Plot(title, "rows of the verify step", "tokens a round", tuple(curves))


def tp_across(context: Context) -> Plot:
    """One sequence on more and more GPUs."""
    curves = []
    for system in context.systems:
        if system.gpus < max(CLUSTER):
            continue
        for rows in (1, 8):
            work = Work(rows=rows, context=context.tokens)
            times = [
                model.step(system, context.shape, tensor_parallel(g, context.small), work, context.target).total * MS
                for g in CLUSTER
            ]
            label = f"{system.title}, {rows} row{'s' if rows > 1 else ''}"
            curves.append(Curve(label, CLUSTER, tuple(times), dashed=rows > 1))
    title = f"{context.shape.name}: one sequence, tensor parallelism over all GPUs"
    return Plot(title, "GPUs", "step, ms", tuple(curves))


def wide_ep(context: Context) -> Plot:
    """Many sequences on more and more GPUs."""
    curves = []
    for system in context.systems:
        if system.gpus < max(CLUSTER):
            continue
        for per_gpu in (16, 64):
            rates = []
            for gpus in CLUSTER:
                work = Work(per_gpu * gpus, 1, EP_CONTEXT)
                layout = data_parallel_attention(gpus)
                rates.append(per_gpu / model.step(system, context.shape, layout, work, context.target).total)
            label = f"{system.title}, {per_gpu} sequences a GPU"
            curves.append(Curve(label, CLUSTER, tuple(rates), dashed=per_gpu > 16))
    title = f"{context.shape.name}: experts over all GPUs, DP attention, {EP_CONTEXT} positions a sequence"
    return Plot(title, "GPUs", "tokens/s a GPU", tuple(curves))


PLOTS: Mapping[str, Callable[[Context], Plot]] = {
    "step_bytes": step_bytes,
    "break_even": break_even,
    "tp_across": tp_across,
    "wide_ep": wide_ep,
}
