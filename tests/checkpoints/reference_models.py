"""Small random models of every architecture, as transformers and compressed-tensors write them, and what
transformers computes for them in float32. Needs torch and transformers.

The models are random but not meek: norms are not 1, the router's bias is as large as the gaps between its
scores, latents are small where their eps is to count, contexts go past the original one, the two mscales
differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

TEXT = (Path(__file__).parents[1] / "data" / "hf_fixture" / "text.txt").read_text(encoding="utf-8")
TOKENS = list((TEXT * 2).encode())[:320]
"""Real text as bytes: ids below 256, in every vocabulary here."""

YARN: dict[str, Any] = {
    "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.8, "mscale_all_dim": 1.2,
}  # fmt: skip

_SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip

V3: dict[str, Any] = _SHAPE | {"rope_theta": 50000.0, "rope_scaling": YARN, "num_nextn_predict_layers": 0}
V2: dict[str, Any] = _SHAPE | {
    "rope_theta": 10000.0,
    "rope_scaling": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "topk_method": "greedy", "rms_norm_eps": 1e-6,
}  # fmt: skip
GLM: dict[str, Any] = {k: v for k, v in _SHAPE.items() if k != "first_k_dense_replace"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "qk_nope_head_dim": 24, "v_head_dim": 32,
    "routed_scaling_factor": 1.8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "patch_size": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
PLACEHOLDER = 255


def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def randomise(model: Any, seed: int, rope_dim: int, small: float = 0.003) -> Any:
    """Fill every parameter and buffer; latents come out about ten times the square root of their eps."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or p.dtype not in (torch.float32, torch.bfloat16):
                continue
            x = rng.standard_normal(tuple(p.shape))
            if name.endswith("bias"):
                x = 0.1 * x
            elif "norm" in name:
                x = 1 + 0.2 * x
            else:
                x = 0.8 * x / np.sqrt(p.shape[-1])
                if "q_a_proj" in name or "kv_a_proj" in name:
                    x[: p.shape[0] - (rope_dim if "kv_a" in name else 0)] *= small
            p.copy_(torch.from_numpy(x))
    return model.eval()


def text_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random text model: "v3", "v2" or "glm"."""
    quiet()
    config, model = {
        "v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
        "glm": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    }[kind]
    fields = {"v3": V3, "v2": V2, "glm": GLM}[kind] | changes
    made = config(**fields, attn_implementation="eager")
    return randomise(model(made), seed, fields["qk_rope_head_dim"])


def kimi_k25(seed: int = 0, **changes: Any) -> Any:
    """The multimodal wrapper around a random V3 text model."""
    quiet()
    config = transformers.Kimi_K25Config(
        text_config=V3 | {"model_type": "deepseek_v3"} | changes, vision_config=VISION, tie_word_embeddings=False,
        projection_hidden_size=16, image_token_id=PLACEHOLDER, attn_implementation="eager",
    )  # fmt: skip
    return randomise(transformers.Kimi_K25ForConditionalGeneration(config), seed, V3["qk_rope_head_dim"])


def reference(model: Any, tokens: list[int] = TOKENS) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """float32 logits [tokens, vocab], and per layer what is cached: latents and k_rope."""
    with torch.no_grad():
        out = model.float().eval()(torch.tensor([tokens]), use_cache=True)
    layers = out.past_key_values.layers
    cached = [(layer.keys[0, 0].numpy(), layer.values[0, 0].numpy()) for layer in layers]
    return out.logits[0].numpy(), cached


def load_reference(folder: Path, **options: Any) -> Any:
    """The checkpoint as transformers loads it."""
    quiet()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )


# -- checkpoints as they are published -------------------------------------------------------------------------


def published(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and config of a folder that transformers saved in one file."""
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def kimi_k2_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSeek V3 config of transformers in the spelling of the published Kimi files."""
    c = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_interleave", "head_dim", "qk_head_dim")}
    rope = dict(config["rope_parameters"])
    c |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {k: v for k, v in rope.items() if k != "rope_type"}}
    more = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "seq_aux": True}
    return c | more | {"model_type": "kimi_k2", "ep_size": 1, "aux_loss_alpha": 0.001, "torch_dtype": "bfloat16"}


def kimi_k25_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """The outer config of a published Kimi K2.5 around a `kimi_k2_config`."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "bos_token_id": 0, "dtype": "bfloat16", "eos_token_id": 1, "ignore_index": -100,
        "media_placeholder_token_id": PLACEHOLDER, "model_type": "kimi_k25", "pad_token_id": 2,
        "text_config": {"_name_or_path": "", "add_cross_attention": False, "id2label": {"0": "LABEL_0"}, **text},
        "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"vt_hidden_size": 8, "vt_num_hidden_layers": 1, "patch_size": 2, "merge_kernel_size": [2, 2]},
    }  # fmt: skip


def wrapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of a text model -> those of a published Kimi K2.5, with some of its vision tensors beside them."""
    named = {f"language_model.{name}": t for name, t in tensors.items()}
    vision = "vision_tower.encoder.blocks.0"
    return named | {
        f"{vision}.wqkv.weight": torch.ones(24, 8, dtype=torch.bfloat16),
        f"{vision}.mlp.fc0.weight": torch.ones(20, 8, dtype=torch.bfloat16),
        f"{vision}.norm0.bias": torch.zeros(8, dtype=torch.bfloat16),
        "vision_tower.patch_embed.pos_emb.weight": torch.ones(4, 4, 8, dtype=torch.bfloat16),
        "mm_projector.proj.0.weight": torch.ones(32, 32, dtype=torch.bfloat16),
    }


def int4_scheme() -> tuple[Any, Any, dict[str, Any]]:
    """compressed-tensors' own compressor, scheme and quantization_config of the released Kimi checkpoints."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    )
    return BaseCompressor.get_value_from_registry("pack-quantized"), scheme, json.loads(config.model_dump_json())


def packed_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The routed experts of bf16 tensors as compressed-tensors packs them, the rest as it is."""
    compressor, scheme, _ = int4_scheme()
    out: dict[str, torch.Tensor] = {}
    for name, w in tensors.items():
        if ".mlp.experts." not in name:
            out[name] = w
            continue
        groups = w.float().reshape(w.shape[0], -1, 32)
        scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
        made = compressor.compress({"weight": w, "weight_scale": scale}, scheme)
        out |= {name.removesuffix("weight") + part: t for part, t in made.items()}
    return out


def unpacked_experts(tensors: Mapping[str, torch.Tensor], exact: bool) -> dict[str, torch.Tensor]:
    """The inverse, by compressed-tensors (which rounds to bf16) or as the exact products in float32."""
    compressor, scheme, _ = int4_scheme()
    out = {n: t for n, t in tensors.items() if not n.rpartition(".")[2].startswith("weight_")}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part != "weight_packed":
            continue
        state = {p: tensors[f"{module}.{p}"] for p in ("weight_packed", "weight_scale", "weight_shape")}
        if exact:
            state["weight_scale"] = state["weight_scale"].float()
        out[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
    return out


def fp8_matrices(tensors: Mapping[str, torch.Tensor], powers_of_two: bool = False) -> dict[str, torch.Tensor]:
    """Every projection in e4m3 with one float32 scale per block of 128 x 128, as DeepSeek publishes them."""
    out: dict[str, torch.Tensor] = {}
    for name, w in tensors.items():
        if "_proj" not in name or w.ndim != 2:
            out[name] = w
            continue
        rows, columns = (-(-n // 128) for n in w.shape)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[: w.shape[0], : w.shape[1]] = w.float()
        blocks = padded.reshape(rows, 128, columns, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        if powers_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: w.shape[0], : w.shape[1]]
        out[name] = codes.to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale
    return out


def plain_fp8(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The float32 products of codes and scales, block by block."""
    out = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")}
    for name, scale in tensors.items():
        if name.endswith("_scale_inv"):
            codes = tensors[name.removesuffix("_scale_inv")]
            grown = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            out[name.removesuffix("_scale_inv")] = codes.float() * grown[: codes.shape[0], : codes.shape[1]]
    return out


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
