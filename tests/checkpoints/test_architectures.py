"""Configs of the relatives: DeepSeek V2, GLM-4.7-Flash, and Kimi K2.5 with its text model inside."""

from __future__ import annotations

import copy
from typing import Any

import kimi_folder
import pytest
from folders import CONFIG, FP8, INT4

from kdtree_engine import EngineError
from kdtree_engine.config import FIELDS, parse_config

V2 = {k: v for k, v in CONFIG.items() if k not in ("scoring_func", "norm_topk_prob", "topk_method")} | {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax", "norm_topk_prob": False, "topk_method": "greedy",
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
}  # fmt: skip
GLM = {k: v for k, v in CONFIG.items() if k not in ("scoring_func", "moe_layer_freq", "rope_scaling")} | {
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
    "partial_rotary_factor": 1.0, "rope_scaling": None, "rope_theta": 1000000,
}  # fmt: skip
"""As published: with first_k_dense_replace. transformers writes mlp_layer_types instead."""

K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 0, "eos_token_id": 1,
    "media_placeholder_token_id": 299, "model_type": "kimi_k25", "tie_word_embeddings": False,
    "text_config": CONFIG | {"model_type": "kimi_k2", "eos_token_id": 2}, "vision_config": {"vt_hidden_size": 8},
}  # fmt: skip


