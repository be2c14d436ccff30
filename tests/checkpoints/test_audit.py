"""Folders against what the builder expects: each tensor exactly once, or an error that names it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import (
    CONFIG,
    bf16,
    read_index,
    safetensors_bytes,
    shapes,
    weights,
    write_folder,
    write_index,
)

from kdtree_engine import EngineError
from kdtree_engine.checkpoint import open_checkpoint

EXPERTS = "model.layers.1.mlp.experts"


class Recorder:
    """Stands in for the native builder: expects what the published layout says and keeps what it is given."""

    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        self.wanted = shapes(config)
        self.given: dict[str, np.ndarray] = {}

    def expected(self) -> list[tuple[str, list[int], bool]]:
        return [(name, list(shape), True) for name, shape in self.wanted.items()]

    def add(self, name: str, array: np.ndarray) -> None:
        assert name not in self.given, name
        assert array.flags.c_contiguous and array.shape == self.wanted[name]
        self.given[name] = array.copy()  # the buffer is used again

    def add_w4a16(self, module: str, qw: np.ndarray, sc: np.ndarray, round_to_bf16: bool = False) -> None:
        raise AssertionError("no INT4 in these folders")

    def add_fp8(self, name: str, codes: np.ndarray, scales: np.ndarray, round_to_bf16: bool = False) -> None:
        raise AssertionError("no fp8 in these folders")


def load(path: Path, config: dict[str, Any] = CONFIG) -> Recorder:
    recorder = Recorder(config)
    with open_checkpoint(path) as checkpoint:
        checkpoint.load_into(recorder)
    assert set(recorder.given) == set(recorder.wanted)
    return recorder


def refused(path: Path, *says: str, code: str | None = None) -> None:
    recorder = Recorder()
    with pytest.raises(EngineError) as caught, open_checkpoint(path) as checkpoint:
        checkpoint.load_into(recorder)
    message = str(caught.value)
    assert all(word in message for word in says), message
    assert "\n" not in message and not message.endswith(".")
    assert code is None or caught.value.code == code
    assert not recorder.given, "a tensor was used before the audit was over"


def fused(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of layer 1 in the form of transformers 5."""
    rest = {name: a for name, a in arrays.items() if not name.startswith(EXPERTS)}
    n = CONFIG["n_routed_experts"]
    gate, up, down = (
        np.stack([arrays[f"{EXPERTS}.{e}.{part}_proj.weight"] for e in range(n)]) for part in ("gate", "up", "down")
    )
    return rest | {
        f"{EXPERTS}.gate_up_proj": np.concatenate([gate, up], axis=1),
        f"{EXPERTS}.down_proj": down,
    }


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return weights(CONFIG)


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_float32_arrives_bit_for_bit(tmp_path: Path, arrays: dict[str, np.ndarray], shards: int) -> None:
    given = load(write_folder(tmp_path, arrays=arrays, shards=shards)).given
    for name, array in arrays.items():
        assert given[name].dtype == np.float32 and given[name].tobytes() == array.tobytes()


