"""Sizes of the models that can be trained, as config.json spells them. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from harness.train.bpe import EOS, MASK, PAD
from harness.train.errors import TrainError

__all__ = ["DRAFTS", "TARGETS", "DraftShape", "TargetShape", "draft_config", "target_config"]

GROUP = 32


@dataclass(frozen=True)
class TargetShape:
    """A model of DeepSeek V3's architecture. ``original``: positions of the YaRN base, stretched by ``factor``."""

    vocab_size: int = 4096
    hidden_size: int = 320
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    q_lora_rank: int = 160
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate_size: int = 704
    moe_intermediate_size: int = 96
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.827
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    rope_theta: float = 50000.0
    factor: float = 4.0
    original: int = 512
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % GROUP:
                raise TrainError(f"{name} is {getattr(self, name)}; INT4 experts need a multiple of {GROUP}")
        if not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            raise TrainError(f"{self.num_experts_per_tok} of {self.n_routed_experts} experts cannot be chosen")
        if self.qk_rope_head_dim % 2:
            raise TrainError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; expected an even number")

    @property
    def context(self) -> int:
        return int(self.original * self.factor)


@dataclass(frozen=True)
class DraftShape:
    """A DFlash draft model. ``rows`` of a block: the last token and ``rows - 1`` drafts."""

    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 320
    rows: int = 10
    taps: tuple[int, ...] = (1, 3, 5)
    window: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def check(self, target: TargetShape) -> None:
        """Raises TrainError where the taps are not layers of `target`."""
        if not self.taps or len(set(self.taps)) != len(self.taps) or max(self.taps) >= target.num_hidden_layers:
            last = target.num_hidden_layers - 1
            raise TrainError(f"taps {list(self.taps)}; expected layers of 0 to {last}, once each")
        if self.num_attention_heads % self.num_key_value_heads:
            raise TrainError(f"{self.num_attention_heads} query heads do not divide among {self.num_key_value_heads}")


_MICRO = TargetShape(
    vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, intermediate_size=96, moe_intermediate_size=32,
    n_routed_experts=8, num_experts_per_tok=2, original=64,
)  # fmt: skip
TARGETS = {"demo": TargetShape(), "micro": _MICRO}
DRAFTS = {
    "demo": DraftShape(),
    "micro": DraftShape(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                        intermediate_size=64, rows=6, taps=(0, 2), window=128),
}  # fmt: skip


def target_config(shape: TargetShape) -> dict[str, Any]:
    """config.json in the form of the released Kimi K2 INT4 checkpoints."""
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size",
        "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace",
        "routed_scaling_factor", "rms_norm_eps", "rope_theta",
    )  # fmt: skip
    values = asdict(shape)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **{key: values[key] for key in same},
        "num_key_value_heads": shape.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": shape.context,
        "rope_scaling": {
            "type": "yarn",
            "factor": shape.factor,
            "original_max_position_embeddings": shape.original,
            "beta_fast": shape.beta_fast,
            "beta_slow": shape.beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                        "dynamic": False,
                        "actorder": None,
                        "block_structure": None,
                        "observer": "minmax",
                        "observer_kwargs": {},
                    },
                }
            },
        },
    }


def draft_config(draft: DraftShape, target: TargetShape) -> dict[str, Any]:
    """config.json of a published DFlash checkpoint, with what its readers disagree on stated."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": draft.num_hidden_layers,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "intermediate_size": draft.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": draft.rms_norm_eps,
        "rope_theta": draft.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": target.context,
        "tie_word_embeddings": False,
        "block_size": draft.rows,
        "num_target_layers": target.num_hidden_layers,
        "layer_types": ["sliding_attention"] * draft.num_hidden_layers,
        "sliding_window": draft.window,
        "use_sliding_window": True,
        "is_causal": False,
        "dflash_config": {
            "target_layer_ids": list(draft.taps),
            "mask_token_id": MASK,
            "mask_token": "<|mask|>",
            "block_size_counts": "rows",
        },
        "torch_dtype": "bfloat16",
    }


@dataclass(frozen=True)
class Training:
    """Numbers of a training run. ``batch`` sequences of ``length`` tokens a step; ``mixture``: the share of the
    kinds; learning rates of the matrices (Muon) and of everything else (AdamW); ``balance``: step of the
    router's bias."""

    batch: int = 32
    length: int = 2048
    matrix_rate: float = 0.015
    other_rate: float = 0.003
    weight_decay: float = 0.02
    balance: float = 0.001
    warmup: float = 0.02
    cooldown: float = 0.5
    mixture: dict[str, float] = field(
        default_factory=lambda: {"code": 0.47, "reference": 0.28, "prose": 0.16, "lists": 0.09}
    )
    seed: int = 1


def replaced(base: Any, changes: dict[str, Any]) -> Any:
    """A dataclass with some fields changed; TrainError for a name that it does not have."""
    known = {f.name for f in fields(base)}
    for name in changes:
        if name not in known:
            raise TrainError(f"{name!r} is no setting; known: {', '.join(sorted(known))}")
    return type(base)(**{**{f.name: getattr(base, f.name) for f in fields(base)}, **changes})