def edited(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(base) | changes
    return {key: value for key, value in made.items() if value is not ...}


def inner(**changes: Any) -> dict[str, Any]:
    return edited(K25, text_config=edited(K25["text_config"], **changes))  # type: ignore[arg-type]


def refused(config: dict[str, Any], *says: str) -> str:
    with pytest.raises(EngineError) as caught:
        parse_config(config)
    message = str(caught.value)
    assert all(word in message for word in says) and "\n" not in message, message
    return caught.value.code


# -- deepseek_v2 ---------------------------------------------------------------------------------------------


def test_v2_has_the_softmax_router() -> None:
    fields = parse_config(V2).fields
    assert set(fields) == set(FIELDS) and fields["scoring"] == 1 and fields["rope_interleave"] == 1
    assert parse_config(CONFIG)["scoring"] == 0


def test_v2_greedy_has_no_groups_and_group_limited_greedy_needs_them() -> None:
    """Groups left over in a greedy config would mask experts that the model may choose."""
    for key in ("n_group", "topk_group"):
        assert parse_config(edited(V2, **{key: None}))[key] == 1
        assert parse_config(edited(V2, **{key: ...}))[key] == 1
        assert refused(edited(V2, **{key: 8}), key) == "bad_model"
    grouped = edited(V2, topk_method="group_limited_greedy", n_group=2, topk_group=1)
    fields = parse_config(grouped).fields
    assert (fields["n_group"], fields["topk_group"]) == (2, 1)
    for key in ("n_group", "topk_group"):
        assert refused(edited(grouped, **{key: None}), key) == "bad_model"
        assert refused(edited(grouped, **{key: ...}), key, "missing") == "bad_model"


def test_v2_names_its_choice_of_experts() -> None:
    assert refused(edited(V2, topk_method=...), "topk_method is missing") == "bad_model"
    assert refused(edited(V2, topk_method="noaux_tc"), "topk_method", "noaux_tc") == "unsupported"


def test_v2_what_implementations_read_differently() -> None:
    """With norm_topk_prob the original leaves routed_scaling_factor out, transformers the normalisation."""
    assert refused(edited(V2, norm_topk_prob=True), "norm_topk_prob") == "unsupported"
    assert refused(edited(V2, norm_topk_prob=...), "norm_topk_prob") == "bad_model"


@pytest.mark.parametrize(
    ("key", "value"), [("scoring_func", "sigmoid"), ("rope_interleave", False), ("mlp_bias", True)]
)
def test_v2_contradictions(key: str, value: Any) -> None:
    assert refused(edited(V2, **{key: value}), key) == "unsupported"


def test_v3_does_not_take_the_router_of_v2() -> None:
    mixed = edited(V2, model_type="deepseek_v3")
    assert refused(mixed, "DeepseekV2ForCausalLM", "model_type deepseek_v3") == "bad_model"
    assert refused(edited(mixed, architectures=["DeepseekV3ForCausalLM"]), "scoring_func") == "unsupported"


# -- glm4_moe_lite -------------------------------------------------------------------------------------------


def test_glm_has_the_router_of_v3_and_plain_rope() -> None:
    fields = parse_config(GLM).fields
    assert fields["scoring"] == 0 and fields["rope_factor"] == 0 and fields["rope_theta"] == 1e6
    assert fields["rope_interleave"] == 1 and fields["first_k_dense_replace"] == 1


def test_glm_layer_types() -> None:
    """The list and the number say the same; a layer that is dense in the middle is another model."""
    listed = edited(GLM, first_k_dense_replace=..., mlp_layer_types=["dense", "sparse"])
    assert parse_config(listed).fields == parse_config(GLM).fields
    assert parse_config(edited(listed, first_k_dense_replace=1)).fields == parse_config(GLM).fields
    for n, types in enumerate((["sparse", "sparse"], ["dense", "sparse"], ["dense", "dense"])):
        assert parse_config(edited(listed, mlp_layer_types=types))["first_k_dense_replace"] == n
    assert refused(edited(listed, first_k_dense_replace=2), "first_k_dense_replace") == "bad_model"
    for bad in (["sparse", "dense"], ["dense"], ["dense", "sparse", "sparse"], ["dense", "moe"], []):
        assert refused(edited(listed, mlp_layer_types=bad), "mlp_layer_types") == "unsupported"
    assert refused(edited(listed, mlp_layer_types="dense"), "mlp_layer_types") == "bad_model"
    assert refused(edited(GLM, first_k_dense_replace=...), "first_k_dense_replace") == "bad_model"


def test_glm_layer_types_of_a_hostile_length_cost_nothing() -> None:
    huge = edited(GLM, num_hidden_layers=2**53, mlp_layer_types=["dense", "sparse"])
    assert refused(huge, "mlp_layer_types") == "unsupported"


def test_layer_types_belong_to_glm() -> None:
    assert refused(edited(CONFIG, mlp_layer_types=["dense", "sparse"]), "mlp_layer_types") == "bad_model"


# -- kimi_k25 ------------------------------------------------------------------------------------------------


def test_k25_is_its_text_model() -> None:
    parsed = parse_config(K25)
    assert parsed.fields == parse_config(CONFIG).fields and parsed.model_type == "kimi_k25"
    assert parsed.eos_token_ids == {1, 2}, "a text ends with either"
    assert parsed.placeholders == {299}
    assert "vision_tower." in parsed.skipped and not parse_config(CONFIG).skipped
    assert parse_config(inner(model_type="deepseek_v3")).fields == parsed.fields


def test_k25_as_published() -> None:
    """beta_fast 32 and factor 64 are K2.5's own; the first K2 has 1 and 32."""
    parsed = parse_config(kimi_folder.CONFIG)
    assert (parsed["rope_beta_fast"], parsed["rope_factor"], parsed["rms_norm_eps"]) == (32.0, 64.0, 1e-5)
    assert parsed["latent_norm_eps"] == 1e-6 and parsed["n_routed_experts"] == 384
    assert parsed.placeholders == {163605} and parsed.eos_token_ids == {163585}
    assert parsed.quantization is not None and parsed.quantization.kind == "int4"


def test_k25_with_the_fields_that_old_versions_of_transformers_write() -> None:
    old = {
        "_name_or_path": "", "add_cross_attention": False, "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": None, "decoder_start_token_id": None, "finetuning_task": None,
        "id2label": {"0": "LABEL_0"}, "is_decoder": False, "is_encoder_decoder": False, "label2id": {"LABEL_0": 0},
        "output_attentions": False, "prefix": None, "problem_type": None, "pruned_heads": {}, "return_dict": True,
        "sep_token_id": None, "task_specific_params": None, "tf_legacy_loss": False, "tie_encoder_decoder": False,
        "tokenizer_class": None, "torchscript": False, "use_bfloat16": False, "temperature": 1.0, "top_k": 50,
    }  # fmt: skip
    assert parse_config(inner(**old)).fields == parse_config(K25).fields
    for key, value in (("pruned_heads", {"0": [1]}), ("add_cross_attention", True), ("is_encoder_decoder", True)):
        assert refused(inner(**{key: value}), "text_config", key) == "unsupported"


@pytest.mark.parametrize("level", ["outer", "inner", "both"])
def test_k25_quantization_config_stands_at_either_level(level: str) -> None:
    config = inner(quantization_config=INT4) if level != "outer" else copy.deepcopy(K25)
    if level != "inner":
        config["quantization_config"] = INT4
    found = parse_config(config).quantization
    assert found is not None and found.kind == "int4"


def test_k25_levels_that_contradict_each_other() -> None:
    assert refused(inner(quantization_config=INT4) | {"quantization_config": FP8}, "contradicts") == "bad_model"
    other = INT4 | {"ignore": []}
    assert refused(inner(quantization_config=INT4) | {"quantization_config": other}, "contradicts") == "bad_model"
    assert refused(inner(tie_word_embeddings=True), "tie_word_embeddings") == "bad_model"
    assert (
        refused(edited(inner(tie_word_embeddings=...), tie_word_embeddings=...), "tie_word_embeddings") == "bad_model"
    )
    assert not parse_config(edited(K25, tie_word_embeddings=...)).tie_word_embeddings
    assert parse_config(edited(inner(tie_word_embeddings=...), tie_word_embeddings=True)).tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (edited(K25, text_config=...), "text_config is missing"),
        (edited(K25, text_config=None), "text_config"),
        (edited(K25, text_config=[]), "text_config"),
        (inner(model_type="kimi_linear"), "kimi_linear"),
        (inner(model_type="kimi_k25"), "kimi_k25"),
        (inner(rms_norm_eps=...), "text_config: the field rms_norm_eps is missing"),
        (inner(new=1), "text_config: unknown field new"),
        (edited(K25, new=1), "unknown field new"),
        (edited(K25, hidden_size=64), "unknown field hidden_size"),
        (edited(K25, media_placeholder_token_id=...), "media_placeholder_token_id is missing"),
        (edited(K25, media_placeholder_token_id="x"), "media_placeholder_token_id"),
        (edited(K25, model_type="kimi_k3"), "kimi_k3"),
    ],
)
def test_k25_refusals_name_the_field_and_its_level(config: dict[str, Any], says: str) -> None:
    refused(config, says)


def test_k25_as_transformers_5_spells_it() -> None:
    native = edited(
        K25, media_placeholder_token_id=..., image_token_id=299, video_token_id=163840, vision_start_token_id=297,
        vision_end_token_id=298, projection_hidden_size=16, projection_layer_norm_eps=1e-5,
    )  # fmt: skip
    assert parse_config(native).placeholders == {299, 163840}