def test_bf16_arrives_as_its_bits_and_f16_exactly_widened(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    bits = {name: bf16(a) for name, a in arrays.items()}
    given = load(write_folder(tmp_path / "bf16", arrays=bits)).given
    assert all(given[n].dtype == np.uint16 and given[n].tobytes() == a.tobytes() for n, a in bits.items())

    halves = {name: a.astype(np.float16) for name, a in arrays.items()}
    halves["model.norm.weight"][0] = np.float16(6e-8)  # subnormal in f16, normal in f32
    given = load(write_folder(tmp_path / "f16", arrays=halves)).given
    assert all(given[n].tobytes() == a.astype(np.float32).tobytes() for n, a in halves.items())


def test_a_bias_in_bf16_beside_other_dtypes(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    """transformers saves the bias in bf16 where a model was cast whole, else in f32."""
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    mixed = {name: a if name == bias else bf16(a) for name, a in arrays.items()}
    given = load(write_folder(tmp_path / "a", arrays=mixed)).given
    assert given[bias].tobytes() == arrays[bias].tobytes()
    given = load(write_folder(tmp_path / "b", arrays=arrays | {bias: bf16(arrays[bias])})).given
    assert given[bias].tobytes() == bf16(arrays[bias]).tobytes()


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_fused_experts_are_the_same_model(tmp_path: Path, arrays: dict[str, np.ndarray], kind: str) -> None:
    """Gate and up swapped, or experts shifted by one, would load without any other sign."""
    cast = {"f32": lambda a: a, "bf16": bf16, "f16": lambda a: a.astype(np.float16)}[kind]
    single = load(write_folder(tmp_path / "a", arrays={n: cast(a) for n, a in arrays.items()})).given
    together = load(write_folder(tmp_path / "b", arrays={n: cast(a) for n, a in fused(arrays).items()})).given
    assert all(single[name].tobytes() == together[name].tobytes() for name in single)


def test_fused_experts_of_the_wrong_shape_or_beside_single_ones(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    name = f"{EXPERTS}.gate_up_proj"
    good = fused(arrays)
    refused(write_folder(tmp_path / "a", arrays=good | {name: good[name][:3]}), name, "[3, 32, 32]", "[4, 32, 32]")
    refused(write_folder(tmp_path / "b", arrays=good | {name: good[name].transpose(0, 2, 1)[:, :16]}), name)
    refused(write_folder(tmp_path / "c", arrays=arrays | {name: good[name]}), "both hold", EXPERTS)
    del good[name]
    refused(write_folder(tmp_path / "d", arrays=good), "missing", f"{EXPERTS}.0.gate_proj.weight")


def test_tied_embeddings_load_once_and_serve_twice(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    head = arrays.pop("lm_head.weight")
    given = load(write_folder(tmp_path / "a", config, arrays)).given
    assert given["lm_head.weight"].tobytes() == arrays["model.embed_tokens.weight"].tobytes()
    refused(write_folder(tmp_path / "b", config, arrays | {"lm_head.weight": head}), "lm_head.weight", "tie_word")
    refused(write_folder(tmp_path / "c", CONFIG, arrays), "missing", "lm_head.weight")


def test_what_may_be_ignored_is_ignored_whatever_it_looks_like(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A stale inv_freq of 56 entries, a multi-token-prediction layer: real checkpoints have both."""
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(56, np.uint16),
        "model.layers.2.eh_proj.weight": np.zeros((2, 2), np.int32),
        "model.layers.2.mlp.experts.0.up_proj.weight": np.zeros((3, 3), np.float32),
    }
    given = load(write_folder(tmp_path, arrays=arrays | more)).given
    assert not set(more) & set(given)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.0.self_attn.q_a_proj.bias",
        "model.layers.0.mlp.experts.gate_up_proj",
        "transformer.h.0.weight",
        "model.layers.-1.weight",
        "model.layers." + "9" * 400 + ".weight",
    ],
)
def test_an_extra_tensor_is_named(tmp_path: Path, arrays: dict[str, np.ndarray], name: str) -> None:
    """What is left out silently is a model that is silently wrong (a bias, a scale, an expert)."""
    extra = arrays | {name: np.zeros((2, 2), np.float32)}
    refused(write_folder(tmp_path, arrays=extra), name, "not one of this model's", code="bad_model")


def test_each_missing_tensor_is_named(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    for i, name in enumerate(arrays):
        rest = {n: a for n, a in arrays.items() if n != name}
        refused(write_folder(tmp_path / str(i), arrays=rest), name, f"1 of {len(arrays)}", code="bad_model")


def test_each_wrong_shape_is_named(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Transposed, one row short, or flat: with equal byte counts only the shape tells."""
    for i, (name, a) in enumerate(arrays.items()):
        for j, bad in enumerate(
            [a.reshape(-1), a[:-1], a.T if a.ndim == 2 and a.shape[0] != a.shape[1] else a[:, None]]
        ):
            if bad.shape != a.shape:
                refused(write_folder(tmp_path / f"{i}_{j}", arrays=arrays | {name: bad}), name, str(list(a.shape)))


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_a_wrong_dtype_is_named(tmp_path: Path, arrays: dict[str, np.ndarray], dtype: Any) -> None:
    name = "model.layers.1.mlp.gate.weight"
    refused(write_folder(tmp_path, arrays=arrays | {name: arrays[name].astype(dtype)}), name, "dtype")


def shard_files(path: Path) -> Iterator[Path]:
    yield from sorted(path.glob("model-*.safetensors"))


def test_each_truncated_or_missing_shard_is_named(tmp_path: Path) -> None:
    """One shard of many cut short: 300 MB of zero weights and gibberish, where nobody compares sizes."""
    path = write_folder(tmp_path, shards=3)
    files = list(shard_files(path))
    for file in files:
        good = file.read_bytes()
        for n in (0, 7, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:n])
            refused(path, file.name, code="bad_file")
        file.unlink()
        refused(path, file.name, "not in the folder", code="bad_file")
        file.write_bytes(good)
    load(path)


def test_a_stale_index(tmp_path: Path) -> None:
    path = write_folder(tmp_path, shards=3)
    good = read_index(path)
    name, other = sorted(good)[0], sorted(good)[-1]
    write_index(path, {n: f for n, f in good.items() if n != name})
    refused(path, name, "stale", code="bad_file")
    write_index(path, good | {"model.layers.0.gone.weight": good[name]})
    refused(path, "model.layers.0.gone.weight", "stale", code="bad_file")
    write_index(path, good | {name: good[other]})
    refused(path, name, good[other], code="bad_file")
    write_index(path, good | {name: "model-00009-of-00009.safetensors"})
    refused(path, "model-00009-of-00009.safetensors", code="bad_file")


@pytest.mark.parametrize("where", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", 3, None, "config.json"])
def test_an_index_that_points_outside_the_folder(tmp_path: Path, where: Any) -> None:
    path = write_folder(tmp_path, shards=2)
    write_index(path, read_index(path) | {"lm_head.weight": where})
    refused(path, "lm_head.weight", code="bad_file")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map(tmp_path: Path, index: Any) -> None:
    path = write_folder(tmp_path, shards=2)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "weight_map", code="bad_file")


def test_the_same_tensor_in_two_shards(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = write_folder(tmp_path, arrays=arrays, shards=2)
    first = next(shard_files(path))
    names = [n for n, f in read_index(path).items() if f == first.name] + ["model.norm.weight"]
    first.write_bytes(safetensors_bytes({n: arrays[n] for n in names}))
    refused(path, "model.norm.weight", code="bad_file")


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "does not exist", code="io")
    refused(tmp_path, "no config.json", code="bad_file")
    (tmp_path / "file.bin").write_bytes(b"x")
    refused(tmp_path / "file.bin", "neither a folder nor a .kdtr bundle", code="bad_file")
    (tmp_path / "x.kdtr").write_bytes(b"")
    refused(tmp_path / "x.kdtr", "x.kdtr", code="bad_file")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "model.safetensors", code="bad_file")
    path = write_folder(tmp_path / "both", shards=2)
    (path / "model.safetensors").write_bytes(b"")
    refused(path, "both", code="bad_file")


def test_progress_counts_every_byte_once(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    seen: list[tuple[int, int]] = []
    with open_checkpoint(write_folder(tmp_path, arrays=fused(arrays), shards=2)) as checkpoint:
        checkpoint.load_into(Recorder(), lambda done, total: seen.append((done, total)))
    size = sum(a.nbytes for a in arrays.values())
    assert {total for _, total in seen} == {size} and seen[-1][0] == size
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_q_lora_null_and_one_dense_layer_less(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIG) | {"q_lora_rank": None, "first_k_dense_replace": 0}
    load(write_folder(tmp_path, config, weights(config)), config)
