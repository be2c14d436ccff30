"""Time of one step on a system, and what speculation must accept to pay for a wider one.

A step is weights + attention over the cache + collectives + fixed cost of the kernels, added up: nothing overlaps. Each
of the first two is the larger of its bytes over bandwidth and its operations over the matrix rate. Two assumptions:

    ROOFLINE  nominal bandwidth, nothing else: the least time that the bytes allow
    TARGET    achieved bandwidth, the collectives' cost models, a fixed cost a layer: what a very good engine
              could reach
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.scale import hardware, inventory
from harness.scale.hardware import System
from harness.scale.inventory import CacheFormat
from harness.scale.layout import Layout, check, step_read
from harness.scale.routing import INDEPENDENT, Routing
from harness.scale.shapes import Shape
from harness.scale.values import ScaleError

FP8_SCALE_TILE = 128  # dispatched activations: fp8 with a float32 scale per 128


@dataclass(frozen=True)
class Work:
    """One step's rows: `sequences` over all attention groups, each with `rows` rows (1 plainly, nodes + 1 for a tree)
    and `context` cached positions."""

    sequences: int = 1
    rows: int = 1
    context: int = 0

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.rows < 1 or self.context < 0:
            raise ScaleError(f"{self}: expected sequences and rows of at least 1, context of at least 0")

    @property
    def total_rows(self) -> int:
        return self.sequences * self.rows


@dataclass(frozen=True)
class Assumptions:
    """nominal: datasheet bandwidth instead of the achieved one. communication, overhead: whether they count."""

    nominal: bool = False
    communication: bool = True
    overhead: bool = True
    eight_bit: bool = False
    cache: CacheFormat = "bf16"
    routing: Routing = INDEPENDENT


ROOFLINE = Assumptions(nominal=True, communication=False, overhead=False)
TARGET = Assumptions()


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    weights: float
    attention: float
    communication: float
    overhead: float

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.communication + self.overhead


def step(system: System, shape: Shape, layout: Layout, work: Work, assumed: Assumptions = TARGET) -> StepTime:
    """One step of all sequences together. Raises ScaleError where the layout does not fit the shape or the system."""
    check(shape, layout)
    if layout.gpus > system.gpus:
        raise ScaleError(f"{layout.name} needs {layout.gpus} GPUs, {system.name} has {system.gpus}")
    if layout.gpus > system.domain and layout.gpus % system.domain:
        raise ScaleError(f"{layout.name}: {layout.gpus} GPUs are no whole number of {system.name}'s {system.domain}")
    return StepTime(
        _weights(system, shape, layout, work, assumed),
        _attention(system, shape, layout, work, assumed),
        _communication(system, shape, layout, work) if assumed.communication else 0.0,
        shape.layers * float(hardware.LAYER_OVERHEAD) if assumed.overhead else 0.0,
    )


def bandwidth(system: System, nominal: bool = False) -> float:
    """Bytes/s of one GPU."""
    return float(system.gpu.bandwidth) * (1.0 if nominal else float(system.gpu.achieved))


def _group_sequences(layout: Layout, work: Work) -> int:
    return -(-work.sequences // layout.groups)


def _weights(system: System, shape: Shape, layout: Layout, work: Work, assumed: Assumptions) -> float:
    read = step_read(shape, layout, work.total_rows, assumed.routing, assumed.eight_bit)
    speed, rate = bandwidth(system, assumed.nominal), float(system.gpu.bf16)
    routed = 2.0 * shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.moe_inter
    rest = inventory.flops_per_row(shape) - routed
    rest_flops = _group_sequences(layout, work) * work.rows * rest / layout.attention_tp
    seconds = max(read.rest / speed, rest_flops / rate)
    if shape.moe_layers:
        share = read.experts * layout.gpus / _distinct_bytes(shape, work, assumed)  # of the busiest rank, 1 where even
        seconds += max(read.experts / speed, work.total_rows * routed / layout.gpus * share / rate)
    return seconds


def _distinct_bytes(shape: Shape, work: Work, assumed: Assumptions) -> float:
    distinct = assumed.routing.distinct(shape.experts, shape.top_k, work.total_rows)
    return shape.moe_layers * distinct * inventory.expert_bytes(shape)


def _attention(system: System, shape: Shape, layout: Layout, work: Work, assumed: Assumptions) -> float:
    sequences = _group_sequences(layout, work)
    keys = sequences * work.context
    read = keys * inventory.cache_bytes(shape, assumed.cache) / layout.cache_shards
    flops = keys * work.rows * inventory.attention_flops_per_key(shape) / layout.attention_tp
    return max(read / bandwidth(system, assumed.nominal), flops / float(system.gpu.bf16))


def all_reduce(system: System, size: float, ranks: int) -> float:
    """Seconds of one all-reduce of `size` bytes over `ranks` GPUs of the system, over its network where they span
    domains."""
    if ranks <= system.domain:
        return system.fabric.all_reduce(size, ranks)[0]
    if system.network is None or ranks % system.domain or ranks > system.gpus:
        raise ScaleError(f"{system.name} has no {ranks} GPUs to all-reduce over")
    return system.network.all_reduce(system.fabric, size, system.domain, ranks // system.domain)


def _communication(system: System, shape: Shape, layout: Layout, work: Work) -> float:
    rows = _group_sequences(layout, work) * work.rows
    reduce = all_reduce(system, rows * shape.hidden * inventory.BF16, layout.attention_tp)
    seconds = 2 * shape.layers * reduce
    if layout.groups > 1:  # the routed experts' sums come back by combine instead
        seconds += shape.moe_layers * (_all_to_all(system, shape, layout, rows) - reduce)
    if layout.cache_shards > 1:
        seconds += shape.layers * _cache_exchange(system, shape, layout, rows)
    return seconds


def _all_to_all(system: System, shape: Shape, layout: Layout, rows: int) -> float:
    """Dispatch in fp8 and combine in bf16; a rank handles its share of its group's rows."""
    copies = rows * shape.top_k / layout.attention_tp
    dispatched = copies * (shape.hidden + shape.hidden / FP8_SCALE_TILE * inventory.F32)
    combined = copies * shape.hidden * inventory.BF16
    if layout.gpus <= system.domain:
        return system.fabric.all_to_all(dispatched) + system.fabric.all_to_all(combined)
    if system.network is None:
        raise ScaleError(f"{layout.name}: {system.name} has no network between domains")
    network = system.network
    return network.all_to_all(dispatched, layout.gpus, False) + network.all_to_all(combined, layout.gpus, True)


