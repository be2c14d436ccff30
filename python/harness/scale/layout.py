"""How a model lies on GPUs: what each one stores, what the busiest one reads in a step, what cannot be split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.scale import inventory
from harness.scale.hardware import RUNTIME_RESERVE, Gpu
from harness.scale.inventory import CacheFormat
from harness.scale.routing import Routing
from harness.scale.shapes import GROUP, Shape
from harness.scale.values import ScaleError

Small = Literal["replicated", "sharded"]


@dataclass(frozen=True)
class Layout:
    """attention_tp: ranks that share attention, shared experts, dense layers, head and embedding; there are
    gpus / attention_tp such groups, each with sequences of its own ("DP attention" where attention_tp is 1).
    expert_tp: ranks that share one routed expert; expert_ep: groups that experts are dealt to. small: whether q_a, kv_a
    and the router are read whole by every rank. cache_shards: ranks that the cache of a sequence is cut over by
    position.
    """

    name: str
    attention_tp: int
    expert_tp: int
    expert_ep: int
    small: Small = "replicated"
    cache_shards: int = 1

    def __post_init__(self) -> None:
        for field in ("attention_tp", "expert_tp", "expert_ep", "cache_shards"):
            if getattr(self, field) < 1:
                raise ScaleError(f"{self.name}: {field} is {getattr(self, field)}, expected at least 1")
        if self.gpus % self.attention_tp:
            raise ScaleError(f"{self.name}: attention_tp {self.attention_tp} does not divide {self.gpus} GPUs")
        if self.attention_tp % self.cache_shards:
            raise ScaleError(f"{self.name}: cache_shards {self.cache_shards} do not divide {self.attention_tp} ranks")

    @property
    def gpus(self) -> int:
        return self.expert_tp * self.expert_ep

    @property
    def groups(self) -> int:
        """Attention groups, each with sequences of its own."""
        return self.gpus // self.attention_tp


def tensor_parallel(gpus: int, small: Small = "replicated", cache_shards: int = 1) -> Layout:
    """Every matrix split over all ranks."""
    suffix = f", cache over {cache_shards}" if cache_shards > 1 else ""
    return Layout(f"TP{gpus}{suffix}", gpus, gpus, 1, small, cache_shards)


def expert_parallel(gpus: int, small: Small = "replicated") -> Layout:
    """Experts whole, dealt to ranks; everything else split over all ranks, which therefore see all rows."""
    return Layout(f"EP{gpus} experts, TP{gpus} rest", gpus, 1, gpus, small)


def data_parallel_attention(gpus: int) -> Layout:
    """Experts whole, dealt to ranks; everything else on every rank, which has sequences of its own."""
    return Layout(f"EP{gpus} experts, DP attention", 1, 1, gpus)


def problems(shape: Shape, layout: Layout) -> list[str]:
    """What of this shape cannot be split this way, one sentence each; empty where it fits."""
    found = []
    if shape.heads % layout.attention_tp:
        found.append(f"{shape.heads} heads do not split over {layout.attention_tp} ranks")
    for name, width in (("shared", shape.moe_inter * shape.shared), ("dense", shape.dense_inter)):
        if width % layout.attention_tp:
            found.append(f"the {name} MLP's {width} columns do not split over {layout.attention_tp} ranks")
    if shape.moe_layers:
        found += _expert_problems(shape, layout)
    return found


def _expert_problems(shape: Shape, layout: Layout) -> list[str]:
    found = []
    width, unit = shape.moe_inter, GROUP if shape.experts_stored == "int4" else 1
    if width % (unit * layout.expert_tp):
        columns = width / layout.expert_tp
        groups = f" = {columns / GROUP:g} groups of {GROUP}" if unit > 1 else ""
        found.append(f"moe_intermediate_size {width} over {layout.expert_tp} ranks is {columns:g} columns{groups}")
    if layout.expert_ep > shape.experts:
        found.append(f"{shape.experts} experts cannot be dealt to {layout.expert_ep} ranks")
    return found


def check(shape: Shape, layout: Layout) -> None:
    """Raises ScaleError where the shape cannot be laid out so."""
    if found := problems(shape, layout):
        raise ScaleError(f"{shape.name} as {layout.name}: {'; '.join(found)}")


def widest_expert_tp(shape: Shape) -> int:
    """The largest power of two over which an INT4 expert splits into whole groups of 32."""
    ranks = 1
    while shape.moe_inter % (GROUP * ranks * 2) == 0:
        ranks *= 2
    return ranks


def weight_bytes(shape: Shape, layout: Layout) -> float:
    """Weights that the fullest GPU stores: text model, embedding and norms included."""
    check(shape, layout)
    held = 0.0
    for part in inventory.components(shape):
        if part.split == "heads" or (part.split == "small" and layout.small == "sharded"):
            held += part.bytes / layout.attention_tp
        elif part.split in ("small", "norm"):
            held += part.bytes
        elif part.split == "expert":
            held += part.bytes * -(-shape.experts // layout.expert_ep) / shape.experts / layout.expert_tp
    return held


def memory_left(shape: Shape, layout: Layout, memory: float) -> float:
    """Bytes for the cache on a GPU of `memory` bytes, after weights and the runtime's reserve; negative: too small."""
    return memory - float(RUNTIME_RESERVE) - weight_bytes(shape, layout)


def fits(shape: Shape, layout: Layout, gpu: Gpu, cache_tokens: float = 0.0, stored: CacheFormat = "bf16") -> bool:
    """Whether weights and a cache of so many tokens per attention group fit."""
    needed = cache_tokens * inventory.cache_bytes(shape, stored) / layout.cache_shards
    return memory_left(shape, layout, float(gpu.memory)) >= needed


@dataclass(frozen=True)
class StepRead:
    """Weight bytes that the busiest GPU reads in one step."""

    rest: float  # all but routed experts
    experts: float

    @property
    def total(self) -> float:
        return self.rest + self.experts


def step_read(shape: Shape, layout: Layout, rows: int, routing: Routing, eight_bit: bool = False) -> StepRead:
    """`rows`: of all attention groups together. eight_bit: non-expert weights in 8 bits."""
    check(shape, layout)
    rest = inventory.step_bytes(shape, "heads", eight_bit) / layout.attention_tp
    small = inventory.step_bytes(shape, "small", eight_bit)
    rest += small / layout.attention_tp if layout.small == "sharded" else small
    if not shape.moe_layers:
        return StepRead(rest, 0.0)
    experts = routing.busiest(shape.experts, shape.top_k, rows, layout.expert_ep)
    return StepRead(rest, shape.moe_layers * experts * inventory.expert_bytes(shape) / layout.expert_tp)
