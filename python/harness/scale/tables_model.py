"""Tables about a model alone: bytes by component, by verify width, in the cache; what splits over how many ranks."""

from __future__ import annotations

from harness.scale import inventory
from harness.scale.context import Context
from harness.scale.layout import problems, tensor_parallel, widest_expert_tp
from harness.scale.routing import INDEPENDENT, ExcessRouting, Routing
from harness.scale.shapes import SHAPES
from harness.scale.table import Cell, Column, Table
from harness.scale.values import GB, GIB

SPLIT_RANKS = (2, 4, 8, 16, 32, 64)


def components(context: Context) -> Table:
    """Parameters and bytes of every component."""
    shape = context.shape
    rows: list[list[Cell]] = [
        [part.name, part.parameters / 1e9, part.bytes / GB, part.bytes / GIB, part.stored, part.tensors, part.read]
        for part in inventory.components(shape)
    ]
    text = [part for part in inventory.components(shape) if part.split != "vision"]
    total, tensors = inventory.total_bytes(shape), sum(part.tensors for part in text)
    rows.append(["text total", inventory.total_parameters(shape) / 1e9, total / GB, total / GIB, "", tensors, ""])
    if shape.vision:
        total = inventory.total_bytes(shape, vision=True)
        tensors = sum(part.tensors for part in inventory.components(shape))
        rows.append(["with vision", None, total / GB, total / GIB, "", tensors, ""])
    return Table(
        "components",
        f"{shape.name}: what the checkpoint holds",
        [
            Column("component"),
            Column("parameters, B", 3),
            Column("GB", 3),
            Column("GiB"),
            Column("stored as"),
            Column("tensors"),
            Column("read by a step"),
        ],
        rows,
        "modelled",
    )


def models(context: Context) -> Table:
    """The built-in shapes side by side."""
    rows: list[list[Cell]] = []
    for shape in {**SHAPES, context.shape.name: context.shape}.values():
        int4, bf16 = shape.with_experts("int4"), shape.with_experts("bf16")
        rows.append(
            [
                shape.name,
                inventory.total_parameters(shape) / 1e9,
                inventory.active_parameters(shape) / 1e9,
                inventory.total_bytes(bf16) / GB,
                inventory.total_bytes(int4) / GB,
                inventory.expert_bytes(int4) / 1e6,
                inventory.non_expert_bytes(shape) / GB,
                inventory.cache_bytes(shape),
                f"TP{widest_expert_tp(int4)}",
            ]
        )
    return Table(
        "models",
        "Models",
        [
            Column("model"),
            Column("parameters, B", 1),
            Column("active, B"),
            Column("all bf16, GB", 1),
            Column("experts INT4, GB", 1),
            Column("one expert INT4, MB"),
            Column("non-expert read per step, GB"),
            Column("cache bf16, B/token"),
            Column("widest split of an INT4 expert"),
        ],
        rows,
        "modelled",
    )


def widths(context: Context) -> Table:
    """Bytes of one step against its rows."""
    shape, routing = context.shape, context.routing
    expert = inventory.expert_bytes(shape) * shape.moe_layers
    full, eight = inventory.non_expert_bytes(shape), inventory.non_expert_bytes(shape, eight_bit=True)
    first = routing.distinct(shape.experts, shape.top_k, 1) * expert + full
    ranks = min(8, shape.experts)
    rows: list[list[Cell]] = []
    for n in context.widths:
        distinct = routing.distinct(shape.experts, shape.top_k, n)
        busiest = routing.busiest(shape.experts, shape.top_k, n, ranks)
        read = distinct * expert
        total = read + full
        rows.append([n, distinct, busiest, read / GB, total / GB, total / first, (read + eight) / GB])
    return Table(
        "widths",
        f"{shape.name}: bytes of one step against its rows, {routing.name} routing",
        [
            Column("rows N"),
            Column("distinct experts D(N)", 1),
            Column(f"busiest of {ranks} ranks"),
            Column("experts, GB"),
            Column(f"+ {full / GB:.2f} GB non-expert = total"),
            Column("of one row"),
            Column(f"with 8-bit non-expert ({eight / GB:.2f})"),
        ],
        rows,
        "modelled",
    )


def overlap(context: Context) -> Table:
    """Weight bytes of a step relative to one row, for more or less overlap of the rows' experts."""
    shape = context.shape
    expert, rest = inventory.expert_bytes(shape) * shape.moe_layers, inventory.non_expert_bytes(shape)
    routings: list[Routing] = [INDEPENDENT, ExcessRouting(0.7), ExcessRouting(0.5)]
    if context.routing not in routings:
        routings.append(context.routing)
    rows: list[list[Cell]] = []
    for n in context.widths:
        read = [each.distinct(shape.experts, shape.top_k, n) * expert + rest for each in routings]
        rows.append([n, *(size / (shape.top_k * expert + rest) for size in read)])
    return Table(
        "overlap",
        f"{shape.name}: weight bytes of a step, relative to one row, by overlap of the rows' experts",
        [Column("rows N"), *(Column(routing.name) for routing in routings)],
        rows,
        "modelled",
    )


def cache(context: Context) -> Table:
    """Bytes per token and per context in every cache format."""
    shape = context.shape
    formats: tuple[tuple[inventory.CacheFormat, str], ...] = (
        ("bf16", "latent and rope bf16"),
        ("fp8-656", "fp8 latent, bf16 rope, tile scales (656 B a layer at K2's widths)"),
        ("fp8-bf16-rope", "fp8 latent, bf16 rope"),
        ("fp8", "fp8"),
    )
    rows: list[list[Cell]] = []
    for stored, text in formats:
        size = inventory.cache_bytes(shape, stored)
        rows.append([text, size, *(size * tokens / GB for tokens in (32768, 131072, 262144))])
    size = inventory.uncompressed_cache_bytes(shape)
    rows.append(["per-head keys and values, bf16", size, *(size * n / GB for n in (32768, 131072, 262144))])
    return Table(
        "cache",
        f"{shape.name}: the cache of one sequence",
        [
            Column("format"),
            Column("B/token"),
            Column("32k, GB"),
            Column("128k, GB", 1),
            Column("256k, GB", 1),
        ],
        rows,
        "modelled",
    )


def splits(context: Context) -> Table:
    """Over how many ranks tensor parallelism works, model by model, with INT4 experts."""
    rows: list[list[Cell]] = []
    for shape in {**SHAPES, context.shape.name: context.shape}.values():
        row: list[Cell] = [shape.name]
        for ranks in SPLIT_RANKS:
            found = problems(shape.with_experts("int4"), tensor_parallel(ranks))
            row.append("no: " + ", ".join(map(_reason, found)) if found else "yes")
        rows.append(row)
    return Table(
        "splits",
        "Tensor parallelism: which widths split heads, shared and dense MLPs, and INT4 experts into whole groups of 32",
        [Column("model"), *(Column(f"TP{ranks}") for ranks in SPLIT_RANKS)],
        rows,
        "modelled",
    )


def _reason(problem: str) -> str:
    """ "moe_intermediate_size 1408 over 8 ranks is 176 columns = 5.5 groups of 32" -> "5.5 groups"."""
    if " = " in problem:
        return problem.split(" = ")[1].removesuffix(" of 32")
    return problem.split(" do not ")[0].removeprefix("the ")