def _cache_exchange(system: System, shape: Shape, layout: Layout, rows: int) -> float:
    """Queries of all heads to every shard, outputs summed back to the ranks of their heads."""
    queries = rows * shape.heads * (shape.kv_lora + shape.rope) * inventory.BF16
    outputs = rows * shape.heads * shape.kv_lora * inventory.BF16
    ranks = layout.cache_shards
    return system.fabric.exchange(queries, ranks) + system.fabric.exchange(outputs, ranks)


def draft_seconds(system: System, shape: Shape, layout: Layout, rows: int, assumed: Assumptions = TARGET) -> float:
    """One pass of the published block-diffusion drafter (6 layers, the target's head) over the attention group."""
    head = shape.vocab * shape.hidden * inventory.BF16
    ranks = layout.attention_tp
    seconds = (float(hardware.DRAFT_BYTES) + head) / ranks / bandwidth(system, assumed.nominal)
    if assumed.communication:
        reduce = all_reduce(system, rows * shape.hidden * inventory.BF16, ranks)
        seconds += 2 * hardware.DRAFT_LAYERS * reduce
    return seconds + (hardware.DRAFT_LAYERS * float(hardware.LAYER_OVERHEAD) if assumed.overhead else 0.0)


@dataclass(frozen=True)
class Round:
    """A speculative round against plain decoding of the same engine, at the same context."""

    plain: float  # seconds of a one-row step
    verify: float
    draft: float

    @property
    def break_even(self) -> float:
        """Tokens a round must emit, the bonus token included, to be as fast as plain decoding."""
        return (self.verify + self.draft) / self.plain

    def speedup(self, tokens: float) -> float:
        return tokens / self.break_even

    def tokens_per_second(self, tokens: float) -> float:
        return tokens / (self.verify + self.draft)


def speculative_round(
    system: System, shape: Shape, layout: Layout, work: Work, assumed: Assumptions = TARGET, drafted: bool = True
) -> Round:
    """work: of the verify step. drafted: whether the trained drafter's pass counts (prompt lookup costs nothing)."""
    plain = step(system, shape, layout, replace(work, rows=1), assumed).total
    verify = step(system, shape, layout, work, assumed).total
    draft = draft_seconds(system, shape, layout, work.rows, assumed) if drafted and work.rows > 1 else 0.0
    return Round(plain, verify, draft)
