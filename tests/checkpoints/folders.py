"""Hugging Face folders made by numpy alone, whole or with one thing wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "kv_lora_rank": 24,
    "max_position_embeddings": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 10,
    "vocab_size": 300,
}
"""A config.json in the spelling of the published models."""

Arrays = dict[str, np.ndarray]

_DTYPES = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32, "F64": np.float64, "I64": np.int64,
    "F8_E4M3": np.uint8,
}  # fmt: skip
_NAMES = {np.dtype(t): name for name, t in _DTYPES.items()}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by their published names. Written down here a second time on purpose: a
    wrong name or shape in the engine must not be able to agree with itself."""
    c = config
    h, heads = c["hidden_size"], c["num_attention_heads"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], h),
        "model.norm.weight": (h,),
        "lm_head.weight": (c["vocab_size"], h),
    }

    def mlp(base: str, width: int) -> None:
        found[f"{base}.gate_proj.weight"] = (width, h)
        found[f"{base}.up_proj.weight"] = (width, h)
        found[f"{base}.down_proj.weight"] = (h, width)

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = (h,)
        found[f"{layer}.post_attention_layernorm.weight"] = (h,)
        a = f"{layer}.self_attn"
        if c["q_lora_rank"] is None:
            found[f"{a}.q_proj.weight"] = (query, h)
        else:
            found[f"{a}.q_a_proj.weight"] = (c["q_lora_rank"], h)
            found[f"{a}.q_a_layernorm.weight"] = (c["q_lora_rank"],)
            found[f"{a}.q_b_proj.weight"] = (query, c["q_lora_rank"])
        found[f"{a}.kv_a_proj_with_mqa.weight"] = (c["kv_lora_rank"] + c["qk_rope_head_dim"], h)
        found[f"{a}.kv_a_layernorm.weight"] = (c["kv_lora_rank"],)
        kv = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        found[f"{a}.kv_b_proj.weight"] = (kv, c["kv_lora_rank"])
        found[f"{a}.o_proj.weight"] = (h, heads * c["v_head_dim"])
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        found[f"{layer}.mlp.gate.weight"] = (c["n_routed_experts"], h)
        found[f"{layer}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for e in range(c["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", c["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
    return found


def weights(config: Mapping[str, Any], seed: int = 0) -> Arrays:
    """Random float32 weights."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes(config).items():
        x = rng.standard_normal(shape).astype(np.float32)
        made[name] = 1 + 0.1 * x if "norm" in name else 0.2 * x
    return {name: np.ascontiguousarray(x, np.float32) for name, x in made.items()}


def safetensors_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A .safetensors file; a uint16 array is stored as BF16, a uint8 array as F8_E4M3."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span}
        data += raw
    return raw_safetensors(header, data)


def raw_safetensors(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_folder(path: Path, config: Mapping[str, Any] = CONFIG, arrays: Arrays | None = None, shards: int = 0) -> Path:
    """A folder with model.safetensors, or with `shards` shards and an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    arrays = weights(config) if arrays is None else arrays
    if not shards:
        (path / "model.safetensors").write_bytes(safetensors_bytes(arrays))
        return path
    names = sorted(arrays)
    index: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        (path / file).write_bytes(safetensors_bytes({n: arrays[n] for n in mine}))
        index |= dict.fromkeys(mine, file)
    write_index(path, index)
    return path


def write_index(path: Path, weight_map: Mapping[str, Any]) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(text)


def read_index(path: Path) -> dict[str, str]:
    loaded = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return dict(loaded)


def bf16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to bf16, to nearest even; NaN is not expected."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# -- quantised -----------------------------------------------------------------------------------------------

QUANTIZED: dict[str, Any] = CONFIG | {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 300,
}  # fmt: skip
"""Widths that groups of 32 divide."""

INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        },
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
}  # fmt: skip
"""quantization_config of Kimi K2-Thinking, K2.5 and K2.6."""

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
"""quantization_config of DeepSeek V3, R1 and the first Kimi K2."""


def int4(arrays: Arrays, seed: int = 1) -> Arrays:
    """The routed experts replaced by random words, bf16 scales and 32-bit sizes, as the Kimi files have them."""
    rng = np.random.default_rng(seed)
    made: Arrays = {}
    for name, a in arrays.items():
        if ".mlp.experts." not in name:
            made[name] = a
            continue
        module, (out, width) = name.removesuffix(".weight"), a.shape
        words = rng.integers(-(2**31), 2**31, (out, width // 8)).astype(np.int32)
        scales = bf16(rng.uniform(0.01, 0.1, (out, width // 32)).astype(np.float32))
        made |= {
            f"{module}.weight_packed": words,
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": np.array([out, width], np.int32),
        }
    return made


def plain(arrays: Arrays, rounded: bool = False) -> Arrays:
    """The inverse of `int4` and `fp8` in float32: exact products, or the bf16 bits of them. Written down by
    the definition, number by number."""
    made: Arrays = {}
    for name, a in arrays.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            nibbles = (a.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
            q = nibbles.reshape(len(a), -1).astype(np.float32) - 8
            value = np.asarray(q * np.repeat(widen(arrays[f"{module}.weight_scale"]), 32, axis=1), np.float32)
        elif f"{name}_scale_inv" in arrays:
            scales = arrays[f"{name}_scale_inv"].repeat(128, 0).repeat(128, 1)[: a.shape[0], : a.shape[1]]
            value = np.asarray(e4m3(a) * scales, np.float32)
        elif part in ("weight_scale", "weight_shape", "weight_scale_inv"):
            continue
        else:
            made[name] = a
            continue
        made[f"{module}.weight"] = bf16(value) if rounded else value
    return made


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 values of fp8 codes, by the definition: sign, exponent with bias 7, three bits of mantissa."""
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = np.where(codes & 127 == 127, np.nan, value)
    return np.asarray(np.where(sign == 1, -value, value), np.float32)


def fp8(arrays: Arrays, seed: int = 2, powers_of_two: bool = False) -> Arrays:
    """Every projection replaced by random codes and one float32 scale per block of 128 x 128."""
    rng = np.random.default_rng(seed)
    made: Arrays = {}
    for name, a in arrays.items():
        if "_proj" not in name:
            made[name] = a
            continue
        codes = rng.integers(0, 127, a.shape, dtype=np.uint8) | (rng.integers(0, 2, a.shape, dtype=np.uint8) << 7)
        blocks = tuple(-(-n // 128) for n in a.shape)
        scales = 2.0 ** rng.integers(-12, -8, blocks) if powers_of_two else rng.uniform(0.0003, 0.003, blocks)
        made |= {name: codes, f"{name}_scale_inv": scales.astype(np.float32)}
    return made
