"""A folder with the tensors of Kimi K2.5, all 208,550 of them by name, shape and place, and no weights: the
shards are sparse files, of which only the headers take space."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TENSORS = 208_550
SHARDS = 64

TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163585, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 262144, "model_type": "kimi_k2",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pad_token_id": 163839, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip

QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip

CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 163584, "dtype": "bfloat16",
    "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
    "pad_token_id": 163839, "tie_word_embeddings": False, "transformers_version": "4.57.1",
    "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
    "text_config": TEXT | {"quantization_config": QUANTIZATION},
}  # fmt: skip
"""config.json in the spelling of the published file."""

BYTES = {"BF16": 2, "F32": 4, "I32": 4}
Tensor = tuple[str, str, list[int]]  # name, dtype, shape


def _layer(i: int, c: dict[str, Any]) -> Iterator[Tensor]:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    base = f"language_model.model.layers.{i}"
    yield f"{base}.input_layernorm.weight", "BF16", [h]
    yield f"{base}.post_attention_layernorm.weight", "BF16", [h]
    a, latent, rope = f"{base}.self_attn", c["kv_lora_rank"], c["qk_rope_head_dim"]
    yield f"{a}.q_a_proj.weight", "BF16", [c["q_lora_rank"], h]
    yield f"{a}.q_a_layernorm.weight", "BF16", [c["q_lora_rank"]]
    yield f"{a}.q_b_proj.weight", "BF16", [heads * (c["qk_nope_head_dim"] + rope), c["q_lora_rank"]]
    yield f"{a}.kv_a_proj_with_mqa.weight", "BF16", [latent + rope, h]
    yield f"{a}.kv_a_layernorm.weight", "BF16", [latent]
    yield f"{a}.kv_b_proj.weight", "BF16", [heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent]
    yield f"{a}.o_proj.weight", "BF16", [h, heads * c["v_head_dim"]]

    def mlp(at: str, width: int) -> Iterator[Tensor]:
        for part, out, width_in in (("gate", width, h), ("up", width, h), ("down", h, width)):
            yield f"{at}.{part}_proj", "", [out, width_in]

    if i < c["first_k_dense_replace"]:
        for name, _, shape in mlp(f"{base}.mlp", c["intermediate_size"]):
            yield f"{name}.weight", "BF16", shape
        return
    yield f"{base}.mlp.gate.weight", "BF16", [c["n_routed_experts"], h]
    yield f"{base}.mlp.gate.e_score_correction_bias", "F32", [c["n_routed_experts"]]
    for name, _, shape in mlp(f"{base}.mlp.shared_experts", c["moe_intermediate_size"]):
        yield f"{name}.weight", "BF16", shape
    for e in range(c["n_routed_experts"]):
        for name, _, (out, width) in mlp(f"{base}.mlp.experts.{e}", c["moe_intermediate_size"]):
            yield f"{name}.weight_packed", "I32", [out, width // 8]
            yield f"{name}.weight_scale", "BF16", [out, width // 32]
            yield f"{name}.weight_shape", "I32", [2]


def _vision() -> Iterator[Tensor]:
    projector: dict[str, list[int]] = {
        "pre_norm.bias": [1152], "pre_norm.weight": [1152], "proj.0.bias": [4608], "proj.0.weight": [4608, 4608],
        "proj.2.bias": [7168], "proj.2.weight": [7168, 4608],
    }  # fmt: skip
    for name, shape in projector.items():
        yield f"mm_projector.{name}", "BF16", shape
    for i in range(27):
        for name, wide, narrow in (("mlp.fc0", 4304, 1152), ("mlp.fc1", 1152, 4304), ("wo", 1152, 1152),
                                   ("wqkv", 3456, 1152)):  # fmt: skip
            yield f"vision_tower.encoder.blocks.{i}.{name}.bias", "BF16", [wide]
            yield f"vision_tower.encoder.blocks.{i}.{name}.weight", "BF16", [wide, narrow]
        for norm in ("norm0", "norm1"):
            for part in ("bias", "weight"):
                yield f"vision_tower.encoder.blocks.{i}.{norm}.{part}", "BF16", [1152]
    for part in ("bias", "weight"):
        yield f"vision_tower.encoder.final_layernorm.{part}", "BF16", [1152]
    yield "vision_tower.patch_embed.pos_emb.weight", "BF16", [64, 64, 1152]
    yield "vision_tower.patch_embed.proj.bias", "BF16", [1152]
    yield "vision_tower.patch_embed.proj.weight", "BF16", [1152, 3, 14, 14]


def tensors(c: dict[str, Any] = TEXT) -> list[list[Tensor]]:
    """Per shard: a layer each, then head and embedding, the projector, the vision tower."""
    ends: list[Tensor] = [
        ("language_model.lm_head.weight", "BF16", [c["vocab_size"], c["hidden_size"]]),
        ("language_model.model.embed_tokens.weight", "BF16", [c["vocab_size"], c["hidden_size"]]),
        ("language_model.model.norm.weight", "BF16", [c["hidden_size"]]),
    ]
    vision = list(_vision())
    layers = [list(_layer(i, c)) for i in range(c["num_hidden_layers"])]
    return [*layers, ends, vision[:6], vision[6:]]


def header(shard: list[Tensor]) -> tuple[bytes, int]:
    """A safetensors header, tensors in the order of the reference writer (wide dtypes first, then by name),
    and the number of data bytes."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in sorted(shard, key=lambda t: (-BYTES[t[1]], t[1], t[0])):
        size = BYTES[dtype]
        for n in shape:
            size *= n
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write(path: Path) -> Path:
    """The folder: 64 sparse shards of 595 GB in all, on a few dozen megabytes of disk."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(tensors()):
        name = f"model-{i + 1:05d}-of-{SHARDS:06d}.safetensors"
        head, data = header(shard)
        with (path / name).open("wb") as file:
            file.write(head)
            file.truncate(len(head) + data)
        weight_map |= {tensor: name for tensor, _, _ in shard}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
