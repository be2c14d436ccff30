"""kdtree inspect: sums and memory of whole models from headers, and the reason where a folder is no model."""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_models
import kimi_folder
import numpy as np
import pytest
import raw_safetensors
import tiny_models
from command import ARGV, assert_refused, environment, kdtree
from folders import FP8, fp8
from folders import write_folder as fp8_folder

from kdtree_engine import Engine, kdtr
from kdtree_engine.convert import convert
from kdtree_engine.convert_config import bundle_model_type
from kdtree_engine.convert_source import Stored
from kdtree_engine.inspection import Group, groups, inspect_path

# Kimi K2.5 as published: bytes by component, and what eight devices need.
PUBLISHED = {
    "embedding": 2.35e9,
    "attention": 12.34e9,
    "dense MLP": 0.79e9,
    "router": 0.33e9,
    "routed experts": (507.34 + 63.42) * 1e9,
    "shared experts": 5.29e9,
    "norms": 0.002e9,
    "head": 2.35e9,
    "vision (not loaded)": 0.94e9,
}


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tensors of K2.5, all 208,550 of them, in sparse files."""
    return kimi_folder.write(tmp_path_factory.mktemp("k25"))


def test_a_terabyte_model_by_its_headers(k25: Path) -> None:
    """Catches sums that are not the published ones, an inspect that reads weights (595 GB of holes), and one whose
    time grows faster than the number of tensors."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = kdtree("inspect", k25, "--json", timeout=100)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.code == 0, run.err
    report = run.json
    assert report["tensor_count"] == kimi_folder.TENSORS and "tensors" not in report
    assert report["bytes"] == pytest.approx(595.1e9, rel=2e-4)
    assert report["parameters"] == pytest.approx(1026.4e9, rel=1e-4)
    assert report["architecture"] == "kimi_k25"
    for name, size in PUBLISHED.items():
        assert report["components"][name] == pytest.approx(size, rel=0.01), name
    assert set(report["components"]) == set(PUBLISHED)
    assert report["quantisation"]["int4 (w4a16, groups of 32)"] == 3 * 384 * 60
    assert set(report["quantisation_by_component"]["routed experts"]) == {"int4 (w4a16, groups of 32)"}
    assert report["kv_bytes_per_token"] == {"bf16": 70_272, "f32": 140_544}
    one, *_, eight = report["devices"]
    assert (one["devices"], eight["devices"]) == (1, 8) and eight["obstacle"] is None
    assert one["weights"] == pytest.approx(594.2e9, rel=1e-4)
    assert eight["replicated"] == pytest.approx(2.18e9, rel=0.01)
    assert eight["weights"] == pytest.approx(76.2e9, rel=1e-3)
    assert eight["with_cache"]["262144"] - eight["weights"] == 262_144 * 70_272
    assert after.ru_utime - before.ru_utime < 10


def test_a_terabyte_model_for_people(k25: Path) -> None:
    """Catches 208,550 lines where a few say the same."""
    run = kdtree("inspect", k25, timeout=100)
    assert run.code == 0 and len(run.out.splitlines()) < 90
    experts = "language_model.model.layers.{1-60}.mlp.experts.{0-383}.up_proj.weight_packed"
    assert re.search(re.escape(experts) + r" +i32 +\[2048, 896\]  x 23040", run.out)
    assert re.search(r"^  8 +71\.0 GiB +71\.5 GiB +88\.1 GiB$", run.out, re.MULTILINE)
    assert "70,272 bytes per token in bf16" in run.out


