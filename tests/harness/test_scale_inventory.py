"""The inventory against published checkpoints, and reading of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.scale import inventory, shapes
from harness.scale.shapes import GLM_47_FLASH, K26, MOONLIGHT, V2_LITE, V3
from harness.scale.values import ScaleError

GIB = 2**30


def test_k2_is_the_published_checkpoint() -> None:
    """Catches any tensor counted twice, left out or of the wrong type: the released K2.5, whose layout K2.6 has, holds
    208,550 tensors of 554.27 GiB."""
    total = inventory.total_bytes(K26, vision=True)
    assert sum(part.tensors for part in inventory.components(K26)) == 208_550
    assert total / GIB == pytest.approx(554.27, abs=0.005)
    assert abs(total / GIB - 554.27) < 0.001 * 554.27  # what was asked for
    assert sum(p.tensors for p in inventory.components(K26) if p.name.startswith("routed")) == 207_360


@pytest.mark.parametrize(
    ("names", "billions", "gigabytes"),
    [
        (["routed experts, packed nibbles"], 1014.7, 507.34),
        (["routed experts, scales"], 0.0, 63.42),
        ([inventory.ATTENTION_SMALL, inventory.ATTENTION], 6.17, 12.34),
        (["shared experts"], 2.64, 5.28),
        (["dense layers"], 0.40, 0.79),
        (["router"], 0.165, 0.33),
        (["embedding"], 1.17, 2.35),
        (["lm_head"], 1.17, 2.35),
        (["vision and projector"], 0.47, 0.94),
    ],
)
def test_k2_by_component(names: list[str], billions: float, gigabytes: float) -> None:
    """Catches an error in one component that another hides in the total. Published per-component table; shared experts
    are 5.285 GB, which it rounds up."""
    parts = [part for part in inventory.components(K26) if part.name in names]
    assert len(parts) == len(names)
    rounding = 0.05 if billions > 100 else 0.005
    assert sum(part.parameters for part in parts) / 1e9 == pytest.approx(billions, abs=rounding)
    assert sum(part.bytes for part in parts) / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_k2_figures_that_stand_in_prose() -> None:
    """Catches a component in the wrong class (read every step, by expert, not at all)."""
    assert inventory.total_bytes(K26) / 1e9 == pytest.approx(594.2, abs=0.05)
    assert inventory.total_bytes(K26) / GIB == pytest.approx(553.4, abs=0.05)
    assert inventory.total_parameters(K26) / 1e9 == pytest.approx(1026.4, abs=0.05)
    assert inventory.active_parameters(K26) / 1e9 == pytest.approx(31.7, abs=0.05)
    assert inventory.expert_bytes(K26) / 1e6 == pytest.approx(24.77, abs=0.005)
    assert inventory.non_expert_bytes(K26) / 1e9 == pytest.approx(21.09, abs=0.005)
    assert inventory.non_expert_bytes(K26, eight_bit=True) / 1e9 == pytest.approx(10.71, abs=0.005)
    # one attention layer
    attention = (inventory.ATTENTION, inventory.ATTENTION_SMALL)
    parts = [part for part in inventory.components(K26) if part.name in attention]
    assert sum(part.parameters for part in parts) / 61 / 1e6 == pytest.approx(101.1, abs=0.05)
    # with the two latent norms of each layer, 1.0 M where the layer norms alone are 0.9 M
    norms = next(part for part in inventory.components(K26) if part.name == "norms")
    assert norms.parameters == 61 * (2 * 7168 + 1536 + 512) + 7168


@pytest.mark.parametrize(
    ("shape", "billions", "active", "bf16", "int4", "cache"),
    [
        (V2_LITE, 15.7, 2.45, 31.4, 10.7, 31_104),
        (MOONLIGHT, 16.0, 2.58, 31.9, 11.2, 31_104),
        (GLM_47_FLASH, 29.9, 3.6, 59.9, 19.9, 54_144),
        (V3, 671.0, 36.6, 1342.0, 402.0, 70_272),
        (K26, 1026.4, 31.7, 2052.8, 594.2, 70_272),
    ],
    ids=lambda value: value.name if isinstance(value, shapes.Shape) else "",
)
def test_published_models(
    shape: shapes.Shape, billions: float, active: float, bf16: float, int4: float, cache: int
) -> None:
    """Catches a wrong number in a built-in shape, and the query path without q_lora."""
    assert inventory.total_parameters(shape) / 1e9 == pytest.approx(billions, abs=0.055)
    assert inventory.active_parameters(shape) / 1e9 == pytest.approx(active, abs=0.055)
    assert inventory.total_bytes(shape.with_experts("bf16")) / 1e9 == pytest.approx(bf16, abs=0.06)
    assert inventory.total_bytes(shape.with_experts("int4")) / 1e9 == pytest.approx(int4, abs=0.06)
    assert inventory.cache_bytes(shape) == cache


def test_cache_formats() -> None:
    """Catches a format that forgets the rope part or the scales."""
    assert inventory.cache_bytes(K26, "fp8") == 35_136
    assert inventory.cache_bytes(K26, "fp8-bf16-rope") == 39_040
    assert inventory.cache_bytes(K26, "fp8-656") == 40_016 == 61 * 656
    assert inventory.uncompressed_cache_bytes(K26) == 2_498_560
    assert inventory.uncompressed_cache_bytes(K26) / inventory.cache_bytes(K26) == pytest.approx(35.6, abs=0.05)
    assert inventory.cache_bytes(K26) * 262_144 / 1e9 == pytest.approx(18.4, abs=0.05)
    with pytest.raises(ScaleError, match="int3"):
        inventory.cache_bytes(K26, "int3")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------
# config.json

INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group"}
K2_CONFIG: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "rope_theta": 50000,
}


def quantised(weights: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("level", ["outer", "inner"])
def test_config_of_k25_is_the_built_in_shape(tmp_path: Path, level: str) -> None:
    """Catches numbers read from the wrong level; quantization_config stands at either."""
    inner = dict(K2_CONFIG)
    outer: dict[str, Any] = {"model_type": "kimi_k25", "text_config": inner, "hidden_size": 1}
    (outer if level == "outer" else inner)["quantization_config"] = quantised(INT4)
    write(tmp_path, outer)
    shape = shapes.load(tmp_path)
    assert shape == replace(K26, name=tmp_path.name, vision=None)
    assert shapes.resolve(str(tmp_path / "config.json")) == shape


def test_config_without_quantisation_counts_bf16(tmp_path: Path) -> None:
    """Catches a default of INT4 for a model that is not; null q_lora and shared experts are no such parts."""
    config = K2_CONFIG | {"q_lora_rank": None, "n_shared_experts": None, "topk_method": "greedy"}
    shape = shapes.load(write(tmp_path, config))
    assert (shape.experts_stored, shape.q_lora, shape.shared, shape.bias) == ("bf16", 0, 0, False)
    names = {part.name for part in inventory.components(shape)}
    assert not names & {"shared experts", "router bias", "routed experts, scales", "vision and projector"}


def test_layer_kinds_listed_one_by_one(tmp_path: Path) -> None:
    """Catches GLM's spelling of the dense layers being ignored."""
    config = {k: v for k, v in K2_CONFIG.items() if k != "first_k_dense_replace"}
    shape = shapes.load(write(tmp_path, config | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 59}))
    assert (shape.dense_layers, shape.moe_layers) == (2, 59)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("v_head_dim"), "v_head_dim is None"),
        (lambda c: c.update(hidden_size=True), "hidden_size is True"),
        (lambda c: c.update(hidden_size=-1), "hidden_size is -1"),
        (lambda c: c.update(hidden_size=7168.0), "hidden_size is 7168.0"),
        (lambda c: c.update(vocab_size=0), "vocab_size is 0"),
        (lambda c: c.update(num_experts_per_tok=385), "num_experts_per_tok 385"),
        (lambda c: c.update(first_k_dense_replace=62), "first_k_dense_replace 62"),
        (lambda c: c.update(mlp_layer_types=["dense"]), "mlp_layer_types has 1"),
        (lambda c: c.update(text_config=[]), "text_config is list"),
        (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "'fp8'"),
        (lambda c: c.update(quantization_config=quantised(INT4 | {"group_size": 128})), "groups of 32"),
        (lambda c: c.update(quantization_config=quantised(INT4 | {"type": "float"})), "groups of 32"),
        (lambda c: c.update(quantization_config="int4"), "'int4'"),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], named: str) -> None:
    """Catches a wrong number that would go on as a wrong table: every refusal names the file and the field."""
    config = dict(K2_CONFIG)
    change(config)
    path = write(tmp_path, config)
    with pytest.raises(ScaleError) as refused:
        shapes.load(path)
    assert named in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_files_that_are_no_config(tmp_path: Path, content: bytes) -> None:
    """Catches a traceback instead of a sentence."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ScaleError, match=r"config\.json"):
        shapes.load(path)
    with pytest.raises(ScaleError, match="no model"):
        shapes.resolve(str(tmp_path / "nothing"))
