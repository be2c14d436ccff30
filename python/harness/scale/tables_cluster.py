"""Tables about more than one way to use many GPUs: TP against EP, nodes over a network against one rack, loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.scale import model
from harness.scale.context import Context
from harness.scale.hardware import System
from harness.scale.layout import (
    Layout,
    data_parallel_attention,
    expert_parallel,
    fits,
    memory_left,
    problems,
    tensor_parallel,
)
from harness.scale.model import Work
from harness.scale.table import Cell, Column, Table
from harness.scale.values import GIB

MS = 1e3
CLUSTER = (8, 16, 32, 64)
EP_SEQUENCES = (16, 64)  # per GPU
EP_CONTEXT = 8192
WHOLE_CLUSTER = 64


def tp_ep(context: Context) -> Table:
    """One sequence: experts split over all ranks against experts dealt to ranks."""
    shape = context.shape
    tp, ep = tensor_parallel(context.tp, context.small), expert_parallel(context.tp, context.small)
    rows: list[list[Cell]] = []
    for n in context.widths:
        row: list[Cell] = [n]
        for system in context.systems:
            for assumed in (context.roofline, context.target):
                times = [model.step(system, shape, each, Work(rows=n), assumed).total * MS for each in (tp, ep)]
                row.append(f"{times[0]:.2f} / {times[1]:.2f} ({times[1] / times[0]:.2f}x)")
        rows.append(row)
    columns = [Column("rows N")]
    for system in context.systems:
        columns += [Column(f"{system.name}: bytes alone, ms"), Column(f"{system.name}: target, ms")]
    title = f"{shape.name}, one sequence on {context.tp} GPUs: TP{context.tp} / EP{context.tp} experts"
    return Table("tp_ep", title, columns, rows, "modelled")


def tp_widths(context: Context) -> Table:
    """Tensor parallelism over more and more GPUs, one sequence."""
    shape = context.shape
    rows: list[list[Cell]] = []
    for gpus in CLUSTER:
        row: list[Cell] = [gpus]
        for system in _clusters(context):
            layout = tensor_parallel(gpus, context.small)
            if gpus > system.gpus or problems(shape, layout):
                row += [None, None, None]
                continue
            for n in (1, 8):
                time = model.step(system, shape, layout, Work(rows=n, context=context.tokens), context.target)
                row.append(time.total * MS)
                if n == 1:
                    row.append(time.communication / time.total * 100)
        rows.append(row)
    columns = [Column("GPUs")]
    for system in _clusters(context):
        columns += [
            Column(f"{system.name}: N = 1, ms"),
            Column(f"{system.name}: collectives, %", 0),
            Column(f"{system.name}: N = 8, ms"),
        ]
    title = f"{shape.name}, one sequence, {context.tokens} positions: tensor parallelism over all GPUs"
    return Table("tp_widths", title, columns, rows, "modelled")


def _clusters(context: Context) -> list[System]:
    return [system for system in context.systems if system.gpus > 8]


def wide_ep(context: Context) -> Table:
    """Many sequences: experts dealt to more and more GPUs, each with sequences of its own."""
    shape = context.shape
    rows: list[list[Cell]] = []
    for gpus in CLUSTER:
        layout = data_parallel_attention(gpus)
        for per_gpu in EP_SEQUENCES:
            row: list[Cell] = [gpus, per_gpu]
            for system in _clusters(context):
                if gpus > system.gpus or problems(shape, layout):
                    row += [None, None, None, None]
                    continue
                work = Work(per_gpu * gpus, 1, EP_CONTEXT)
                time = model.step(system, shape, layout, work, context.target)
                left = memory_left(shape, layout, float(system.gpu.memory)) / GIB
                room = fits(shape, layout, system.gpu, per_gpu * EP_CONTEXT)
                row += [time.total * MS, time.communication / time.total * 100, per_gpu / time.total]
                row.append(left if room else f"{left:.1f}: too little")
            rows.append(row)
    columns = [Column("GPUs"), Column("sequences a GPU")]
    for system in _clusters(context):
        columns += [
            Column(f"{system.name}: step, ms"),
            Column(f"{system.name}: all-to-all, %", 0),
            Column(f"{system.name}: tok/s a GPU", 0),
            Column(f"{system.name}: left for the cache, GiB", 1),
        ]
    title = f"{shape.name}, {EP_CONTEXT} positions a sequence, no speculation: EP over all GPUs, DP attention"
    return Table("wide_ep", title, columns, rows, "modelled")


def replicas(context: Context) -> Table:
    """The other use of more nodes: the same engine again, sequences shared out."""
    shape, layout = context.shape, tensor_parallel(context.tp, context.small)
    rows: list[list[Cell]] = []
    for sequences in (1, 8, 16, 32, 64):
        row: list[Cell] = [sequences]
        for system in context.systems:
            work = Work(sequences, 1, EP_CONTEXT)
            if not fits(shape, layout, system.gpu, sequences * EP_CONTEXT):
                row += [None, None]
                continue
            time = model.step(system, shape, layout, work, context.target).total
            row += [1 / time, sequences / time / layout.gpus]
        rows.append(row)
    columns = [Column("sequences a replica")]
    for system in context.systems:
        columns += [Column(f"{system.name}: tok/s a user", 0), Column(f"{system.name}: tok/s a GPU", 0)]
    note = "Empty: the cache does not fit in bf16. Every further node adds the same again."
    title = f"{shape.name}, replicas of TP{context.tp}, {EP_CONTEXT} positions a sequence, no speculation"
    return Table("replicas", title, columns, rows, "modelled", [note])


@dataclass(frozen=True)
class Load:
    """sequences at once, cached positions each, and the least tokens/s that a user accepts (0: as fast as possible)."""

    name: str
    sequences: int
    context: int
    least: float = 0.0


LOADS = (
    Load("one user, 4k", 1, 4096),
    Load("one user, 256k", 1, 262144),
    Load("8 users, 32k", 8, 32768, 25.0),
    Load("64 users, 16k", 64, 16384, 25.0),
    Load("1,024 users, 8k", 1024, 8192, 25.0),
    Load("1,024 users, 8k, fast", 1024, 8192, 75.0),
)


@dataclass(frozen=True)
class Choice:
    """One layout under one load: GPUs used, tokens/s of a user, dollars a million tokens."""

    layout: Layout
    gpus: int
    rate: float
    dollars: float


def choices(context: Context, system: System, load: Load) -> Iterator[Choice]:
    """Every layout of the system that holds the load, as replicas where one is not enough."""
    shape = context.shape
    for unit in (8, 16, 32, 64):
        for layout in (
            tensor_parallel(unit, context.small),
            tensor_parallel(unit, context.small, cache_shards=min(8, unit)),
            data_parallel_attention(unit),
        ):
            if problems(shape, layout) or unit > system.gpus:
                continue
            for copies in (1, 2, 4, 8):
                gpus = unit * copies
                sequences = -(-load.sequences // copies)
                per_group = -(-sequences // layout.groups) * load.context
                if gpus > min(system.gpus, WHOLE_CLUSTER) or copies > load.sequences:
                    continue
                if not fits(shape, layout, system.gpu, per_group):
                    continue
                time = model.step(system, shape, layout, Work(sequences, 1, load.context), context.target).total
                an_hour = float(system.gpu.hour) * gpus
                dollars = an_hour / 3600 / (load.sequences / time) * 1e6
                yield Choice(layout, gpus, 1 / time, dollars)


def best(context: Context, system: System, load: Load) -> Choice | str:
    """The fastest where the load asks for speed, else the cheapest that is fast enough; a sentence where nothing is."""
    found = list(choices(context, system, load))
    if not found:
        return "does not fit"
    fastest = max(found, key=lambda choice: choice.rate)
    if not load.least:
        return fastest
    if fastest.rate < load.least:
        return f"too slow: {fastest.rate:.0f} tok/s a user at best"
    return min((choice for choice in found if choice.rate >= load.least), key=lambda choice: choice.dollars)


def loads(context: Context) -> Table:
    """What each system makes of each load."""
    rows: list[list[Cell]] = []
    for load in LOADS:
        for system in context.systems:
            asked = f"at least {load.least:.0f} tok/s a user" if load.least else "as fast as possible"
            row: list[Cell] = [load.name, asked, system.name]
            choice = best(context, system, load)
            if isinstance(choice, str):
                row += [choice, None, None, None, None, None]
            else:
                total = load.sequences * choice.rate
                copies = choice.gpus // choice.layout.gpus
                name = (f"{copies} x " if copies > 1 else "") + choice.layout.name
                joules = float(system.gpu.power) * choice.gpus / total
                row += [name, choice.gpus, choice.rate, total, joules, choice.dollars]
            rows.append(row)
    return Table(
        "loads",
        f"{context.shape.name}, no speculation, bf16 cache, prefill not counted: best layout under a load",
        [
            Column("load"),
            Column("asked"),
            Column("system"),
            Column("layout"),
            Column("GPUs"),
            Column("tok/s a user", 0),
            Column("tok/s", 0),
            Column("J a token (GPU power limits)", 1),
            Column("USD a million tokens"),
        ],
        rows,
        "modelled",
    )