def test_a_missing_scale_among_200_000_tensors(k25: Path, tmp_path: Path) -> None:
    """Catches an inspect that adds up what loading refuses."""
    folder = tmp_path / "k25"
    folder.mkdir()
    shards = kimi_folder.tensors()
    gone = next(t for t in shards[30] if t[0].endswith("experts.200.up_proj.weight_scale"))
    shards[30].remove(gone)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):06}.safetensors"
        head, size = kimi_folder.header(shard)
        with open(folder / name, "wb") as file:
            file.write(head)
            file.truncate(len(head) + size)
        weight_map |= {tensor[0]: name for tensor in shard}
    (folder / "config.json").write_bytes((k25 / "config.json").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    run = kdtree("inspect", folder, timeout=100)
    assert run.code == 1 and run.out == "" and f"{gone[0]} is missing" in run.err


# -- small models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.write_folder(tmp_path_factory.mktemp("inspect") / "source")


def test_containers_agree(source: Path, tmp_path: Path) -> None:
    """Catches a form of a matrix that is counted in one container and not in the other, and a bundle that does not say
    which architecture it is."""
    parameters = sum(t.size for t in tiny_models.weights(chat_models.CONFIG).values())
    for to in ("int4", "bf16", "f32"):
        convert(source, tmp_path / to, to=to)  # type: ignore[arg-type]
        convert(tmp_path / to, tmp_path / f"{to}.kdtr", to="same")
        folder, bundle = inspect_path(tmp_path / to), inspect_path(tmp_path / f"{to}.kdtr")
        for key in (
            "parameters",
            "quantisation",
            "quantisation_by_component",
            "kv_bytes_per_token",
            "devices",
            "config",
        ):
            assert folder[key] == bundle[key], key
        assert folder["parameters"] == parameters
        assert bundle["container"] == "KDTR v1, a bundle"
        assert bundle["architecture"] == "deepseek_v3" == bundle_model_type(bundle["config"])
        assert bundle_model_type(bundle["config"] | {"scoring": 1.0}) == "deepseek_v2"
        shapes = 8 * folder["quantisation"].get("int4 (w4a16, groups of 32)", 0)  # a bundle has no weight_shape
        one, two = (
            {k: v for k, v in report["components"].items() if k != "config and other data"}
            for report in (folder, bundle)
        )
        one["routed experts"] -= shapes
        assert one == two
        assert sum(folder["components"].values()) == folder["bytes"]
        assert sum(bundle["components"].values()) == bundle["bytes"]


def test_memory_of_forms(source: Path, tmp_path: Path) -> None:
    """Catches memory that is summed from the files: f16 becomes float32 in the engine, and so do vectors in bf16."""
    stored: dict[str, Any] = {
        name: array.astype(np.float16) if name.endswith("o_proj.weight") else raw_safetensors.bf16(array)
        for name, (_, array) in raw_safetensors.read(source).items()
    }
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    raw_safetensors.write(folder / "model.safetensors", stored)
    arrays = {name: value[1] if isinstance(value, tuple) else value for name, value in stored.items()}
    wide = sum(a.size for n, a in arrays.items() if a.ndim == 1 or n.endswith("o_proj.weight"))
    total = sum(a.size for a in arrays.values())
    one, two, four, eight = inspect_path(folder)["devices"]
    assert one["weights"] == 2 * (total - wide) + 4 * wide
    on_all = [n for n, a in arrays.items() if a.ndim == 1 or re.search(r"q_a_proj|kv_a_proj|mlp\.gate\.", n)]
    replicated = sum(arrays[n].size * (4 if arrays[n].ndim == 1 else 2) for n in on_all)
    for row, count in ((one, 1), (two, 2), (four, 4)):
        assert row["replicated"] == replicated and row["obstacle"] is None
        assert row["weights"] == -(-(one["weights"] - replicated) // count) + replicated
    assert eight["obstacle"] == "num_attention_heads is 4, which 8 does not divide"


WHOLE = {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
"""Widths that the CPU's layout has no padding for."""


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_memory_of_fp8(tmp_path: Path, scale_fmt: str | None) -> None:
    """Catches half the memory that loading takes: exact products need float32, unless scales are powers of two."""
    quantization = FP8 | ({} if scale_fmt is None else {"scale_fmt": scale_fmt})
    config = tiny_models.CONFIG | WHOLE | {"quantization_config": quantization}
    arrays = fp8(tiny_models.weights(config), powers_of_two=scale_fmt is not None)
    folder = fp8_folder(tmp_path / "fp8", config, arrays)
    assert inspect_path(folder)["devices"][0]["weights"] == Engine.load(folder, device="cpu").weight_bytes


def test_the_text_side(tmp_path: Path) -> None:
    """Catches a folder that inspect finds sound and generate refuses: tokenizer, ends and template are files too."""
    folder = chat_models.write_folder(tmp_path / "chat")
    report = inspect_path(folder)["text"]
    assert report["tokenizer"] == "tiktoken.model" and report["chat_template"] is True and report["unchecked"] is None
    assert set(report["end_tokens"]) == set(Engine.load(folder, device="cpu").eos_token_ids)
    assert "tiktoken.model; end tokens" in kdtree("inspect", folder).out
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert_refused(kdtree("inspect", folder), "chat_template.jinja, line 1")
    plain = tiny_models.write_folder(tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    assert_refused(kdtree("inspect", plain), "tokenizer.json is not a tokenizer")
    (plain / "tokenizer.json").unlink()
    assert inspect_path(plain)["text"]["tokenizer"] is None
    (plain / "generation_config.json").write_text('{"eos_token_id": 272}')
    assert_refused(kdtree("inspect", plain), "generation_config.json", "272")


def test_groups_that_cannot_be_cut(tmp_path: Path) -> None:
    """Catches a split through the middle of a group: 1408 / 8 inputs in Moonlight and V2-Lite; here 96 / 2."""
    config = {**tiny_models.CONFIG, "moe_intermediate_size": 96, "intermediate_size": 96}
    folder = tiny_models.write_folder(tmp_path / "f", config, tokenizer=False)
    assert inspect_path(folder)["devices"][1]["obstacle"] is None
    convert(folder, tmp_path / "int4")
    one, two, *_ = inspect_path(tmp_path / "int4")["devices"]
    assert one["obstacle"] is None
    assert "96 / 2 = 48 inputs of model.layers.1.mlp.experts.0.down_proj are no whole groups of 32" in two["obstacle"]
    assert "no whole groups" in kdtree("inspect", tmp_path / "int4").out


def test_grouped_names() -> None:
    """Catches tensors of different shapes under one pattern, and ranges that leave out an end."""
    stored = [Stored(f"a.{i}.b{i % 2}.{j}.w", "F32", (i % 2 + 1,), 4) for i in (3, 11, 7) for j in (0, 1)] + [
        Stored("top", "I32", (), 4),
        Stored("a.5.b1.1.w", "F16", (2,), 4),
    ]
    assert list(groups(stored)) == [
        Group("a.{3-11}.b1.{0-1}.w", "F32", (2,), 6, 24),
        Group("top", "I32", (), 1, 4),
        Group("a.5.b1.1.w", "F16", (2,), 1, 4),
    ]


def test_every_tensor(source: Path, tmp_path: Path) -> None:
    """Catches a list that is cut where all was asked for, and one that is not where nothing was."""
    many = tmp_path / "many.kdtr"
    kdtr.write(many, {f"x.{i}.y": np.zeros(2, np.float32) for i in range(600)})
    assert "x.{0-599}.y" in kdtree("inspect", many).out and "x.17.y" not in kdtree("inspect", many).out
    assert "x.17.y" in kdtree("inspect", many, "--tensors").out
    assert "tensors" not in kdtree("inspect", many, "--json").json
    listed = kdtree("inspect", many, "--json", "--tensors").json["tensors"]
    assert len(listed) == 600 and {"name": "x.17.y", "dtype": "f32", "shape": [2], "nbytes": 8} in listed
    assert len(kdtree("inspect", source, "--json").json["tensors"]) == 91


# -- files that are no models --------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors: dict[str, Any] = dict(raw_safetensors.read(folder))
        change(tensors)
        raw_safetensors.write(folder / "model.safetensors", tensors)

    return damage


def config(**fields: Any) -> Damage:
    def damage(folder: Path) -> None:
        value = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(value))

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


EXPERT = "model.layers.1.mlp.experts.3.up_proj"

DAMAGE: dict[str, tuple[Damage, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "truncated": (cut, "truncated"),
    "a stray shard": (lambda f: (f / "other.safetensors").write_bytes(b""), "other.safetensors is not one of"),
    "an unfinished conversion": (lambda f: (f / "config.json").rename(f / "conversion.json"), "has no config.json"),
    "a tensor too few": (rewrite(lambda t: t.pop("model.norm.weight")), "the first is model.norm.weight"),
    "a tensor too many": (
        rewrite(lambda t: t.update({"model.extra.weight": np.zeros(3, np.float32)})),
        "the tensor model.extra.weight is not one of this model's",
    ),
    "a wrong shape": (
        rewrite(lambda t: t.update({"model.norm.weight": np.zeros(63, np.float32)})),
        "model.norm.weight has shape [63]; expected [64]",
    ),
    "a scale too few": (rewrite(lambda t: t.pop(f"{EXPERT}.weight_scale")), f"{EXPERT}.weight_scale is missing"),
    "scales of another group size": (
        rewrite(lambda t: t.update({f"{EXPERT}.weight_scale": np.zeros((32, 4), np.float32)})),
        f"{EXPERT}.weight_scale has shape [32, 4]; expected [32, 2]",
    ),
    "another architecture": (config(model_type="llama"), "model_type 'llama' is not supported"),
    "a number of layers that is not there": (config(num_hidden_layers=4), "num_hidden_layers is 4, but"),
    "an unknown field": (config(new_trick=1), "unknown field new_trick"),
    "no word of INT4": (config(quantization_config=None), "is int4, but config.json has no quantization_config"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
}


@pytest.fixture(scope="module")
def int4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("inspect") / "int4"
    convert(source, target)
    return target


@pytest.mark.parametrize("fault", DAMAGE)
def test_bad_folders(int4: Path, tmp_path: Path, fault: str) -> None:
    """Catches a report about something that cannot be loaded, without a word of it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in int4.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage, message = DAMAGE[fault]
    damage(folder)
    assert_refused(kdtree("inspect", folder), message)


def test_bad_bundles(tmp_path: Path) -> None:
    """Catches bundles that only look like models."""
    tensors = dict(kdtr.read(tiny_models.write_bundle(tmp_path / "good.kdtr")))
    name = "model.layers.1.self_attn.o_proj.weight"
    for fault, message in (
        ({name: None}, f"the first is {name}"),
        ({name: np.zeros((3, 3), np.float32)}, f"{name} is f32 [3, 3]; expected f32 or bf16 or f16 [64, 80]"),
        ({"model.extra": np.zeros(1, np.float32)}, "the tensor model.extra is not one of this model's"),
        ({"config.n_group": None}, "config.n_group is missing"),
    ):
        changed = {k: v for k, v in {**tensors, **fault}.items() if v is not None}
        kdtr.write(tmp_path / "bad.kdtr", changed)
        assert_refused(kdtree("inspect", tmp_path / "bad.kdtr"), message)


def test_bundles_are_not_read(tmp_path: Path) -> None:
    """Catches an inspect that sums checksums of a file that may have hundreds of gigabytes: damaged data pass."""
    bundle = tiny_models.write_bundle(tmp_path / "b.kdtr")
    data = bytearray(bundle.read_bytes())
    data[-100] ^= 1
    bundle.write_bytes(bytes(data))
    assert kdtr.check(bundle) != "ok"
    assert kdtree("inspect", bundle).code == 0


def test_memory_stays_small(k25: Path) -> None:
    """Catches weights in memory: headers of 208,550 tensors fit in a gigabyte."""
    limit = 2 << 30
    run = subprocess.run(
        [*ARGV, "inspect", str(k25)],
        capture_output=True,
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        check=False,
    )
    assert run.returncode == 0, run.stderr
