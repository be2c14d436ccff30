"""quantization_config: two formats are read, everything else is refused by name.

The bits of a weight mean nothing without it: INT4, MXFP4 and NVFP4 are all "4 bit", symmetric and asymmetric
INT4 differ by a tensor that is easily left out.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from folders import CONFIG, FP8, INT4

from kdtree_engine import EngineError
from kdtree_engine.config import parse_config
from kdtree_engine.config_quantization import Quantization, parse_quantization


def edited(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one field replaced; ``...`` removes it."""
    made = copy.deepcopy(base)
    *outer, key = path.split("/")
    at = made
    for name in outer:
        at = at[name]
    at[key] = value
    if value is ...:
        del at[key]
    return made


def refused(value: Any) -> tuple[str, str]:
    with pytest.raises(EngineError) as caught:
        parse_quantization(value, "config.json: quantization_config")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("config.json: quantization_config")
    return caught.value.code, message


def test_the_released_ones() -> None:
    assert parse_quantization(INT4, "x").kind == "int4"
    assert parse_quantization(FP8, "x") == Quantization("fp8")
    assert parse_quantization(FP8 | {"scale_fmt": "ue8m0"}, "x") == Quantization("fp8", powers_of_two=True)  # V3.1


WEIGHTS = "config_groups/group_0/weights"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "float-quantized"),
        ("format", "nvfp4-pack-quantized"),
        ("format", "mxfp4-pack-quantized"),
        ("format", "int-quantized"),
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("transform_config", {"config_groups": {}}),
        ("config_groups/group_0/input_activations", {"num_bits": 8}),
        ("config_groups/group_0/output_activations", {"num_bits": 8}),
        ("config_groups/group_0/format", "nvfp4-pack-quantized"),
        (f"{WEIGHTS}/num_bits", 8),
        (f"{WEIGHTS}/num_bits", 3),
        (f"{WEIGHTS}/num_bits", 4.0),
        (f"{WEIGHTS}/type", "float"),
        (f"{WEIGHTS}/symmetric", False),
        (f"{WEIGHTS}/symmetric", 1),
        (f"{WEIGHTS}/strategy", "channel"),
        (f"{WEIGHTS}/strategy", "tensor_group"),
        (f"{WEIGHTS}/group_size", 128),
        (f"{WEIGHTS}/group_size", 16),
        (f"{WEIGHTS}/dynamic", True),
        (f"{WEIGHTS}/actorder", "group"),
        (f"{WEIGHTS}/actorder", "dynamic"),
        (f"{WEIGHTS}/block_structure", [128, 128]),
    ],
)
def test_another_format_or_width_is_refused_by_field(path: str, value: Any) -> None:
    code, message = refused(edited(INT4, path, value))
    assert code == "unsupported" and path.rpartition("/")[2] in message


@pytest.mark.parametrize(
    "path",
    ["format", "quantization_status", "ignore", "config_groups", "config_groups/group_0/targets",
     "config_groups/group_0/weights", "config_groups/group_0/input_activations",
     *(f"{WEIGHTS}/{k}" for k in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"))],
)  # fmt: skip
def test_a_missing_field_has_no_default(path: str) -> None:
    code, message = refused(edited(INT4, path, ...))
    assert code == "bad_model" and f"{path.rpartition('/')[2]} is missing" in message


@pytest.mark.parametrize("path", ["zero", "config_groups/group_0/zero", f"{WEIGHTS}/zero"])
def test_an_unknown_field_is_refused(path: str) -> None:
    code, message = refused(edited(INT4, path, 1))
    assert code == "bad_model" and "unknown field zero" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight_block_size", [64, 64]), ("weight_block_size", None), ("fmt", "e5m2"), ("activation_scheme", "static"),
     ("scale_fmt", "ue4m3"), ("expert_dtype", "fp4"), ("modules_to_convert", ["embed"]), ("more", 1)],
)  # fmt: skip
def test_another_fp8_is_refused_by_field(field: str, value: Any) -> None:
    _, message = refused(FP8 | {field: value})
    assert field in message


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "modelopt", "mxfp4", "quark", None, 4])
def test_other_methods_are_refused_by_name(method: Any) -> None:
    code, message = refused({"quant_method": method, "bits": 4, "group_size": 32})
    assert code == "unsupported" and repr(method) in message


@pytest.mark.parametrize("value", ["fp8", 3, [], True])
def test_no_object(value: Any) -> None:
    assert refused(value)[0] == "bad_model"


@pytest.mark.parametrize("path", ["config_groups", "config_groups/group_0", WEIGHTS])
def test_no_object_inside(path: str) -> None:
    assert refused(edited(INT4, path, [1]))[0] == "bad_model"
    if path == "config_groups":
        assert "at least one group" in refused(edited(INT4, path, {}))[1]


def test_what_the_config_says_about_a_module() -> None:
    """The rules of compressed-tensors: a plain string is the whole name or the class, "re:" anchors at the
    start only. The head's plain name is meant also where a wrapper's prefix stands before it."""
    said = parse_quantization(INT4, "x")
    base = "language_model.model.layers.3"
    for part in ("gate", "up", "down"):
        assert said.names(f"{base}.mlp.experts.7.{part}_proj")
        assert not said.names(f"{base}.mlp.{part}_proj")
        assert not said.names(f"{base}.mlp.shared_experts.{part}_proj")
    assert not said.names(f"{base}.self_attn.o_proj")
    assert said.names("language_model.lm_head") and not said.names("language_model.lm_head", "lm_head")
    some = parse_quantization(edited(INT4, "config_groups/group_0/targets", ["re:.*experts.*up_proj", "lm_head"]), "x")
    assert some.names("a.experts.0.up_proj_more") and not some.names("a.experts.0.down_proj")
    assert not some.names("lm_head"), "what is ignored is ignored, also where a target names it"
    assert not parse_quantization(FP8, "x").names("a.experts.0.up_proj")


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(.*)*x", "re:.*.*.*.*x", "re:(a)\\1", "re:" + "a" * 300, "re:(?=a)"]
)
def test_a_pattern_that_could_take_for_ever_is_refused(pattern: str) -> None:
    """Patterns come from the file and meet 70,000 names."""
    code, message = refused(edited(INT4, "ignore", [pattern]))
    assert code == "unsupported" and "ignore" in message


def test_a_pattern_that_is_none() -> None:
    code, message = refused(edited(INT4, "ignore", ["re:(a"]))
    assert code == "bad_model" and "'re:(a'" in message
    assert refused(edited(INT4, "ignore", "lm_head"))[0] == "bad_model"
    assert refused(edited(INT4, "ignore", [1]))[0] == "bad_model"
    assert parse_quantization(edited(INT4, "ignore", None), "x").ignore == ()


def test_it_is_read_from_the_config() -> None:
    assert parse_config(CONFIG | {"quantization_config": None}).quantization is None
    found = parse_config(CONFIG | {"quantization_config": INT4}).quantization
    assert found is not None and found.kind == "int4"
    with pytest.raises(EngineError, match="quantization_config"):
        parse_config(CONFIG | {"quantization_config": {"quant_method": "gptq"}})
