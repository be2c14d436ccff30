"""config.json of draft models: the published spellings, every ambiguity an error that names both readings."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from draft_folders import CONFIG, ROWS

from kdtree_engine import EngineError
from kdtree_engine.draft_config import DraftConfig, DraftOptions, default_target_layers, parse_draft_config

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
K2: dict[str, Any] = CONFIG | {
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "head_dim": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 61,
    "rope_scaling": YARN | {"type": "deepseek_yarn"},
    "rope_theta": 50000.0,
    "vocab_size": 163840,
}
"""Kimi K2.6's drafter, as its readers describe it."""


def parse(
    changes: dict[str, Any] | None = None, *, drop: str = "", base: dict[str, Any] = CONFIG, **options: Any
) -> DraftConfig:
    config = copy.deepcopy(base) | (changes or {})
    config.pop(drop, None)
    return parse_draft_config(config, "config.json", DraftOptions(**({"block_size": "rows"} | options)))


def refused(*words: str, code: str = "bad_model", changes: dict[str, Any] | None = None, **how: Any) -> None:
    with pytest.raises(EngineError) as caught:
        parse(changes, **how)
    assert caught.value.code == code, caught.value
    for word in ("config.json", *words):
        assert word in str(caught.value), (word, str(caught.value))


def inner(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": CONFIG["dflash_config"] | changes}


def test_kimi_k2() -> None:
    """Catches any field of the real drafter that is misread."""
    c = parse(base=K2)
    assert c.target_layers == [1, 12, 24, 35, 47, 58] and c.num_target_layers == 61
    assert c.fields["block_rows"] == 8 and c.fields["mask_token_id"] == 163838
    assert c.fields["rope_amplitude"] == 1.0 and c.fields["rope_factor"] == 64
    assert c.window == [0] * 6 and c.causal == [0] * 6


# -- block_size ------------------------------------------------------------------------------------------


def test_block_size_alone_is_an_open_question() -> None:
    """Catches a guess between 7 drafts and 8: one of them runs with a mask more than was trained."""
    refused("block_size 8", "7 drafts", "8 behind", "block_size=rows", "block_size=drafts", "block_size_counts",
            block_size=None)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options", "rows"),
    [
        ({}, "rows", 8),
        ({}, "drafts", 9),
        (inner(block_size_counts="rows"), None, 8),
        (inner(block_size_counts="drafts"), None, 9),
        ({"num_speculative_tokens": 7}, None, 8),
        ({"num_speculative_tokens": 8}, None, 9),
        (inner(block_size_counts="rows"), "drafts", 9),
    ],
)
def test_block_size_decided(changes: dict[str, Any], options: str | None, rows: int) -> None:
    """Catches a decision that is ignored, or that does not count the anchor."""
    assert parse(changes, block_size=options).fields["block_rows"] == rows


def test_block_size_contradictions() -> None:
    refused("num_speculative_tokens is 5", "7 or 8", changes={"num_speculative_tokens": 5})
    both = inner(block_size_counts="drafts") | {"num_speculative_tokens": 7}
    refused("block_size_counts", "rows", changes=both)
    refused("block_size is 8", "dflash_config.block_size is 16", changes=inner(block_size=16))
    refused("block_size_counts is 'both'", changes=inner(block_size_counts="both"))
    assert parse(inner(block_size=8)).fields["block_rows"] == 8
    assert parse(inner(block_size=16), drop="block_size").fields["block_rows"] == 16


# -- YaRN ------------------------------------------------------------------------------------------------

LEGACY = 0.1 * math.log(64) + 1


def test_the_amplitude_of_yarn_is_an_open_question() -> None:
    """Catches acceptance that depends on the version of a library: 1.4159 against 1 on the same file."""
    refused("may be 1,", "1.416", "yarn=ratio", "yarn=legacy", "attention_factor", changes={"rope_scaling": YARN})


