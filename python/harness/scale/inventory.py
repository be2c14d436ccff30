"""Bytes of a model by component: what is stored, what one step reads, what one token leaves in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.scale.shapes import GROUP, Shape, Vision
from harness.scale.values import ScaleError

Read = Literal["step", "row", "expert", "no"]  # every step, one row of it, by distinct expert, not by the text model
Split = Literal["heads", "small", "expert", "norm", "vision"]
CacheFormat = Literal["bf16", "fp8", "fp8-bf16-rope", "fp8-656"]

BF16 = 2
F32 = 4
ATTENTION_SMALL = "attention q_a, kv_a"
ATTENTION = "attention q_b, kv_b, o"


@dataclass(frozen=True)
class Component:
    """A part of the checkpoint.

    split: how ranks share it. "heads": by heads or output columns under tensor parallelism; "small": q_a, kv_a and the
    router, whose outputs every rank needs whole, so that most engines replicate them; "expert": routed experts.
    """

    name: str
    parameters: int
    bytes: int
    tensors: int
    stored: str
    read: Read
    split: Split
    eight_bit: bool = False  # halved in the what-if of 8-bit non-expert weights


def components(shape: Shape) -> list[Component]:
    """Every tensor of the checkpoint, by component; vision last, where the model has it."""
    s = shape
    query = s.nope + s.rope
    small = s.hidden * (s.q_lora + s.kv_lora + s.rope)
    by_head = s.heads * (query * (s.q_lora or s.hidden) + (s.nope + s.v) * s.kv_lora + s.v * s.hidden)
    norms = s.layers * (2 * s.hidden + s.q_lora + s.kv_lora) + s.hidden
    moe = s.moe_layers
    expert = 3 * s.hidden * s.moe_inter
    routed = moe * s.experts * expert
    matrices = 3 * moe * s.experts
    table = s.vocab * s.hidden
    parts = []
    if s.experts_stored == "int4":
        parts += [
            Component("routed experts, packed nibbles", routed, routed // 2, matrices, "int4", "expert", "expert"),
            Component("routed experts, scales", 0, routed // GROUP * BF16, matrices, "bf16", "expert", "expert"),
            # weight_shape: two int32 a matrix, for the loader alone
            Component("routed experts, shapes", 0, matrices * 2 * 4, matrices, "int32", "no", "expert"),
        ]
    else:
        parts.append(_bf16("routed experts", routed, matrices, "expert", "expert"))
    parts += [
        _bf16(ATTENTION_SMALL, s.layers * small, s.layers * (2 if s.q_lora else 1), "step", "small", eight_bit=True),
        _bf16(ATTENTION, s.layers * by_head, 3 * s.layers, "step", "heads", eight_bit=True),
        _bf16("shared experts", moe * s.shared * expert, 3 * moe * bool(s.shared), "step", "heads", eight_bit=True),
        _bf16("dense layers", s.dense_layers * 3 * s.hidden * s.dense_inter, 3 * s.dense_layers, "step", "heads", True),
        _bf16("router", moe * s.experts * s.hidden, moe, "step", "small"),
        _bf16("lm_head", table, 1, "step", "heads", eight_bit=True),
        _bf16("embedding", table, 1, "row", "heads"),
        _bf16("norms", norms, s.layers * (4 if s.q_lora else 3) + 1, "row", "norm"),
    ]
    if s.bias:
        parts.append(Component("router bias", moe * s.experts, moe * s.experts * F32, moe, "f32", "row", "norm"))
    if s.vision:
        parts.append(_vision(s.vision))
    return [part for part in parts if part.tensors]


def _bf16(name: str, parameters: int, tensors: int, read: Read, split: Split, eight_bit: bool = False) -> Component:
    return Component(name, parameters, parameters * BF16, tensors, "bf16", read, split, eight_bit)


def _vision(v: Vision) -> Component:
    block = 4 * v.width * (v.width + 1) + 2 * v.width * v.intermediate + v.intermediate + v.width + 4 * v.width
    tower = v.layers * block + 3 * v.patch**2 * v.width + v.width + v.positions * v.width + 2 * v.width
    merged = v.width * v.merge
    projector = 2 * v.width + merged * (merged + 1) + (merged + 1) * v.text_hidden
    # per block: two norms, qkv, output and two MLP matrices, each with a bias; then patch embedding with bias,
    # positions, final norm; projector: norm and two matrices with biases
    return _bf16("vision and projector", tower + projector, 12 * v.layers + 3 + 2 + 6, "no", "vision")


def total_bytes(shape: Shape, vision: bool = False) -> int:
    """Bytes of the checkpoint's tensors; the text model alone unless `vision`."""
    return sum(part.bytes for part in components(shape) if vision or part.split != "vision")


def total_parameters(shape: Shape) -> int:
    """Weights of the text model."""
    return sum(part.parameters for part in components(shape) if part.split != "vision")


def active_parameters(shape: Shape) -> int:
    """Weights that one token is multiplied with: all but the embedding and the experts it does not choose."""
    s = shape
    routed = s.moe_layers * s.top_k * 3 * s.hidden * s.moe_inter
    return routed + sum(part.parameters for part in components(s) if part.read == "step")


def expert_bytes(shape: Shape) -> int:
    """Bytes of one routed expert that a step reads: three matrices, with scales."""
    weights = 3 * shape.hidden * shape.moe_inter
    return weights // 2 + weights // GROUP * BF16 if shape.experts_stored == "int4" else weights * BF16


def step_bytes(shape: Shape, split: Split, eight_bit: bool = False) -> int:
    """Bytes that every step reads of the non-expert components that ranks share in the given way.

    eight_bit: attention, shared experts, dense layers and head in 8 bits; scales not counted, the router stays bf16.
    """
    parts = [part for part in components(shape) if part.read == "step" and part.split == split]
    return sum(part.bytes // 2 if eight_bit and part.eight_bit else part.bytes for part in parts)


def non_expert_bytes(shape: Shape, eight_bit: bool = False) -> int:
    """Bytes that every step reads whatever the router says. The embedding's rows and the norms are left out."""
    return step_bytes(shape, "heads", eight_bit) + step_bytes(shape, "small", eight_bit)


def cache_bytes(shape: Shape, stored: CacheFormat = "bf16") -> int:
    """Bytes that one token leaves in the latent cache, all layers.

    fp8: latent and rope part in one byte each, scales elsewhere; fp8-bf16-rope: the rope part stays bf16; fp8-656: 656
    bytes a layer (512 + 64 * 2 + four float32 tile scales).
    """
    latent, rope = shape.kv_lora, shape.rope
    a_layer = {
        "bf16": (latent + rope) * BF16,
        "fp8": latent + rope,
        "fp8-bf16-rope": latent + rope * BF16,
        "fp8-656": latent + rope * BF16 + latent // 128 * F32,
    }
    if stored not in a_layer:
        raise ScaleError(f"no cache format {stored!r}; there are {', '.join(a_layer)}")
    return shape.layers * a_layer[stored]


def uncompressed_cache_bytes(shape: Shape) -> int:
    """What the same token would leave as per-head keys and values in bf16."""
    return shape.layers * shape.heads * (shape.nope + shape.rope + shape.v) * BF16


def flops_per_row(shape: Shape) -> float:
    """Floating-point operations of one row outside attention over the cache: two per active weight."""
    return 2.0 * active_parameters(shape)


def attention_flops_per_key(shape: Shape) -> float:
    """Operations per row and cached position, absorbed: scores over latent + rope, values over latent."""
    return 2.0 * shape.layers * shape.heads * (2 * shape.kv_lora + shape.rope)
