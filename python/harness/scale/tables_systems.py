"""Tables about a model on systems of one domain: memory, roofline, collectives, steps, speculation."""

from __future__ import annotations

from dataclasses import replace

from harness.scale import comm, hardware, inventory, model
from harness.scale.context import Context
from harness.scale.layout import (
    data_parallel_attention,
    expert_parallel,
    memory_left,
    problems,
    tensor_parallel,
    weight_bytes,
)
from harness.scale.model import Work
from harness.scale.table import Cell, Column, Table
from harness.scale.values import GB, GIB, ScaleError

MS = 1e3
US = 1e6


def sources(context: Context) -> Table:
    """Every hardware number with its origin."""
    rows: list[list[Cell]] = []
    for system in context.systems:
        gpu = system.gpu
        for name, value, text in (
            ("memory", gpu.memory, f"{float(gpu.memory) / GIB:.1f} GiB"),
            ("bandwidth", gpu.bandwidth, f"{float(gpu.bandwidth) / 1e12:.2f} TB/s"),
            ("achieved", gpu.achieved, f"{float(gpu.achieved):.0%}"),
            ("bf16", gpu.bf16, f"{float(gpu.bf16) / 1e12:.0f} TFLOP/s"),
            ("power", gpu.power, f"{float(gpu.power):.0f} W"),
            ("GPU-hour", gpu.hour, f"{float(gpu.hour):.2f} USD"),
        ):
            rows.append([gpu.name, name, text, value.kind, value.source])
        for each in system.fabric.algorithms:
            rows.append([system.fabric.name, each.algorithm, _cost(each.fixed, each.rate), each.kind, each.source])
        if network := system.network:
            cost = _cost(network.fixed, network.rate)
            rows.append([network.name, "one-shot between domains", cost, network.kind, network.source])
            rows.append([network.name, "all-to-all", "rate by ranks", "published", network.all_to_all_source])
    for name, constant, text in (
        ("runtime reserve", hardware.RUNTIME_RESERVE, "3 GiB a GPU"),
        ("fixed cost of a layer", hardware.LAYER_OVERHEAD, f"{float(hardware.LAYER_OVERHEAD) * US:.0f} us"),
        ("drafter", hardware.DRAFT_BYTES, f"{float(hardware.DRAFT_BYTES) / GB:.2f} GB"),
    ):
        rows.append(["all", name, text, constant.kind, constant.source])
    names = ("of", "what", "value", "kind", "source")
    return Table("sources", "Inputs and where they come from", [Column(name) for name in names], rows)


def _cost(fixed: float, rate: float) -> str:
    return f"{fixed * US:.1f} us + {rate / GB:.0f} GB/s"