@pytest.mark.parametrize(
    ("scaling", "option", "amplitude"),
    [
        (YARN, "ratio", 1.0),
        (YARN, "legacy", LEGACY),
        (YARN | {"type": "deepseek_yarn"}, None, 1.0),
        (YARN | {"type": "deepseek_yarn"}, "legacy", LEGACY),
        (YARN | {"attention_factor": 1.25}, None, 1.25),
        (YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "ratio", (0.07 * math.log(64) + 1) / (0.13 * math.log(64) + 1)),
        ({k: v for k, v in YARN.items() if "mscale" not in k}, None, LEGACY),
        (YARN | {"mscale_all_dim": 0.0}, None, LEGACY),
        (YARN | {"rope_type": "yarn"}, "ratio", 1.0),
    ],
)
def test_the_amplitude_decided(scaling: dict[str, Any], option: str | None, amplitude: float) -> None:
    """Catches an amplitude that ignores a decision, or asks where all loaders agree."""
    got = parse({"rope_scaling": scaling}, yarn=option).fields
    assert got["rope_amplitude"] == pytest.approx(amplitude, rel=1e-12)
    assert got["rope_factor"] == 64 and got["rope_original_max_position_embeddings"] == 4096


def test_rope_spellings() -> None:
    """Catches a loader that knows one of the two places of rope_theta."""
    new = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert parse(new, drop="rope_theta").fields["rope_theta"] == 1e6
    refused("rope_theta is missing", drop="rope_theta")
    refused("rope_theta", "but", changes=new)
    refused("both", changes={"rope_scaling": YARN, "rope_parameters": YARN})
    refused("llama3", code="unsupported", changes={"rope_scaling": {"type": "llama3"}})
    refused("beta_fast", changes={"rope_scaling": {k: v for k, v in YARN.items() if k != "beta_fast"}})
    refused("stretch", changes={"rope_scaling": YARN | {"stretch": 2}}, yarn="ratio")
    refused("partial_rotary_factor", code="unsupported",
            changes={"rope_scaling": YARN | {"partial_rotary_factor": 0.25}}, yarn="ratio")  # fmt: skip
    refused("deepseek_yarn needs", changes={"rope_scaling": YARN | {"type": "deepseek_yarn", "mscale": 0}})
    refused("yarn=ratio needs", changes={"rope_scaling": YARN | {"mscale": 0}}, yarn="ratio")


# -- windows and causality -------------------------------------------------------------------------------

SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2048}


def test_what_a_block_sees_in_sliding_layers_is_an_open_question() -> None:
    """Catches a loader that makes sliding layers causal, or one that does not, without a word."""
    refused("sliding window", "sliding=causal", "sliding=block", "is_causal", changes=SLIDING)
    for option, causal in (("causal", [0, 1]), ("block", [0, 0])):
        c = parse(SLIDING, sliding=option)
        assert c.window == [0, 2048] and c.causal == causal
    assert parse(SLIDING | {"is_causal": False}).causal == [0, 0]
    assert parse(SLIDING | {"is_causal": True}).causal == [1, 1]
    assert parse(SLIDING | inner(causal=False)).causal == [0, 0]
    assert parse(SLIDING | inner(attention_mode="causal")).causal == [1, 1]
    assert parse({"is_causal": True}).causal == [1, 1]
    refused("contradict", changes=SLIDING | {"is_causal": True} | inner(causal=False))
    refused("attention_mode", "sideways", code="unsupported", changes=inner(attention_mode="sideways"))


def test_windows() -> None:
    """Catches a window that is ignored: a drafter that slows down beyond a few thousand tokens, and differs."""
    quiet = {"is_causal": False}
    assert parse(quiet | {"sliding_window": 4096, "use_sliding_window": False}).window == [0, 0]
    late = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    assert parse(quiet | late).window == [0, 64]
    assert parse(quiet | inner(use_swa=True, swa_window_size=512)).window == [512, 512]
    assert parse(quiet | {"sliding_window": None}).window == [0, 0]
    assert parse(quiet, window=4096).window == [4096, 4096]
    assert parse(quiet | SLIDING, window=100).window == [100, 100]
    assert parse(quiet | SLIDING, window=4096).window == [4096, 2048]
    refused("sliding_window is 64", "layer_types", changes=quiet | {"sliding_window": 64})
    refused("use_sliding_window is false", changes=quiet | SLIDING | {"use_sliding_window": False})
    refused("layer_types", changes=quiet | SLIDING | {"layer_types": ["full_attention"]})
    refused("layer_types", changes=quiet | SLIDING | {"layer_types": ["full_attention", "linear_attention"]})
    refused("sliding_window is None", changes=quiet | SLIDING | {"sliding_window": None})
    refused("sliding_window is 0", changes=quiet | SLIDING | {"sliding_window": 0})
    refused("use_swa", changes=quiet | inner(use_swa=True, swa_window_size=512) | {"sliding_window": 64})


