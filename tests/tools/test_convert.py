"""kdtree convert: what is written, and that it is the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_models
import numpy as np
import pytest
import raw_safetensors
import tiny_models

from kdtree_engine import Engine, kdtr
from kdtree_engine.convert import convert
from kdtree_engine.quantize import SCALE_RULES, ScaleRule, bf16_bits, dequantize, from_bf16_bits, quantize

CONFIG = chat_models.CONFIG
EXPERTS, LAYERS = CONFIG["n_routed_experts"], (1, 2)
PROMPT = [5, 80, 300, 7, 7, 9, 411]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 folder with everything that a released one has beside its weights."""
    folder = chat_models.write_folder(tmp_path_factory.mktemp("convert") / "source")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    (folder / "README.md").write_text("about")
    (folder / "pytorch_model.bin").write_bytes(b"not a companion")
    (folder / ".gitattributes").write_text("not a companion")
    (folder / "figures").mkdir()
    return folder


@pytest.fixture(scope="module")
def int4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("convert") / "int4"
    convert(source, target, to="int4", shard_bytes=50_000)
    return target


def logits(model: Path, **load: Any) -> bytes:
    return Engine.load(model, **load).session(64).score(PROMPT).tobytes()


def expert_modules() -> list[str]:
    return [
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj"
        for layer in LAYERS
        for e in range(EXPERTS)
        for part in ("gate", "up", "down")
    ]


def changed(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**config, **fields}


# -- the INT4 folder -----------------------------------------------------------------------------------------------


def test_layout_of_the_released_checkpoints(source: Path, int4: Path) -> None:
    """Catches names, shapes, dtypes or groups that are not those of the released INT4 checkpoints, and a tensor
    that is no routed expert and changed all the same."""
    before, after = raw_safetensors.read(source), raw_safetensors.read(int4)
    for module in expert_modules():
        out, width = before.pop(f"{module}.weight")[1].shape
        expected = {"weight_packed": ("I32", (out, width // 8)), "weight_scale": ("BF16", (out, width // 32))}
        for kind, (dtype, shape) in expected.items():
            stored, array = after.pop(f"{module}.{kind}")
            assert (stored, array.shape) == (dtype, shape)
        dtype, sizes = after.pop(f"{module}.weight_shape")
        assert dtype == "I32" and sizes.tolist() == [out, width]
    assert set(after) == set(before)
    for name, (dtype, array) in before.items():
        assert after[name][0] == dtype and np.array_equal(after[name][1], array), name


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_words_and_scales(source: Path, tmp_path: Path, rule: ScaleRule) -> None:
    """Catches a rule that is not the one asked for, rows that land elsewhere, and an error that is reported of
    something else."""
    report = convert(source, tmp_path / "out", scales=rule)
    before, after = raw_safetensors.read(source), raw_safetensors.read(tmp_path / "out")
    error = power = 0.0
    for module in expert_modules():
        made = quantize(before[f"{module}.weight"][1], rule)
        assert np.array_equal(after[f"{module}.weight_packed"][1], made.words)
        assert np.array_equal(after[f"{module}.weight_scale"][1], made.scales)
        error, power = error + made.error, power + made.power
    assert report.quantised == len(expert_modules())
    assert report.relative_error == pytest.approx((error / power) ** 0.5, rel=1e-9)


def test_config_and_companions(source: Path, int4: Path) -> None:
    """Catches a config that does not say what the tensors are, and a tokenizer that stays behind."""
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, int4))
    said = after.pop("quantization_config")
    assert after == before
    assert said["quant_method"] == "compressed-tensors" and said["format"] == "pack-quantized"
    weights = said["config_groups"]["group_0"]["weights"]
    fields = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    assert fields.items() <= weights.items()
    assert said["ignore"] == [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ]
    copied = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "README.md")
    for name in copied:
        assert (int4 / name).read_bytes() == (source / name).read_bytes()
    left = ("pytorch_model.bin", ".gitattributes", "figures", "conversion.json", "model.safetensors")
    assert not any((int4 / name).exists() for name in left)


