"""The figures that stand in the documents' own sentences, by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from harness.scale import hardware, inventory, model
from harness.scale.context import Context
from harness.scale.hardware import SYSTEMS
from harness.scale.layout import (
    Layout,
    data_parallel_attention,
    expert_parallel,
    memory_left,
    tensor_parallel,
)
from harness.scale.model import Work
from harness.scale.routing import independent_distinct
from harness.scale.shapes import K26
from harness.scale.tables_cluster import EP_CONTEXT
from harness.scale.values import GB, GIB

MS = 1e3
_CONTEXT = Context()
_TP8 = tensor_parallel(8, "sharded")


def _gb(size: float, digits: int = 1) -> str:
    return f"{size / GB:.{digits}f} GB"


def _step(system: str, layout: Layout, work: Work, part: str = "total", assumed: str = "target") -> float:
    time = model.step(SYSTEMS[system], K26, layout, work, getattr(_CONTEXT, assumed))
    return float(getattr(time, part)) * MS


def _ms(system: str, layout: Layout, work: Work, part: str = "total", assumed: str = "target") -> str:
    return f"{_step(system, layout, work, part, assumed):.1f} ms"


def _rate(system: str, layout: Layout, work: Work) -> str:
    return f"{MS / _step(system, layout, work):.0f}"


def _break_even(system: str, rows: int, roofline: bool = False) -> str:
    assumed = _CONTEXT.roofline if roofline else _CONTEXT.target
    work = Work(rows=rows, context=0 if roofline else _CONTEXT.tokens)
    each = model.speculative_round(SYSTEMS[system], K26, _TP8, work, assumed, drafted=not roofline)
    return f"{each.break_even:.1f}"


def _left(system: str, layout: Layout) -> str:
    return f"{memory_left(K26, layout, float(SYSTEMS[system].gpu.memory)) / GIB:.1f} GiB"


def _tokens(system: str) -> str:
    left = memory_left(K26, tensor_parallel(8), float(SYSTEMS[system].gpu.memory))
    return f"{left / inventory.cache_bytes(K26) / 1e3:.0f},000"


def _replicated() -> str:
    """Bytes that a GPU reads in a one-row step with q_a, kv_a and router whole, over those with everything split."""
    layouts = (tensor_parallel(8, "replicated"), _TP8)
    whole, split = (_step("pro6000x8", layout, Work(), assumed="roofline") for layout in layouts)
    return f"{(whole / split - 1) * 100:.0f} %"


def _ratio(system: str, rows: int, assumed: str) -> str:
    layouts = (expert_parallel(8, "sharded"), _TP8)
    dealt, split = (_step(system, layout, Work(rows=rows), assumed=assumed) for layout in layouts)
    return f"{dealt / split:.2f}"


def _share(system: str, layout: Layout, work: Work) -> str:
    return f"{_step(system, layout, work, 'communication') / _step(system, layout, work) * 100:.0f} %"


def _per_gpu(system: str, gpus: int, sequences: int) -> str:
    time = _step(system, data_parallel_attention(gpus), Work(sequences * gpus, 1, EP_CONTEXT))
    return f"{sequences / time * MS:,.0f}"


def _busiest(rows: int) -> str:
    return f"{_CONTEXT.routing.busiest(K26.experts, K26.top_k, rows, 8):.2f}"


_ONE, _EIGHT = Work(context=4096), Work(rows=8, context=4096)

FIGURES: Mapping[str, Callable[[], str]] = {
    "text-total": lambda: _gb(inventory.total_bytes(K26)),
    "with-vision": lambda: f"{inventory.total_bytes(K26, vision=True) / GIB:.2f} GiB",
    "tensors": lambda: f"{sum(part.tensors for part in inventory.components(K26)):,}",
    "expert": lambda: f"{inventory.expert_bytes(K26) / 1e6:.2f} MB",
    "active": lambda: f"{inventory.active_parameters(K26) / 1e9:.1f} B",
    "non-expert": lambda: _gb(inventory.non_expert_bytes(K26)),
    "non-expert-8": lambda: _gb(inventory.non_expert_bytes(K26, eight_bit=True)),
    "experts-1": lambda: _gb(K26.moe_layers * K26.top_k * inventory.expert_bytes(K26)),
    "cache-token": lambda: f"{inventory.cache_bytes(K26):,} B",
    "cache-ratio": lambda: f"{inventory.uncompressed_cache_bytes(K26) / inventory.cache_bytes(K26):.1f}",
    "cache-256k": lambda: _gb(inventory.cache_bytes(K26) * 262144),
    "distinct-8": lambda: f"{independent_distinct(K26.experts, K26.top_k, 8):.1f}",
    "busiest-1": partial(_busiest, 1),
    "left-pro-tp8": partial(_left, "pro6000x8", tensor_parallel(8)),
    "left-pro-dp8": partial(_left, "pro6000x8", data_parallel_attention(8)),
    "tokens-pro": partial(_tokens, "pro6000x8"),
    "replicated": _replicated,
    "roof-pro-1": partial(_ms, "pro6000x8", _TP8, Work(), assumed="roofline"),
    "roof-h200-1": partial(_ms, "h200x8", _TP8, Work(), assumed="roofline"),
    "step-pro-1": partial(_ms, "pro6000x8", _TP8, _ONE),
    "step-h200-1": partial(_ms, "h200x8", _TP8, _ONE),
    "step-b200-1": partial(_ms, "b200-ib", _TP8, _ONE),
    "step-nvl-1": partial(_ms, "gb300-nvl72", _TP8, _ONE),
    "rate-pro-1": partial(_rate, "pro6000x8", _TP8, _ONE),
    "rate-h200-1": partial(_rate, "h200x8", _TP8, _ONE),
    "overhead": lambda: f"{K26.layers * float(hardware.LAYER_OVERHEAD) * MS:.1f} ms",
    "attention-pro-128k": partial(_ms, "pro6000x8", _TP8, Work(context=131072), "attention"),
    "attention-pro-128k-64": partial(_ms, "pro6000x8", _TP8, Work(rows=64, context=131072), "attention"),
    "even-roof-8": partial(_break_even, "pro6000x8", 8, True),
    "even-roof-4": partial(_break_even, "pro6000x8", 4, True),
    "even-pro-8": partial(_break_even, "pro6000x8", 8),
    "even-pro-64": partial(_break_even, "pro6000x8", 64),
    "even-h200-8": partial(_break_even, "h200x8", 8),
    "even-b200-8": partial(_break_even, "b200-ib", 8),
    "even-b200-16": partial(_break_even, "b200-ib", 16),
    "ep-ratio-pro-1": partial(_ratio, "pro6000x8", 1, "roofline"),
    "ep-ratio-pro-64": partial(_ratio, "pro6000x8", 64, "roofline"),
    "ep-target-pro-1": partial(_ratio, "pro6000x8", 1, "target"),
    "tp16-ib": partial(_ms, "b200-ib", tensor_parallel(16, "sharded"), _ONE),
    "tp16-ib-share": partial(_share, "b200-ib", tensor_parallel(16, "sharded"), _ONE),
    "tp32-nvl": partial(_ms, "gb300-nvl72", tensor_parallel(32, "sharded"), _ONE),
    "tp64-nvl": partial(_ms, "gb300-nvl72", tensor_parallel(64, "sharded"), _ONE),
    "tp64-nvl-8": partial(_ms, "gb300-nvl72", tensor_parallel(64, "sharded"), _EIGHT),
    "tp8-nvl-8": partial(_ms, "gb300-nvl72", _TP8, _EIGHT),
    "ep64-ib-64": partial(_per_gpu, "b200-ib", 64, 64),
    "ep8-ib-64": partial(_per_gpu, "b200-ib", 8, 64),
    "ep64-nvl-64": partial(_per_gpu, "gb300-nvl72", 64, 64),
    "ep8-nvl-64": partial(_per_gpu, "gb300-nvl72", 8, 64),
    "ep64-ib-share": partial(_share, "b200-ib", data_parallel_attention(64), Work(64 * 64, 1, EP_CONTEXT)),
    "ep64-nvl-share": partial(_share, "gb300-nvl72", data_parallel_attention(64), Work(64 * 64, 1, EP_CONTEXT)),
}
