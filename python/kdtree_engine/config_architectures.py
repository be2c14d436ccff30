"""What a ``model_type`` implies without saying it in its config: one table, ARCHITECTURES.

All of them are one family: multi-head latent attention, SwiGLU experts. They differ in the router, in the
spelling of a few fields and in where the text model stands inside the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ARCHITECTURES", "IGNORABLE", "WRAPPERS", "Architecture", "Wrapper"]


@dataclass(frozen=True)
class Architecture:
    """A text model.

    ``scoring`` as in cpp/model/config.h: 0 sigmoid with correction bias (noaux_tc), 1 softmax (greedy).
    ``rope_interleave``: how the stored weights pair the rotated components, where the config does not say.
    ``dense_layers``: the field that says which layers are dense. ``router``: how the config names the choice
    of experts; None where ``only`` pins it. ``only``: fields that may be present, with the one value that
    the engine computes.
    """

    scoring: int
    rope_interleave: bool
    dense_layers: Literal["first_k_dense_replace", "mlp_layer_types"] = "first_k_dense_replace"
    router: Literal["topk_method"] | None = None
    only: Mapping[str, Any] = field(default_factory=dict)


# Switches of every architecture, and those of transformers' base class that could change a forward pass.
_NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1,
    "pruned_heads": {},
    "sliding_window": None,
    "tie_encoder_decoder": False,
}

_SIGMOID = _NEUTRAL | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

_DEEPSEEK_V3 = Architecture(scoring=0, rope_interleave=True, only=_SIGMOID)

ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek_v3": _DEEPSEEK_V3,  # DeepSeek V3, V3.1, R1; Moonlight
    "kimi_k2": _DEEPSEEK_V3,  # Kimi K2 and K2-Thinking: the same maths under another name
    # GLM-4.7-Flash: DeepSeek-V3's attention and router under the names of GLM's classes.
    "glm4_moe_lite": Architecture(
        scoring=0, rope_interleave=True, dense_layers="mlp_layer_types", only=_SIGMOID
    ),
    # DeepSeek V2, V2-Lite: softmax router, with groups (group_limited_greedy) or without (greedy).
    "deepseek_v2": Architecture(
        scoring=1,
        rope_interleave=True,
        router="topk_method",
        only=_NEUTRAL | {"scoring_func": "softmax", "rope_interleave": True},
    ),
}


@dataclass(frozen=True)
class Wrapper:
    """A multimodal model of which the engine runs the text part.

    ``text`` names the text model's object, whose own model_type must be one of `text_types`. ``ignorable``:
    outer fields about the other parts. ``skipped``: prefixes of the other parts' tensors. ``placeholder``:
    outer fields that hold ids of tokens which stand for media; a prompt with such a token has no meaning
    here.
    """

    text: str
    text_types: tuple[str, ...]
    ignorable: frozenset[str]
    skipped: tuple[str, ...]
    placeholder: tuple[str, ...]


WRAPPERS: Mapping[str, Wrapper] = {
    # Kimi K2.5, K2.6: as published, and as transformers 5 saves it.
    "kimi_k25": Wrapper(
        text="text_config",
        text_types=("kimi_k2", "deepseek_v3"),
        ignorable=frozenset(
            {
                "ignore_index",
                "projection_hidden_size",
                "projection_layer_norm_eps",
                "use_unified_vision_chunk",
                "video_placeholder",
                "vision_config",
                "vision_end_token_id",
                "vision_start_token_id",
            }
        ),
        skipped=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
        placeholder=("media_placeholder_token_id", "image_token_id", "video_token_id"),
    ),
}

CLASSES: dict[str, tuple[str, ...]] = {
    "DeepseekV2ForCausalLM": ("deepseek_v2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite",),
    "KimiK25ForConditionalGeneration": ("kimi_k25",),
    "Kimi_K25ForConditionalGeneration": ("kimi_k25",),
}
"""Names in the field ``architectures`` and the model types that they go with; other names say nothing here."""

IGNORABLE = frozenset(
    {
        "_attn_implementation_autoset",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "ep_size",
        "initializer_range",
        "is_decoder",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        # What older versions of transformers write into nested configs: labels of classifiers and defaults
        # of generation, which are read from generation_config.json or from the caller.
        "bad_words_ids",
        "begin_suppress_tokens",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "typical_p",
        "use_bfloat16",
    }
)
"""Fields that do not reach the forward pass of a decoder: bookkeeping, training, dropout (0 at inference),
and token ids (read elsewhere)."""
