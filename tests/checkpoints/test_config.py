"""config.json -> the fields of the engine: every number read, everything odd refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from folders import CONFIG

from kdtree_engine import EngineError, _native
from kdtree_engine.config import FIELDS, load_json, parse_config, parse_eos
from kdtree_engine.config_architectures import ARCHITECTURES, WRAPPERS

NUMBERS = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "n_group",
    "topk_group", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps", "rope_theta",
    "max_position_embeddings",
]  # fmt: skip
YARN = ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]


def changed(**changes: Any) -> dict[str, Any]:
    """CONFIG with some fields replaced; ``...`` removes one."""
    config = copy.deepcopy(CONFIG) | changes
    return {key: value for key, value in config.items() if value is not ...}


def yarn(**changes: Any) -> dict[str, Any]:
    scaling = CONFIG["rope_scaling"] | changes
    return changed(rope_scaling={key: value for key, value in scaling.items() if value is not ...})


def refused(config: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(EngineError) as caught:
        parse_config(config)
    return caught.value.code, str(caught.value)


def test_every_field_comes_from_the_file() -> None:
    """A field that is taken from anywhere else (a default, another field) does not follow the file."""
    base = parse_config(CONFIG).fields
    assert set(base) == set(FIELDS)
    for i, key in enumerate(NUMBERS):
        if isinstance(CONFIG[key], bool):
            value: Any = not CONFIG[key]
        else:
            value = CONFIG[key] * 2 if isinstance(CONFIG[key], float) else CONFIG[key] + 2 * (i + 1)
        extra = {"num_key_value_heads": value} if key == "num_attention_heads" else {}
        fields = parse_config(changed(**{key: value}, **extra)).fields
        assert {k for k in FIELDS if fields[k] != base[k]} == {key}
        assert fields[key] == float(value)
    for key in YARN:
        fields = parse_config(yarn(**{key: 7.5})).fields
        assert {k for k in FIELDS if fields[k] != base[k]} == {f"rope_{key}"}
        assert fields[f"rope_{key}"] == 7.5


def test_the_engine_takes_exactly_these_fields() -> None:
    """A field that C++ renamed, gained or lost."""
    fields = dict(parse_config(CONFIG).fields)
    _native.EngineBuilder(fields)
    for key in FIELDS:
        with pytest.raises(EngineError, match=key):
            _native.EngineBuilder({k: v for k, v in fields.items() if k != key})


@pytest.mark.parametrize("key", NUMBERS)
def test_a_missing_number_is_an_error_and_no_default(key: str) -> None:
    code, message = refused(changed(**{key: ...}))
    assert code == "bad_model" and key in message and "missing" in message


@pytest.mark.parametrize("key", YARN)
def test_a_missing_yarn_number_is_an_error_and_no_default(key: str) -> None:
    """beta_fast taken as 32 where a model has 1 gives fluent, wrong text."""
    code, message = refused(yarn(**{key: ...}))
    assert code == "bad_model" and f"rope_scaling.{key} is missing" in message


@pytest.mark.parametrize("value", ["8", True, None, [8], 1.5, 10**400])
def test_a_number_of_the_wrong_kind(value: Any) -> None:
    for key in ("hidden_size", "num_hidden_layers"):
        code, message = refused(changed(**{key: value}))
        assert code == "bad_model" and key in message
    if value != 1.5:
        code, message = refused(changed(rms_norm_eps=value))
        assert code == "bad_model" and "rms_norm_eps" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_layer_freq", 2),
        ("attention_bias", True),
        ("attention_bias", 1),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "group_limited_greedy"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 4096),
        ("num_key_value_heads", 1),
        ("head_dim", 64),
        ("qk_head_dim", 64),
        ("num_local_experts", 8),
        ("tie_word_embeddings", "yes"),
        ("rope_interleave", 1),
        ("a_new_field", 1),
        ("original_max_position_embeddings", 4096),
        ("index_topk", 2048),
    ],
)
def test_a_contradicting_or_unknown_field_is_refused_by_name(field: str, value: Any) -> None:
    code, message = refused(changed(**{field: value}))
    assert code in ("bad_model", "unsupported") and field in message and "\n" not in message


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v32", "kimi_k3", "kimi_linear", "", None, 3, ["deepseek_v3"]]
)
def test_an_unknown_architecture_names_the_known_ones(model_type: Any) -> None:
    code, message = refused(changed(model_type=model_type))
    assert code == "unsupported" and repr(model_type) in message
    assert all(known in message for known in [*ARCHITECTURES, *WRAPPERS])


def test_kimi_k2_is_deepseek_v3_under_another_name() -> None:
    assert parse_config(changed(model_type="kimi_k2")).fields == parse_config(CONFIG).fields


def test_null_means_that_the_part_is_absent() -> None:
    fields = parse_config(changed(q_lora_rank=None, n_shared_experts=None)).fields
    assert fields["q_lora_rank"] == 0 and fields["n_shared_experts"] == 0


def test_both_spellings_of_rope_mean_the_same() -> None:
    """transformers 5 writes rope_parameters, with rope_theta inside and the type twice."""
    inner = {k: v for k, v in CONFIG["rope_scaling"].items() if k != "type"}
    new = inner | {"rope_type": "yarn", "type": "yarn", "rope_theta": CONFIG["rope_theta"]}
    expected = parse_config(CONFIG).fields
    assert parse_config(changed(rope_scaling=..., rope_theta=..., rope_parameters=new)).fields == expected
    assert parse_config(changed(rope_scaling=None, rope_parameters=new)).fields == expected
    assert parse_config(yarn(type=..., rope_type="yarn")).fields == expected
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    fields = parse_config(changed(rope_scaling=..., rope_theta=..., rope_parameters=plain)).fields
    assert fields == parse_config(changed(rope_scaling=None, rope_theta=10000.0)).fields
    assert fields["rope_factor"] == 0 and fields["rope_mscale_all_dim"] == 0


def test_rope_fields_that_state_what_the_engine_does_anyway() -> None:
    expected = parse_config(CONFIG).fields
    assert parse_config(yarn(truncate=True, attention_factor=None, partial_rotary_factor=1.0)).fields == expected
    assert parse_config(yarn(rope_theta=50000.0)).fields == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (yarn(type="linear"), "linear"),
        (yarn(type=...), "type"),
        (yarn(rope_type="default"), "one type"),
        (yarn(attention_factor=1.2), "attention_factor"),
        (yarn(truncate=False), "truncate"),
        (yarn(mscale=0), "mscale"),
        (yarn(finetuned=True), "finetuned"),
        (yarn(rope_theta=10000.0), "rope_theta"),
        (changed(rope_scaling="yarn"), "rope_scaling"),
        (changed(rope_scaling={}), "type"),
        (changed(rope_parameters={"rope_type": "default"}), "rope_parameters"),
        (changed(rope_scaling={"type": "default", "factor": 8.0}), "factor"),
        (changed(rope_scaling=None, rope_theta=None), "rope_theta"),
    ],
)
def test_rope_that_the_engine_does_not_compute_is_refused(config: dict[str, Any], says: str) -> None:
    code, message = refused(config)
    assert code in ("bad_model", "unsupported") and says in message


def test_latent_norm_eps_is_an_option_with_a_stated_default() -> None:
    """Read from rms_norm_eps, the latent norms of every K2-Thinking checkpoint differ from the reference."""
    assert parse_config(CONFIG).fields["latent_norm_eps"] == 1e-6
    assert CONFIG["rms_norm_eps"] == 1e-5
    assert parse_config(CONFIG, latent_norm_eps=1e-5).fields["latent_norm_eps"] == 1e-5


def test_rope_interleave_is_a_property_of_the_architecture_unless_stated() -> None:
    assert parse_config(CONFIG).fields["rope_interleave"] == 1
    assert parse_config(changed(rope_interleave=False)).fields["rope_interleave"] == 0


@pytest.mark.parametrize(("value", "ids"), [(1, {1}), ([1, 5], {1, 5}), (None, set()), (..., set()), ([], set())])
def test_eos(value: Any, ids: set[int]) -> None:
    assert parse_config(changed(eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize("value", ["</s>", -1, 1.0, True, [1, "2"]])
def test_eos_of_the_wrong_kind(value: Any) -> None:
    with pytest.raises(EngineError, match="eos_token_id"):
        parse_eos({"eos_token_id": value}, "generation_config.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b"[1]", "list"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a":' * 100_000, "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
    ],
)
def test_a_file_that_is_no_json_object(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(EngineError, match=says) as caught:
        load_json(path)
    assert caught.value.code == "bad_file" and str(path) in str(caught.value)


def test_published_configs_parse() -> None:
    """Fields as the first Kimi K2 and DeepSeek V3 releases spell them, quantisation left out."""
    k2 = json.loads(
        """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": true,
        "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.48.3", "use_cache": true, "v_head_dim": 128, "vocab_size": 163840,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}}"""
    )
    parsed = parse_config(k2)
    assert (parsed["rope_beta_fast"], parsed["rope_factor"], parsed["rms_norm_eps"]) == (1.0, 32.0, 1e-6)
    assert parsed.eos_token_ids == {163585} and not parsed.tie_word_embeddings
    moonlight = k2 | {
        "model_type": "deepseek_v3", "q_lora_rank": None, "rope_scaling": None, "hidden_size": 2048,
        "n_shared_experts": 2, "ep_size": 1, "rms_norm_eps": 1e-05,
    }  # fmt: skip
    assert parse_config(moonlight)["q_lora_rank"] == 0
