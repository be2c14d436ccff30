"""The config.json of a converted folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import DEFAULT_LATENT_NORM_EPS, ModelConfig
from .config_architectures import WRAPPERS
from .convert_plan import Job, Target
from .errors import fail
from .quantize import GROUP

__all__ = ["from_fields", "rewritten"]

# Modules that stay in floating point, in the words of the released Kimi checkpoints.
_IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
_NOT_LINEAR = ("embed_tokens", ".mlp.gate")  # modules that no class of linear layers means
# Others that a folder may hold beside the model, if it does: parts of names, and what is said about them.
_BESIDE = (
    ("vision_tower.", "re:.*vision_tower.*"),
    ("mm_projector.", "re:.*mm_projector.*"),
    (".eh_proj.", "re:.*eh_proj.*"),
    (".shared_head.", "re:.*shared_head.*"),
)


def quantization_config(jobs: Sequence[Job]) -> dict[str, Any]:
    """What compressed-tensors wants to know of a folder with these tensors, some of them INT4."""
    if all(job.matrix.is_expert for job in jobs if _is_int4(job)):
        beside = [said for mark, said in _BESIDE if any(mark in job.outputs[0].name for job in jobs)]
        ignore = [*_IGNORE, *beside]
    else:  # bundles may quantise other layers too
        modules = [job.matrix.module for job in jobs if not _is_int4(job) and len(job.matrix.shape) == 2]
        ignore = [module for module in modules if not module.endswith(_NOT_LINEAR)]
    weights = {
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
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": weights,
            }
        },
        "ignore": ignore,
    }


def _is_int4(job: Job) -> bool:
    return job.outputs[0].name.endswith(".weight_packed")


def rewritten(config: Mapping[str, Any], to: Target, jobs: Sequence[Job]) -> dict[str, Any]:
    """A folder's config.json after the conversion of its tensors: what it says about their types is changed,
    everything else stays, in a multimodal model also inside the text model's part."""
    made = copy.deepcopy(dict(config))
    wrapper = WRAPPERS.get(str(made.get("model_type")))
    parts = [made, made[wrapper.text]] if wrapper is not None else [made]
    if to == "same":
        return made
    for part in parts:
        part.pop("quantization_config", None)
        if to == "int4":
            part["quantization_config"] = quantization_config(jobs)
        else:
            for key in ("torch_dtype", "dtype"):
                if key in part:
                    part[key] = {"bf16": "bfloat16", "f32": "float32"}[to]
    return made


def bundle_model_type(fields: Mapping[str, float]) -> str:
    """The architecture of a bundle, which has its numbers and not its name: what a config.json would call it."""
    return "deepseek_v3" if fields["scoring"] == 0 else "deepseek_v2"


def from_fields(config: ModelConfig, path: Path, jobs: Sequence[Job]) -> dict[str, Any]:
    """A config.json for a bundle, which has the numbers and not the words; `jobs` are the folder's tensors.
    EngineError ``unsupported`` for numbers that no config.json can say."""
    fields = config.fields
    if fields["latent_norm_eps"] != DEFAULT_LATENT_NORM_EPS:
        said = f"latent_norm_eps is {fields['latent_norm_eps']:g}, which a config.json cannot say"
        fail("unsupported", f"{path}: {said}; expected {DEFAULT_LATENT_NORM_EPS:g}")
    sigmoid = fields["scoring"] == 0
    if not sigmoid and not fields["rope_interleave"]:
        fail("unsupported", f"{path}: no architecture with a softmax router has RoPE in halves")
    integers = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok",
        "max_position_embeddings", "first_k_dense_replace", "n_group", "topk_group",
    )  # fmt: skip
    made: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": bundle_model_type(fields),
        **{key: int(fields[key]) for key in integers},
        "num_key_value_heads": int(fields["num_attention_heads"]),
        **{key: int(fields[key]) or None for key in ("q_lora_rank", "n_routed_experts", "n_shared_experts")},
        "routed_scaling_factor": fields["routed_scaling_factor"],
        "rms_norm_eps": fields["rms_norm_eps"],
        "norm_topk_prob": bool(fields["norm_topk_prob"]),
        "rope_theta": fields["rope_theta"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if sigmoid:
        made |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        made["rope_interleave"] = bool(fields["rope_interleave"])
    else:
        made["topk_method"] = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    if fields["rope_factor"]:
        keys = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        made["rope_scaling"] = {
            "type": "yarn",
            **{key: fields[f"rope_{key}"] for key in keys},
            "original_max_position_embeddings": int(fields["rope_original_max_position_embeddings"]),
        }
    if any(map(_is_int4, jobs)):
        made["quantization_config"] = quantization_config(jobs)
    return made
