"""The numbers of a model: a dict with exactly the fields of ModelConfig (cpp/model/config.h)."""

from __future__ import annotations

from collections.abc import Mapping

INTEGER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "scoring",
    "norm_topk_prob",
    "rope_interleave",
    "max_position_embeddings",
)
REAL_FIELDS = (
    "routed_scaling_factor",
    "rms_norm_eps",
    "latent_norm_eps",
    "rope_theta",
    "rope_factor",
    "rope_original_max_position_embeddings",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_mscale",
    "rope_mscale_all_dim",
)
SIGMOID_NOAUX_TC = 0
SOFTMAX_GREEDY = 1

Config = dict[str, float | int]


def checked(fields: Mapping[str, float | int]) -> Config:
    """The same fields, integers as int and reals as float.

    Raises ValueError that names a field which is missing, unknown or no integer where one is due.
    """
    known = set(INTEGER_FIELDS) | set(REAL_FIELDS)
    if missing := sorted(known - set(fields)):
        raise ValueError(f"config lacks {', '.join(missing)}")
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"config has unknown {', '.join(unknown)}")
    for name in INTEGER_FIELDS:
        if int(fields[name]) != fields[name]:
            raise ValueError(f"config {name} is {fields[name]}, expected an integer")
    return {name: int(fields[name]) for name in INTEGER_FIELDS} | {
        name: float(fields[name]) for name in REAL_FIELDS
    }


def is_moe(config: Mapping[str, float | int], layer: int) -> bool:
    """Whether a layer has routed experts."""
    return config["n_routed_experts"] > 0 and layer >= config["first_k_dense_replace"]


def weight_shapes(config: Mapping[str, float | int]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the config implies, with the checkpoint's own name, and its shape ([out, in] or
    [n])."""
    c = {name: int(config[name]) for name in INTEGER_FIELDS}
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    latent = c["kv_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}

    def mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        attention = f"{at}.self_attn"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        if c["q_lora_rank"]:
            shapes[f"{attention}.q_a_proj.weight"] = (c["q_lora_rank"], hidden)
            shapes[f"{attention}.q_a_layernorm.weight"] = (c["q_lora_rank"],)
            shapes[f"{attention}.q_b_proj.weight"] = (query, c["q_lora_rank"])
        else:
            shapes[f"{attention}.q_proj.weight"] = (query, hidden)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (latent + c["qk_rope_head_dim"], hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (latent,)
        shapes[f"{attention}.kv_b_proj.weight"] = (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * c["v_head_dim"])
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if not is_moe(config, layer):
            mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        shapes[f"{at}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        if c["scoring"] == SIGMOID_NOAUX_TC:
            shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            mlp(f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            mlp(f"{at}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    return shapes