# -- taps ------------------------------------------------------------------------------------------------


def test_taps() -> None:
    """Catches layer ids shifted by one, and default layers that are not those of the published formula."""
    assert default_target_layers(61, 6) == [1, 12, 24, 35, 47, 58]
    assert default_target_layers(36, 1) == [18]
    assert parse(inner(target_layer_ids=None) | {"num_target_layers": 9}).target_layers == [1, 6]
    other = inner(target_layer_ids=None) | {
        "target_layer_ids": [2, 0], "target_num_hidden_layers": 3, "num_target_layers": 2,
    }  # fmt: skip
    c = parse(other)
    assert c.target_layers == [2, 0] and c.num_target_layers == 3
    refused("num_target_layers is 5", changes=other | {"num_target_layers": 5})
    refused("target_layer_ids is missing", changes=inner(target_layer_ids=None), drop="num_target_layers")
    refused("target_layer_ids", changes=inner(target_layer_ids=[]))
    refused("aux_hidden_state_layer_ids", changes={"aux_hidden_state_layer_ids": [2, 3]})


# -- strictness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in CONFIG if k in ROWS.__dict__ or k in {
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rms_norm_eps", "rope_theta", "block_size",
}])  # fmt: skip
def test_a_missing_number_is_named(key: str) -> None:
    """Catches a default that stands in for what the file does not say."""
    refused(key, "missing", drop=key)


@pytest.mark.parametrize(
    ("changes", "word", "code"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel", "unsupported"),
        ({"architectures": None}, "architectures", "unsupported"),
        ({"model_type": "kimi_k3"}, "kimi_k3", "unsupported"),
        ({"attention_bias": True}, "attention_bias", "unsupported"),
        ({"hidden_act": "gelu"}, "gelu", "unsupported"),
        (inner(final_logit_softcapping=20.0), "final_logit_softcapping", "unsupported"),
        (inner(output_multiplier=0.196), "output_multiplier", "unsupported"),
        (inner(input_embedding_scale=2.0), "input_embedding_scale", "unsupported"),
        (inner(sample_from_anchor=True), "sample_from_anchor", "unsupported"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size", "unsupported"),
        ({"target_hidden_size": 4096}, "target_hidden_size", "unsupported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "unsupported"),
        (inner(selector_rank=256), "selector_rank", "bad_model"),
        ({"markov_rank": 256}, "markov_rank", "bad_model"),
        ({"hidden_size": "64"}, "hidden_size is '64'", "bad_model"),
        ({"hidden_size": True}, "hidden_size is True", "bad_model"),
        ({"rms_norm_eps": None}, "rms_norm_eps", "bad_model"),
        ({"dflash_config": []}, "dflash_config", "bad_model"),
        (inner(mask_token_id="<MASK>"), "mask_token_id", "bad_model"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(changes: dict[str, Any], word: str, code: str) -> None:
    """Catches a variant of the architecture that is drafted with as if it were not there."""
    refused(word, code=code, changes=changes)


def test_options_are_checked() -> None:
    assert DraftOptions.parse({"window": "4096", "yarn": "legacy"}) == DraftOptions(window=4096, yarn="legacy")
    assert DraftOptions.parse({"width": "1"}) == DraftOptions(width=1)
    wrong = {"window": ("0", "-3", "many"), "width": ("0", "65", "one"), "block_size": ("8",), "rope": ("x",)}
    for key, value in ((key, value) for key, values in wrong.items() for value in values):
        with pytest.raises(EngineError) as caught:
            DraftOptions.parse({key: value})
        assert caught.value.code == "invalid_argument" and key in str(caught.value)