def test_index_and_shards(int4: Path) -> None:
    """Catches an index that is stale from the start, shards past the size, data that is not aligned, and the
    metadata without which other programs refuse a file."""
    index = json.loads((int4 / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in int4.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    tensors = raw_safetensors.read(int4)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(array.nbytes for _, array in tensors.values())
    for name in files:
        raw = (int4 / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert (8 + length) % 8 == 0
        assert len(header) == 1 or len(raw) - 8 - length <= 50_000
        for entry in header.values():
            assert entry["data_offsets"][0] % {"F32": 4, "I32": 4, "BF16": 2}[entry["dtype"]] == 0


def test_the_library_reads_it(int4: Path) -> None:
    """Catches a file that only our own reader understands."""
    from safetensors import safe_open

    for path in int4.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118  # no mapping
                if not name.endswith("weight_scale"):
                    file.get_tensor(name)


def test_it_is_the_model_with_other_experts(source: Path, int4: Path, tmp_path: Path) -> None:
    """Catches an INT4 model that computes something else than its own weights in floating point: the same bits
    from INT4, from float32 experts, and from a bundle of either."""
    tensors = {name: array for name, (_, array) in raw_safetensors.read(source).items()}
    stored = raw_safetensors.read(int4)
    for module in expert_modules():
        words, scales = (stored[f"{module}.{kind}"][1] for kind in ("weight_packed", "weight_scale"))
        tensors[f"{module}.weight"] = dequantize(words, scales)
    wanted = logits(tiny_models.write_folder(tmp_path / "by-hand", CONFIG, tensors, tokenizer=False))
    assert wanted != logits(source)
    convert(int4, tmp_path / "f32", to="f32")
    convert(int4, tmp_path / "int4.kdtr", to="same")
    convert(int4, tmp_path / "f32.kdtr", to="f32")
    convert(tmp_path / "int4.kdtr", tmp_path / "from-bundle", to="same")
    for model in (int4, *(tmp_path / name for name in ("f32", "int4.kdtr", "f32.kdtr", "from-bundle"))):
        assert logits(model) == wanted, model
    assert "quantization_config" not in json.loads((tmp_path / "f32" / "config.json").read_text())


# -- other targets -------------------------------------------------------------------------------------------------


def test_bf16_rounds_once(int4: Path, tmp_path: Path) -> None:
    """Catches a second rounding, a router's bias that loses precision, and a config that names the old type."""
    convert(int4, tmp_path / "bf16", to="bf16")
    before, after = raw_safetensors.read(int4), raw_safetensors.read(tmp_path / "bf16")
    for module in expert_modules():
        value = dequantize(*(before[f"{module}.{kind}"][1] for kind in ("weight_packed", "weight_scale")))
        assert after[f"{module}.weight"][0] == "BF16"
        assert np.array_equal(after[f"{module}.weight"][1], bf16_bits(value))
    for name, (dtype, array) in after.items():
        if name.endswith("e_score_correction_bias"):
            assert dtype == "F32" and np.array_equal(array, before[name][1])
        elif name in before:
            assert dtype == "BF16" and np.array_equal(array, bf16_bits(before[name][1]))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert(tmp_path / "bf16", tmp_path / "wide", to="f32")
    wide = raw_safetensors.read(tmp_path / "wide")
    for name, (dtype, array) in after.items():
        assert wide[name][0] == "F32"
        assert np.array_equal(wide[name][1], array if dtype == "F32" else from_bf16_bits(array))


def test_rest_in_bf16(source: Path, tmp_path: Path) -> None:
    """Catches experts that are quantised from weights rounded before, and a rest that stays wide."""
    convert(source, tmp_path / "small", rest="bf16")
    before, after = raw_safetensors.read(source), raw_safetensors.read(tmp_path / "small")
    for module in expert_modules():
        assert np.array_equal(after[f"{module}.weight_packed"][1], quantize(before[f"{module}.weight"][1]).words)
    rest = {name: dtype for name, (dtype, _) in after.items() if ".experts." not in name}
    assert {dtype for name, dtype in rest.items() if not name.endswith("bias")} == {"BF16"}
    assert {dtype for name, dtype in rest.items() if name.endswith("bias")} == {"F32"}
    Engine.load(tmp_path / "small")


def test_a_bundle_is_what_the_writer_writes(int4: Path, tmp_path: Path) -> None:
    """Catches offsets, checksums or an order that differ from those of the writer that holds everything in
    memory: the same tensors give the same bytes."""
    for parts in (1 << 30, 40_000):
        target = tmp_path / f"{parts}.kdtr"
        convert(int4, target, to="same", shard_bytes=parts)
        assert kdtr.check(target) == "ok"
        kdtr.write(tmp_path / "again.kdtr", kdtr.read(target))
        assert target.read_bytes() == (tmp_path / "again.kdtr").read_bytes()
    stored = raw_safetensors.read(int4)
    module = expert_modules()[4]
    made = kdtr.read(target)
    assert np.array_equal(made[f"{module}.qw"], stored[f"{module}.weight_packed"][1])
    assert np.array_equal(kdtr.bf16_bits(made[f"{module}.sc"]), stored[f"{module}.weight_scale"][1])
    assert not any(name.endswith("weight_shape") for name in made)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            }
        },
        {"q_lora_rank": None, "n_group": 4, "topk_group": 2, "rope_interleave": False},
        {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    ],
    ids=["plain", "yarn", "no q_lora, groups, halves", "deepseek_v2"],
)
def test_a_bundle_comes_back_as_a_folder(fields: dict[str, Any], tmp_path: Path) -> None:
    """Catches a number of the config that is lost on the way: logits tell."""
    config = changed(tiny_models.CONFIG, **fields)
    if config["model_type"] == "deepseek_v2":
        config.pop("scoring_func")
    folder = tiny_models.write_folder(tmp_path / "folder", config, tokenizer=False)
    convert(folder, tmp_path / "b.kdtr", to="same")
    convert(tmp_path / "b.kdtr", tmp_path / "back", to="same")
    prompt = [1, 2, 3] * 20
    wanted, *others = (
        Engine.load(model).session(100).score(prompt).tobytes()
        for model in (folder, tmp_path / "b.kdtr", tmp_path / "back")
    )
    assert all(other == wanted for other in others)