def memory(context: Context) -> Table:
    """Weights per GPU and room for the cache, layout by layout."""
    shape = context.shape
    per_token = inventory.cache_bytes(shape)
    rows: list[list[Cell]] = []
    for layout in (
        tensor_parallel(context.tp),
        expert_parallel(context.tp),
        tensor_parallel(context.tp, "sharded"),
        data_parallel_attention(context.tp),
    ):
        if problems(shape, layout):
            continue
        held = weight_bytes(shape, layout)
        name = layout.name + (", q_a, kv_a and router split" if layout.small == "sharded" else "")
        row: list[Cell] = [name, held / GB, held / GIB]
        for system in context.systems:
            left = memory_left(shape, layout, float(system.gpu.memory))
            row += [left / GIB, max(0, int(left // per_token)) // 1000]
        rows.append(row)
    columns = [Column("layout"), Column("weights per GPU, GB", 1), Column("GiB", 1)]
    for system in context.systems:
        columns += [Column(f"{system.name}: left, GiB", 1), Column(f"{system.name}: k tokens bf16")]
    reserve = float(hardware.RUNTIME_RESERVE) / GIB
    note = (
        f"Left: the driver's memory less {reserve:.0f} GiB of runtime and the weights. Under tensor parallelism every "
        "rank holds the cache of every sequence; under DP attention each rank that of its own sequences. In fp8 it "
        "holds twice the tokens; cut over the ranks by position, their number times as many."
    )
    return Table("memory", f"{shape.name} on {context.tp} GPUs: memory", columns, rows, "modelled", [note])


def roofline(context: Context) -> Table:
    """Ideal time per step, memory only."""
    shape = context.shape
    layouts = (tensor_parallel(context.tp), tensor_parallel(context.tp, "sharded"))
    full, eight = context.roofline, replace(context.roofline, eight_bit=True)
    rows: list[list[Cell]] = []
    for n in context.widths:
        row: list[Cell] = [n]
        for system in context.systems:
            times = [model.step(system, shape, layout, Work(rows=n), full).total for layout in layouts]
            row.append(_pair([t * MS for t in times], 2))
            row.append(_pair([1 / t for t in times], 0))
        row.append(_break_even(context, n, full))
        row.append(_break_even(context, n, eight))
        rows.append(row)
    columns = [Column("rows N")]
    for system in context.systems:
        speed = float(system.gpu.bandwidth) / 1e12
        columns += [Column(f"{system.name} ({speed:.2f} TB/s), ms"), Column(f"{system.name}: steps/s")]
    columns += [Column("break-even, bf16"), Column("break-even, 8-bit non-expert")]
    note = (
        "Two figures: q_a, kv_a and router read whole by every rank / split too. Break-even: tokens that a round must "
        "emit, with everything split."
    )
    title = f"{shape.name}, TP{context.tp}: least time of a step, weights at nominal bandwidth, nothing else"
    return Table("roofline", title, columns, rows, "modelled", [note])


def _pair(values: list[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def _break_even(context: Context, rows: int, assumed: model.Assumptions) -> float:
    layout = tensor_parallel(context.tp, "sharded")
    work = Work(rows=rows)
    return model.speculative_round(context.systems[0], context.shape, layout, work, assumed, drafted=False).break_even


def fits(context: Context) -> Table:
    """The published all-reduce timings against the cost models."""
    rows: list[list[Cell]] = []
    fabrics = {system.fabric for system in context.systems}
    for timing in comm.PUBLISHED:
        if timing.fabric not in fabrics:
            continue
        algorithm = timing.fabric.algorithm(timing.algorithm)
        assert algorithm is not None
        modelled = algorithm.seconds(timing.size, timing.ranks) * US
        off = f"{round(100 * (modelled / timing.us - 1)):+d} %"
        size = timing.size / 1024
        rows.append([timing.fabric.name, timing.algorithm, timing.ranks, size, timing.us, modelled, off, timing.source])
    return Table(
        "fits",
        "All-reduce: published timings and the models fitted to them",
        [
            Column("fabric"),
            Column("algorithm"),
            Column("GPUs"),
            Column("KiB", 1),
            Column("published, us", 1),
            Column("model, us", 1),
            Column("off"),
            Column("source"),
        ],
        rows,
    )


def collectives(context: Context) -> Table:
    """All-reduce time by rows, and what two a layer make of it."""
    shape = context.shape
    rows: list[list[Cell]] = []
    for n in context.widths:
        size = n * shape.hidden * inventory.BF16
        row: list[Cell] = [n, size / 1024]
        for system in context.systems:
            seconds, algorithm = system.fabric.all_reduce(size, context.tp)
            row += [f"{seconds * US:.1f} {algorithm.algorithm}", 2 * shape.layers * seconds * MS]
        rows.append(row)
    columns = [Column("rows N"), Column("KiB", 0)]
    for system in context.systems:
        columns += [Column(f"{system.name}, us"), Column(f"{system.name}: x {2 * shape.layers}, ms")]
    return Table("collectives", f"{shape.name}, TP{context.tp}: all-reduces of a step", columns, rows, "modelled")


def steps(context: Context) -> Table:
    """What a step is made of, at one row and at a wide one."""
    shape, layout = context.shape, context.layout
    rows: list[list[Cell]] = []
    for system in context.systems:
        for n in context.widths:
            time = model.step(system, shape, layout, Work(rows=n, context=context.tokens), context.target)
            parts = [time.weights, time.attention, time.communication, time.overhead, time.total]
            rows.append([system.name, n, *(part * MS for part in parts), 1 / time.total])
    names = ("weights, ms", "attention, ms", "collectives, ms", "kernels, ms", "step, ms")
    return Table(
        "steps",
        f"{shape.name}, TP{context.tp}, {context.tokens} cached positions: a step of a very good engine",
        [Column("system"), Column("rows N"), *(Column(name) for name in names), Column("steps/s", 0)],
        rows,
        "modelled",
    )


def speculation(context: Context) -> Table:
    """Break-even and gain of published drafters."""
    shape, layout = context.shape, context.layout
    _published_for(context, "speculation")
    rows: list[list[Cell]] = []
    for acceptance in hardware.ACCEPTANCES:
        row: list[Cell] = [acceptance.name, acceptance.rows, acceptance.tokens]
        for system in context.systems:
            work = Work(rows=acceptance.rows, context=context.tokens)
            spent = model.speculative_round(system, shape, layout, work, context.target)
            gain = f"{spent.break_even:.2f} / {spent.speedup(acceptance.tokens):.2f}x"
            row += [gain, spent.tokens_per_second(acceptance.tokens)]
        rows.append(row)
    columns = [Column("drafter (published acceptance)"), Column("rows N"), Column("tokens a round")]
    for system in context.systems:
        columns += [Column(f"{system.name}: break-even / gain"), Column(f"{system.name}: tok/s", 0)]
    plain = {
        s.name: 1 / model.step(s, shape, layout, Work(context=context.tokens), context.target).total
        for s in context.systems
    }
    note = "Plain decoding, tok/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in plain.items()) + "."
    seen: dict[str, list[str]] = {}
    for each in hardware.ACCEPTANCES:
        seen.setdefault(each.source, []).append(each.name)
    origins = "; ".join(f"{' and '.join(names)}: {source}" for source, names in seen.items())
    origin = f"Every round is charged DFlash's pass. Acceptance: {origins}."
    title = f"{shape.name}, TP{context.tp}: rounds of published drafters, {context.routing.name} routing"
    return Table("speculation", title, columns, rows, "modelled", [note, origin])


def _published_for(context: Context, table: str) -> None:
    if not hardware.is_k2(context.shape):
        raise ScaleError(f"table {table}: its published figures are K2.5's and K2.6's, not {context.shape.name}'s")


def break_even(context: Context) -> Table:
    """Tokens a round must emit, by rows, with and without the drafter's pass."""
    shape, layout = context.shape, context.layout
    drafts = (False, True) if hardware.is_k2(shape) else (False,)
    rows: list[list[Cell]] = []
    for n in context.widths[1:]:
        row: list[Cell] = [n]
        for system in context.systems:
            work = Work(rows=n, context=context.tokens)
            for drafted in drafts:
                each = model.speculative_round(system, shape, layout, work, context.target, drafted)
                row.append(each.break_even)
        rows.append(row)
    columns = [Column("rows N")]
    for system in context.systems:
        columns += [Column(f"{system.name}: free draft"), Column(f"{system.name}: with DFlash's pass")][: len(drafts)]
    title = f"{shape.name}, TP{context.tp}, {context.tokens} positions: tokens a round must emit to break even"
    return Table("break_even", title, columns, rows, "modelled")


def peers(context: Context) -> Table:
    """Published engines against the roofline, and the fixed cost that they imply."""
    _published_for(context, "peers")
    rows: list[list[Cell]] = []
    for peer in hardware.PEERS:
        system = hardware.SYSTEMS[peer.system]
        if system not in context.systems:
            continue
        work = Work(peer.rows, 1, peer.context)
        layout = tensor_parallel(context.tp)
        least = model.step(system, context.shape, layout, work, context.roofline).total * MS
        bytes_only = replace(context.target, communication=False, overhead=False)
        achieved = model.step(system, context.shape, layout, work, bytes_only).total * MS
        target = model.step(system, context.shape, context.layout, work, context.target).total * MS
        rest = peer.step_ms - achieved
        share = least / peer.step_ms * 100
        rows.append([peer.system, peer.engine, peer.step_ms, least, share, rest, target, peer.source])
    return Table(
        "peers",
        "Published steps, TP8, against the bytes that they must read",
        [
            Column("system"),
            Column("engine and load"),
            Column("published, ms"),
            Column("least, ms"),
            Column("share, %", 0),
            Column("not bytes, ms", 1),
            Column("target of this page, ms"),
            Column("source"),
        ],
        rows,
    )


def contexts(context: Context) -> Table:
    """Attention over long caches, by rows."""
    shape, layout = context.shape, context.layout
    rows: list[list[Cell]] = []
    for tokens in (4096, 32768, 131072, 262144):
        for n in (1, 8, 64):
            row: list[Cell] = [tokens, n]
            for system in context.systems:
                time = model.step(system, shape, layout, Work(rows=n, context=tokens), context.target)
                row += [time.attention * MS, time.total * MS]
            rows.append(row)
    columns = [Column("context"), Column("rows N")]
    for system in context.systems:
        columns += [Column(f"{system.name}: attention, ms"), Column(f"{system.name}: step, ms")]
    return Table("contexts", f"{shape.name}, TP{context.tp}: attention over long caches", columns, rows, "modelled")
