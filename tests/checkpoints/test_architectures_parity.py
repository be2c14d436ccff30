"""Every architecture against transformers on the CPU in float32: logits at every position of a real text that
goes past the original context, and what is cached.

Bound: 1e-5 x max(1, largest |value|). Checkpoints are written by transformers itself, by compressed-tensors
(INT4), or from their tensors in the layout of the published files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine import Engine, EngineError

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
import reference_models as models  # noqa: E402  # needs torch

TOKENS = models.TOKENS
assert len(TOKENS) >= 256 and len(TOKENS) > models.YARN["original_max_position_embeddings"]
ROPE = models.V3["qk_rope_head_dim"]
HALVES = [*range(0, ROPE, 2), *range(1, ROPE, 2)]  # transformers' V3 writes rotated pairs as two halves


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    bound = 1e-5 * max(1.0, float(np.abs(theirs).max()))
    return float(np.abs(ours.astype(np.float64) - theirs).max()) <= bound


def compare(folder: Path, model: Any, halves: bool = True, **options: Any) -> None:
    expected, cached = models.reference(model)
    session = Engine.load(folder, device="cpu", **options).session()
    logits = session.score(TOKENS)
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    difference = np.abs(logits.astype(np.float64) - expected).max(-1)
    worst = int(difference.argmax())
    assert difference[worst] <= bound, f"{difference[worst]:g} at position {worst}; at most {bound:g}"
    for layer, (latent, rope) in enumerate(cached):
        ours = session.native.cache(layer)
        assert close(ours[:, : latent.shape[1]], latent)
        rotated = ours[:, latent.shape[1] :]
        assert close(rotated[:, HALVES] if halves else rotated, rope)


# -- kimi_k2, kimi_k25 -----------------------------------------------------------------------------------------


def test_kimi_k2_as_published(tmp_path: Path) -> None:
    models.text_model("v3").to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    tensors, config = models.published(tmp_path / "saved")
    folder = models.write(tmp_path / "k2", tensors, models.kimi_k2_config(config))
    compare(folder, models.load_reference(tmp_path / "saved"))


def test_kimi_k25_as_published(tmp_path: Path) -> None:
    """The text part alone gives the logits of the whole model."""
    models.text_model("v3", seed=1).to(torch.bfloat16).save_pretrained(tmp_path / "text")
    text, model = models.load_reference(tmp_path / "text").float(), models.kimi_k25()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    tensors, config = models.published(tmp_path / "text")
    outer = models.kimi_k25_config(models.kimi_k2_config(config))
    compare(models.write(tmp_path / "k25", models.wrapped(tensors), outer), model)


@pytest.mark.parametrize("original_format", [False, True])
def test_kimi_k25_as_transformers_5_saves_it(tmp_path: Path, original_format: bool) -> None:
    """In what it takes for the original format, it calls the text model's layers blocks, as the vision tower's."""
    model = models.kimi_k25(seed=2)
    model.save_pretrained(tmp_path, save_original_format=original_format)
    compare(tmp_path, model)
    engine = Engine.load(tmp_path, device="cpu")
    with pytest.raises(EngineError, match=f"{models.PLACEHOLDER} stands for an image"):
        engine.session().append(tokens=[5, models.PLACEHOLDER])


# -- the relatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 32, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 16.0, "num_experts_per_tok": 2},
        {"rope_scaling": {"type": "default"}, "n_group": None, "topk_group": None},
        {"rope_scaling": models.YARN},
    ],
    ids=["V2-Lite", "V2", "no YaRN", "two mscales"],
)  # fmt: skip
def test_deepseek_v2(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Its cache keeps rotated pairs where they were stored, as this engine does."""
    model = models.text_model("v2", **changes)
    model.save_pretrained(tmp_path)
    compare(tmp_path, model, halves=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": {**models.YARN, "rope_type": "yarn", "rope_theta": 1e6}, "n_group": 2},
        {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": False},
        {"mlp_layer_types": ["dense", "dense", "sparse"], "v_head_dim": 8, "rope_interleave": False},
    ],
    ids=["GLM-4.7-Flash", "YaRN and groups", "no dense layer", "two dense layers, NeoX RoPE"],
)
def test_glm4_moe_lite(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = models.text_model("glm", **changes)
    model.save_pretrained(tmp_path)
    compare(tmp_path, model, halves=changes.get("rope_interleave", True))


# -- INT4 ------------------------------------------------------------------------------------------------------


RELATIVES = [
    pytest.param("v2", {}, id="V2-Lite"),
    pytest.param("glm", {"rope_parameters": {**models.YARN, "rope_type": "yarn", "rope_theta": 1e6}}, id="GLM, YaRN"),
    pytest.param("glm", {}, id="GLM-4.7-Flash"),
    pytest.param("v3", {"q_lora_rank": None, "rope_scaling": None}, id="Moonlight"),
]


def int4_folder(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A folder with experts packed by compressed-tensors; its tensors; its config without quantisation."""
    models.text_model("v3", seed=3).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    tensors, config = models.published(tmp_path / "saved")
    packed = models.packed_experts(tensors)
    quantized = config | {"quantization_config": models.int4_scheme()[2]}
    return models.write(tmp_path / "int4", packed, quantized), packed, config


def test_int4_rounded_to_bf16_is_what_transformers_computes(tmp_path: Path) -> None:
    folder, _, _ = int4_folder(tmp_path)
    options = transformers.CompressedTensorsConfig(dequantize=True)
    compare(folder, models.load_reference(folder, quantization_config=options), rounding="bf16")


def test_int4_exact_is_the_model_of_the_exact_products(tmp_path: Path) -> None:
    folder, packed, config = int4_folder(tmp_path)
    plain = models.write(tmp_path / "plain", models.unpacked_experts(packed, exact=True), config)
    compare(folder, models.load_reference(plain))


def test_int4_the_two_rules_differ_by_more_than_the_bound(tmp_path: Path) -> None:
    """If they did not, the two tests above could not tell one from the other."""
    folder, _, _ = int4_folder(tmp_path)
    exact, rounded = (
        Engine.load(folder, device="cpu", rounding=rule).session().score(TOKENS)  # type: ignore[arg-type]
        for rule in ("exact", "bf16")
    )
    assert not close(exact, rounded)


def test_int4_kimi_k25_as_published(tmp_path: Path) -> None:
    """Prefix, vision tensors, nested quantization_config, 32-bit weight_shape."""
    _, packed, config = int4_folder(tmp_path)
    for name in packed:
        if name.endswith("weight_shape"):
            packed[name] = packed[name].to(torch.int32)
    text = models.kimi_k2_config(config) | {"quantization_config": models.int4_scheme()[2]}
    folder = models.write(tmp_path / "k25", models.wrapped(packed), models.kimi_k25_config(text))
    plain = models.write(tmp_path / "plain", models.unpacked_experts(packed, exact=True), config)
    compare(folder, models.load_reference(plain))


@pytest.mark.parametrize("rule", ["exact", "bf16"])
@pytest.mark.parametrize(("kind", "changes"), RELATIVES)
def test_int4_of_the_relatives(tmp_path: Path, kind: str, changes: dict[str, Any], rule: Any) -> None:
    """As generic quantisers make them from V2-Lite, GLM-4.7-Flash and Moonlight. Under `bf16` the reference has the
    products as compressed-tensors rounds them, under `exact` those in float32."""
    models.text_model(kind, seed=5, **changes).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    tensors, config = models.published(tmp_path / "saved")
    packed = models.packed_experts(tensors)
    assert sum(name.endswith("weight_packed") for name in packed) == 2 * 8 * 3
    quantized = config | {"quantization_config": models.int4_scheme()[2]}
    folder = models.write(tmp_path / "int4", packed, quantized)
    plain = models.write(tmp_path / "plain", models.unpacked_experts(packed, exact=rule == "exact"), config)
    compare(folder, models.load_reference(plain), halves=kind != "v2", rounding=rule)


# -- fp8 -------------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 2,
    "n_routed_experts": 4,
}  # fmt: skip
"""Whole blocks of 128 throughout: transformers takes the block size from the number of scales."""


def fp8_folder(tmp_path: Path, shape: dict[str, Any], **how: bool) -> tuple[Path, Path]:
    """A folder in fp8, and one with the float32 products."""
    models.text_model("v3", seed=4, **shape).to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    tensors, config = models.published(tmp_path / "saved")
    codes = models.fp8_matrices(tensors, **how)
    folder = models.write(tmp_path / "fp8", codes, config | {"quantization_config": models.FP8})
    return folder, models.write(tmp_path / "plain", models.plain_fp8(codes), config)


def test_fp8_is_what_transformers_computes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder, _ = fp8_folder(tmp_path, WIDE)
    options = transformers.FineGrainedFP8Config(dequantize=True)
    expected, _ = models.reference(models.load_reference(folder, quantization_config=options))
    assert close(Engine.load(folder, device="cpu").session().score(TOKENS), expected)


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_fp8_with_blocks_that_are_cut_off(tmp_path: Path, powers_of_two: bool) -> None:
    """Kimi's kv_a_proj has 576 rows: four blocks and a half."""
    ragged = {"hidden_size": 160, "moe_intermediate_size": 136, "kv_lora_rank": 132, "q_lora_rank": 40}
    folder, plain = fp8_folder(tmp_path, ragged, powers_of_two=powers_of_two)
    compare(folder, models.load_reference(plain))


def test_fp8_rounded_to_bf16(tmp_path: Path) -> None:
    folder, plain = fp8_folder(tmp_path, WIDE)
    tensors, config = models.published(plain)
    halves = {name: t.to(torch.bfloat16) if "_proj" in name else t for name, t in tensors.items()}
    rounded = models.load_reference(models.write(tmp_path / "rounded", halves, config))
    expected, _ = models.reference(rounded)
    assert close(Engine.load(folder, device="cpu", rounding="bf16").session().score(TOKENS), expected)
    assert not close(Engine.load(folder, device="cpu").session().score(TOKENS), expected)
