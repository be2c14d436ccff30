"""kdtree convert: sources other than a plain folder. fp8 with block scales, fused experts, a multimodal model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_safetensors
import tiny_models
from raw_safetensors import Stored, bf16

from kdtree_engine import Engine, EngineError, kdtr
from kdtree_engine.convert import convert
from kdtree_engine.quantize import bf16_bits, from_bf16_bits, quantize

EXPERTS, LAYERS = tiny_models.CONFIG["n_routed_experts"], (1, 2)


def changed(**fields: Any) -> dict[str, Any]:
    return {**tiny_models.CONFIG, **fields}


def fp8(array: np.ndarray, rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
    """Random codes and block scales for a matrix of this shape."""
    codes = rng.integers(0, 256, array.shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    scales = rng.uniform(1e-4, 1e-3, [-(-n // 128) for n in array.shape]).astype(np.float32)
    return ("F8_E4M3", codes), scales


def test_fp8(tmp_path: Path) -> None:
    """Catches codes that are read as other numbers, and scales of other blocks; matrices are larger than a
    block and no multiple of it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    config = changed(
        hidden_size=160,
        moe_intermediate_size=160,
        intermediate_size=200,
        n_routed_experts=4,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    )
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    rng = np.random.default_rng(3)
    stored: dict[str, Any] = {}
    values: dict[str, np.ndarray] = {}
    for name, array in tiny_models.weights(plain).items():
        if "_proj" in name and "kv_a" not in name:
            stored[name], stored[f"{name}_scale_inv"] = fp8(array, rng)
            codes = stored[name][1].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            blocks = np.kron(stored[f"{name}_scale_inv"], np.ones((128, 128), np.float32))
            values[name] = codes * blocks[: array.shape[0], : array.shape[1]]
        else:
            stored[name], values[name] = bf16(array), from_bf16_bits(bf16(array)[1])
    folder = tmp_path / "fp8"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    raw_safetensors.write(folder / "model.safetensors", stored)
    for to in ("int4", "bf16", "f32"):
        convert(folder, tmp_path / to, to=to)  # type: ignore[arg-type]
        made = raw_safetensors.read(tmp_path / to)
        for name, value in values.items():
            if to == "f32":
                assert made[name][0] == "F32" and np.array_equal(made[name][1], value), name
            elif to == "int4" and ".experts." in name:
                packed = quantize(value)
                module = name.removesuffix(".weight")
                assert np.array_equal(made[f"{module}.weight_packed"][1], packed.words)
                assert np.array_equal(made[f"{module}.weight_scale"][1], packed.scales)
            elif not (name.endswith("bias") and to == "bf16"):
                assert made[name][0] == "BF16" and np.array_equal(made[name][1], bf16_bits(value)), name
        Engine.load(tmp_path / to)
    convert(folder, tmp_path / "same", to="same", shard_bytes=100_000)
    same = raw_safetensors.read(tmp_path / "same")
    assert set(same) == set(stored) and all(np.array_equal(same[n][1], _array(v)) for n, v in stored.items())
    with pytest.raises(EngineError, match=r"is fp8, which a \.kdtr bundle cannot hold"):
        convert(folder, tmp_path / "x.kdtr", to="same")


def _array(value: np.ndarray | Stored) -> np.ndarray:
    return value[1] if isinstance(value, tuple) else value


def test_fused_experts(tmp_path: Path) -> None:
    """Catches gate and up that change places, and experts that are quantised as one matrix."""
    tensors = tiny_models.weights()
    one = tiny_models.write_folder(tmp_path / "one", tensors=tensors, tokenizer=False)
    fused = {name: array for name, array in tensors.items() if ".mlp.experts." not in name}
    for layer in LAYERS:
        base = f"model.layers.{layer}.mlp.experts"

        def stack(part: str, base: str = base) -> np.ndarray:
            return np.stack([tensors[f"{base}.{e}.{part}_proj.weight"] for e in range(EXPERTS)])

        fused[f"{base}.gate_up_proj"] = np.concatenate([stack("gate"), stack("up")], axis=1)
        fused[f"{base}.down_proj"] = stack("down")
    many = tiny_models.write_folder(tmp_path / "fused", tensors=fused, tokenizer=False)
    for source in (one, many):
        convert(source, tmp_path / f"{source.name}-int4")
    made = [raw_safetensors.read(tmp_path / f"{name}-int4") for name in ("one", "fused")]
    assert set(made[0]) == set(made[1])
    assert all(np.array_equal(made[0][name][1], made[1][name][1]) for name in made[0])


def kimi_k25(tmp_path: Path) -> Path:
    """A multimodal folder: the text model under a prefix, a vision tower beside it, a layer past the last, and a
    stale buffer."""
    text = changed(model_type="kimi_k2")
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"patch_size": 14},
        "media_placeholder_token_id": 5,
        "eos_token_id": tiny_models.EOS,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    stored: dict[str, Any] = {
        f"language_model.{name}": array if name.endswith("bias") else bf16(array)
        for name, array in tiny_models.weights().items()
    }
    rng = np.random.default_rng(1)
    stored["vision_tower.patch_embed.proj.weight"] = bf16(rng.normal(size=(6, 3, 14, 14)))
    stored["vision_tower.encoder.blocks.0.wqkv.weight"] = bf16(rng.normal(size=(12, 43)))
    stored["mm_projector.proj.0.bias"] = bf16(rng.normal(size=(9,)))
    stored["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = bf16(rng.normal(size=(56,)))
    folder = tmp_path / "k25"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    raw_safetensors.write(folder / "model.safetensors", stored)
    return folder


def test_a_multimodal_folder(tmp_path: Path) -> None:
    """Catches a prefix that hides the experts, other parts that are lost, and a config that speaks of the whole
    only: other programs read the inner one, or the outer one."""
    folder = kimi_k25(tmp_path)
    convert(folder, tmp_path / "int4")
    before, after = raw_safetensors.read(folder), raw_safetensors.read(tmp_path / "int4")
    beside = [name for name in before if ".experts." not in name]
    assert all(after[n][0] == before[n][0] and np.array_equal(after[n][1], before[n][1]) for n in beside)
    experts = [name for name in after if ".experts." in name]
    parts = 3 * 3  # words, scales and shape of gate, up and down
    assert len(experts) == parts * EXPERTS * len(LAYERS) and all(n.startswith("language_model.") for n in experts)
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    assert config["quantization_config"] == config["text_config"]["quantization_config"]
    assert {"re:.*vision_tower.*", "re:.*mm_projector.*"} <= set(config["quantization_config"]["ignore"])
    convert(tmp_path / "int4", tmp_path / "k25.kdtr", to="same")
    made = kdtr.read(tmp_path / "k25.kdtr")
    assert not any(name.startswith(("language_model", "vision", "mm_")) or "inv_freq" in name for name in made)
    one, two = (
        Engine.load(model).session(32).score([80, 7, 9]).tobytes()
        for model in (tmp_path / "int4", tmp_path / "k25.kdtr")
    )
    assert one == two
