"""Random models for the law tests: small shapes that take every branch of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtree_engine import _native

Config = dict[str, float]


def config(**changes: float) -> Config:
    """A K2-like config (MLA with q_lora, YaRN, sigmoid router with bias, shared expert, one dense layer)."""
    base: Config = dict(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, q_lora_rank=40,
        kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, intermediate_size=96,
        moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, scoring=0, norm_topk_prob=1,
        routed_scaling_factor=2.827, rms_norm_eps=1e-5, latent_norm_eps=1e-6, rope_theta=50000.0,
        rope_interleave=1, rope_factor=8.0, rope_original_max_position_embeddings=64, rope_beta_fast=32.0,
        rope_beta_slow=1.0, rope_mscale=1.0, rope_mscale_all_dim=1.0, max_position_embeddings=1024,
    )  # fmt: skip
    unknown = set(changes) - set(base)
    assert not unknown, unknown
    return base | changes


PLAIN_ROPE = dict(
    rope_factor=0, rope_original_max_position_embeddings=0, rope_beta_fast=0, rope_beta_slow=0,
    rope_mscale=0, rope_mscale_all_dim=0,
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """One random model: its config, which matrices are bf16 or INT4, and a seed."""

    config: tuple[tuple[str, float], ...]
    kind: str  # "f32", "bf16", "int4" (MLP and experts INT4, the rest f32), "mixed" (drawn per tensor)
    seed: int

    @property
    def fields(self) -> Config:
        return dict(self.config)


def spec(kind: str, seed: int, **changes: float) -> ModelSpec:
    return ModelSpec(tuple(sorted(config(**changes).items())), kind, seed)


SPECS = {
    "k2": spec("f32", 1),
    "k2_int4": spec("int4", 2, kv_lora_rank=48, hidden_size=96),
    "q_lora_null_groups_neox": spec(
        "f32", 3, q_lora_rank=0, n_group=4, topk_group=2, rope_interleave=0, num_attention_heads=3, **PLAIN_ROPE
    ),
    "v2_softmax_bf16": spec("bf16", 4, scoring=1, norm_topk_prob=0, n_shared_experts=2, routed_scaling_factor=1.0),
    "mixed_ragged": spec(
        "mixed", 5, kv_lora_rank=37, v_head_dim=11, qk_nope_head_dim=13, vocab_size=301, q_lora_rank=27
    ),
}


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bf16 bits, round to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def int4(rng: np.random.Generator, out: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Random INT4 words [out, in / 8] and float32 scales [out, in / 32]; every nibble occurs."""
    words = rng.integers(0, 2**32, (out, width // 8), dtype=np.uint32).view(np.int32)
    scales = (rng.uniform(0.2, 0.4, (out, width // 32)) / np.sqrt(width)).astype(np.float32)
    return words, scales


def tensors(model: ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor by its checkpoint name: float32, bf16 bits (uint16), or NAME.qw and NAME.sc. The same spec gives
    the same weights."""
    rng = np.random.default_rng(model.seed)
    found: dict[str, np.ndarray] = {}
    for name, shape, may_be_int4 in sorted(_native.EngineBuilder(model.fields, "cpu", 1).expected()):
        kind = model.kind
        if kind == "mixed":
            kind = str(rng.choice(["f32", "bf16", "int4"]))
        is_mlp = ".mlp." in name and "mlp.gate." not in name
        if kind == "int4" and len(shape) == 2 and may_be_int4 and shape[1] % 32 == 0 and is_mlp:
            stem = name.removesuffix(".weight")
            found[f"{stem}.qw"], found[f"{stem}.sc"] = int4(rng, shape[0], shape[1])
            continue
        if len(shape) == 1:
            array = rng.normal(0, 0.2, shape) + (0.0 if "bias" in name else 1.0)
        elif "embed_tokens" in name:
            array = rng.normal(0, 1.0, shape)
        else:
            array = rng.normal(0, 1.6 / np.sqrt(shape[1]), shape)
        array = array.astype(np.float32)
        found[name] = bf16_bits(array) if kind == "bf16" else array
    return found


def fill(builder: _native.EngineBuilder, arrays: dict[str, np.ndarray]) -> None:
    """Adds every tensor of `tensors` to a builder."""
    for name, array in arrays.items():
        if name.endswith(".qw"):
            builder.add_w4a16(name.removesuffix(".qw"), array, arrays[name.removesuffix("qw") + "sc"])
        elif not name.endswith(".sc"):
            builder.add(name, array)


def build(model: ModelSpec, *, threads: int = 0, isa: str = "") -> _native.Engine:
    """The engine of a random model, whatever the threads and instruction set."""
    builder = _native.EngineBuilder(model.fields, "cpu", threads, isa)
    fill(builder, tensors(model))
    return builder.finish()


def prompt(vocab: int, length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, length)]