def test_a_bundle_with_other_layers_in_int4(tmp_path: Path) -> None:
    """Catches a folder whose config denies what is INT4 in it: golden bundles quantise dense layers and the shared
    expert too, with scales in float32."""
    from harness.reference import quant as oracle

    tensors = tiny_models.weights()
    for name in list(tensors):
        if ".mlp." in name and "_proj" in name and not name.startswith("model.layers.2.mlp.shared"):
            words, scales = oracle.quantize_w4a16(tensors.pop(name), "f32")
            tensors |= {name.replace(".weight", ".qw"): words, name.replace(".weight", ".sc"): scales}
    bundle = tiny_models.write_bundle(tmp_path / "b.kdtr", tensors=tensors)
    convert(bundle, tmp_path / "same", to="same")
    convert(bundle, tmp_path / "int4", to="int4")
    convert(bundle, tmp_path / "f32", to="f32")
    wanted = Engine.load(bundle).session(9).score([1, 2, 3]).tobytes()
    for name in ("same", "int4", "f32"):
        assert Engine.load(tmp_path / name).session(9).score([1, 2, 3]).tobytes() == wanted


def test_tied_embeddings(tmp_path: Path) -> None:
    """Catches a head that is missing from a bundle, or doubled in a folder."""
    config = changed(tiny_models.CONFIG, tie_word_embeddings=True)
    tensors = tiny_models.weights(config)
    tensors.pop("lm_head.weight")
    folder = tiny_models.write_folder(tmp_path / "folder", config, tensors, tokenizer=False)
    convert(folder, tmp_path / "out", to="int4")
    convert(tmp_path / "out", tmp_path / "b.kdtr", to="same")
    assert "lm_head.weight" not in raw_safetensors.read(tmp_path / "out")
    prompt = [1, 2, 3]
    one, two = (Engine.load(m).session(9).score(prompt).tobytes() for m in (tmp_path / "out", tmp_path / "b.kdtr"))
    assert one == two


def test_pieces_and_threads_do_not_matter(
    source: Path, int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows and bytes that go astray at the borders between pieces of work."""
    monkeypatch.setattr("kdtree_engine.convert_plan._UNIT_WEIGHTS", 700)
    monkeypatch.setattr("kdtree_engine.convert_plan._UNIT_BYTES", 999)
    for threads in (1, 5):
        convert(source, tmp_path / f"{threads}", shard_bytes=50_000, threads=threads)
        for path in sorted(int4.iterdir()):
            assert path.read_bytes() == (tmp_path / f"{threads}" / path.name).read_bytes(), path.name
    convert(int4, tmp_path / "a.kdtr", to="bf16", threads=5)
    monkeypatch.undo()
    convert(int4, tmp_path / "b.kdtr", to="bf16", threads=1)
    assert (tmp_path / "a.kdtr").read_bytes() == (tmp_path / "b.kdtr").read_bytes()


def test_progress(source: Path, tmp_path: Path) -> None:
    """Catches a bar that stands still, runs backwards or stops before its end."""
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "out", shard_bytes=50_000, progress=lambda *at: seen.append(at))
    total = sum(array.nbytes for _, array in raw_safetensors.read(source).values())
    assert seen[-1] == (total, total) and {t for _, t in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and len(seen) > 10


# -- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_transformers_loads_the_int4_folder(tmp_path: Path) -> None:
    """Catches a folder that only this engine reads: transformers and compressed-tensors load it, and give the
    logits that the folder dequantised by us gives."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    config = changed(
        tiny_models.CONFIG, hidden_size=64, qk_nope_head_dim=24, qk_rope_head_dim=16, max_position_embeddings=512
    )
    folder = tiny_models.write_folder(tmp_path / "f32", config, tokenizer=False)
    convert(folder, tmp_path / "int4")
    convert(tmp_path / "int4", tmp_path / "bf16", to="bf16")
    convert(tmp_path / "int4", tmp_path / "exact", to="f32")

    options = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "int4", quantization_config=options, dtype=torch.float32
    ).float()
    prompt = [(7 * i) % 250 for i in range(60)]
    with torch.no_grad():
        theirs = model(torch.tensor([prompt])).logits[0].numpy()

    rounded = {  # experts as compressed-tensors rounds them, the rest as it was
        name: from_bf16_bits(array) if dtype == "BF16" else array
        for name, (dtype, array) in raw_safetensors.read(tmp_path / "bf16").items()
        if ".mlp.experts." in name
    }
    tensors = {name: array for name, (_, array) in raw_safetensors.read(folder).items()} | rounded
    ours = Engine.load(tiny_models.write_folder(tmp_path / "rounded", config, tensors, tokenizer=False))
    mine = ours.session(100).score(prompt)
    assert np.abs(mine - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())
