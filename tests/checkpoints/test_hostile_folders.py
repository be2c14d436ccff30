"""Damaged and hostile folders, one line each: every one is refused with one sentence that names the file, the
tensor or the field, and leaves nothing behind.

The list is the point: what it holds cannot come back unnoticed. Each entry damages a sound INT4 folder of three
shards; what is peculiar to one format has tests of its own (test_audit.py, test_quantized_folders.py,
test_safetensors_file.py).
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import (
    INT4,
    QUANTIZED,
    int4,
    raw_safetensors,
    read_index,
    safetensors_bytes,
    weights,
    write_folder,
    write_index,
)

from kdtree_engine import Engine, EngineError

CONFIG = QUANTIZED | {"quantization_config": INT4}
Damage = Callable[[Path], None]
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return int4(weights(QUANTIZED))


def config(**changes: Any) -> Damage:
    def damage(path: Path) -> None:
        made = {**json.loads((path / "config.json").read_text()), **changes}
        (path / "config.json").write_text(json.dumps({k: v for k, v in made.items() if v is not ...}))

    return damage


def text(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: (path / name).write_bytes(data) and None  # type: ignore[func-returns-value]


def cut(name: str, keep: Callable[[int], int]) -> Damage:
    def damage(path: Path) -> None:
        os.truncate(path / name, keep((path / name).stat().st_size))

    return damage


def zeros(name: str, first: int) -> Damage:
    """From byte `first` on, the file holds zeros and keeps its size."""

    def damage(path: Path) -> None:
        raw = (path / name).read_bytes()
        start = first if first == 0 else 8 + int.from_bytes(raw[:8], "little")
        (path / name).write_bytes(raw[:start] + bytes(len(raw) - start))

    return damage


def header(name: str, edit: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(path: Path) -> None:
        raw = (path / name).read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        fields = json.loads(raw[8:end])
        edit(fields)
        (path / name).write_bytes(raw_safetensors(fields, raw[end:]))

    return damage


def first_tensor(fields: dict[str, Any]) -> dict[str, Any]:
    return next(v for k, v in fields.items() if k != "__metadata__")


def moved(fields: dict[str, Any]) -> None:
    span = first_tensor(fields)["data_offsets"]
    span[0] += 4
    span[1] += 4


def huge(fields: dict[str, Any]) -> None:
    first_tensor(fields).update(shape=[2**40, 2**40], data_offsets=[0, 2**62])


def renamed(fields: dict[str, Any]) -> None:
    fields["model.layers.0.\u0000"] = fields.pop("lm_head.weight")


def index(edit: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(path: Path) -> None:
        weight_map: dict[str, Any] = read_index(path)
        edit(weight_map)
        write_index(path, weight_map)

    return damage


def stray(name: str) -> Damage:
    return text(name, safetensors_bytes({"model.norm.weight": np.ones(64, np.float32)}))


def tensors(edit: Callable[[dict[str, np.ndarray]], None]) -> Damage:
    def damage(path: Path) -> None:
        changed = int4(weights(QUANTIZED))
        edit(changed)
        for file in path.glob("model-*"):
            file.unlink()
        write_folder(path, json.loads((path / "config.json").read_text()), changed, shards=3)

    return damage


def link_to_itself(path: Path) -> None:
    (path / FIRST).unlink()
    (path / FIRST).symlink_to(FIRST)


def folder_for_a_shard(path: Path) -> None:
    (path / FIRST).unlink()
    (path / FIRST).mkdir()


def pipe_for_a_shard(path: Path) -> None:
    (path / FIRST).unlink()
    os.mkfifo(path / FIRST)


def pipe_for_the_config(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


def linked(name: str, target: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return damage


def dangling(name: str) -> Damage:
    return linked(name, "../blobs/0123abcd")


def more_tokens(path: Path) -> None:
    vocab = {chr(0x100 + i): i for i in range(301)}
    made = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (path / "tokenizer.json").write_text(json.dumps(made))


def another_format(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")


def longest(fields: dict[str, Any]) -> None:
    fields["x" * 100_000] = fields.pop("lm_head.weight")


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 4976698672\n"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
GROUPS_OF_128 = json.loads(json.dumps(INT4).replace("32", "128"))
SLOW_PATTERN = INT4 | {"ignore": ["re:(x+)+y"]}
E = "model.layers.1.mlp.experts.1.gate_proj"
DAMAGED: dict[str, tuple[Damage, list[str]]] = {
    # config.json
    "config: gone": (lambda p: (p / "config.json").unlink(), ["config.json"]),
    "config: empty": (text("config.json", ""), ["config.json", "not JSON"]),
    "config: cut": (text("config.json", '{"model_type": "deep'), ["config.json", "not JSON"]),
    "config: a list": (text("config.json", "[]"), ["config.json", "list"]),
    "config: bytes": (text("config.json", b"\xff\xfe{}"), ["config.json", "UTF-8"]),
    "config: nested without end": (text("config.json", nested(200_000)), ["config.json"]),
    "config: a key twice": (text("config.json", '{"vocab_size": 1, "vocab_size": 2}'), ["vocab_size", "twice"]),
    "config: another architecture": (config(model_type="kimi_k3"), ["kimi_k3", "kimi_k25"]),
    "config: the class of another model": (
        config(architectures=["DeepseekV2ForCausalLM"]), ["DeepseekV2ForCausalLM", "model_type deepseek_v3"],
    ),
    "config: no eps": (config(rms_norm_eps=...), ["rms_norm_eps is missing"]),
    "config: NaN": (text("config.json", '{"model_type": "deepseek_v3", "rms_norm_eps": NaN}'), ["NaN"]),
    "config: a billion layers": (config(num_hidden_layers=2**24), ["num_hidden_layers"]),
    "config: layers past all integers": (config(num_hidden_layers=2**70), ["num_hidden_layers"]),
    "config: no layers": (config(num_hidden_layers=0, first_k_dense_replace=0), ["num_hidden_layers"]),
    "config: a negative width": (config(hidden_size=-64), ["hidden_size"]),
    "config: more experts a token than there are": (config(num_experts_per_tok=9), ["num_experts_per_tok"]),
    "config: a layer more in the files": (config(num_nextn_predict_layers=0, num_hidden_layers=1), ["model.layers.1."]),
    "config: experts missing in the files": (config(n_routed_experts=5), ["n_routed_experts"]),
    "config: another vocabulary": (config(vocab_size=301), ["[300, 64]", "[301, 64]"]),
    "config: gptq": (config(quantization_config={"quant_method": "gptq", "bits": 4}), ["gptq"]),
    "config: no quantization_config": (config(quantization_config=...), ["weight_packed", "no quantization_config"]),
    "config: groups of 128": (config(quantization_config=GROUPS_OF_128), ["group_size"]),
    "config: a pattern without end": (config(quantization_config=SLOW_PATTERN), ["ignore", "(x+)+y"]),
    "config: a pipe": (pipe_for_the_config, ["config.json", "regular file"]),
    "config: an endless device": (linked("config.json", "/dev/zero"), ["config.json", "regular file"]),
    "config: a link to nowhere": (dangling("config.json"), ["config.json", "blobs/0123abcd"]),
    "config: a pointer of Git LFS": (text("config.json", LFS), ["config.json", "Git LFS"]),
    "config: a layer cut off as if for multi-token prediction": (
        config(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=1), ["model.layers.1", "eh_proj"],
    ),
    "config: an end that no token is": (config(eos_token_id=[1, 300]), ["eos_token_id is 300", "vocab_size is 300"]),
    "config: experts that do not count": (config(routed_scaling_factor=0), ["routed_scaling_factor"]),
    "config: a ramp that runs backwards": (
        config(rope_scaling=YARN | {"beta_fast": 1, "beta_slow": 32}), ["rope_beta_fast", "rope_beta_slow"],
    ),
    "config: an eps that drowns the norms": (config(rms_norm_eps=1.0), ["rms_norm_eps is 1"]),
    "config: no position": (config(max_position_embeddings=0), ["max_position_embeddings is 0"]),
    # text
    "tokenizer: a link to nowhere": (dangling("tokenizer.json"), ["tokenizer.json", "blobs/0123abcd"]),
    "tokenizer: a pipe": (lambda p: os.mkfifo(p / "tokenizer.json"), ["tokenizer.json", "regular file"]),
    "tokenizer: more tokens than the model": (more_tokens, ["tokenizer.json", "id 300", "vocab_size is 300"]),
    "generation_config: another model's end": (
        text("generation_config.json", '{"eos_token_id": 99999}'), ["generation_config.json", "99999"],
    ),
    # index
    "index: gone": (lambda p: (p / INDEX).unlink(), ["neither", INDEX]),
    "index: not JSON": (text(INDEX, "{"), [INDEX]),
    "index: no map": (text(INDEX, "{}"), [INDEX, "weight_map"]),
    "index: a path upwards": (index(lambda m: m.update({"lm_head.weight": "../x.safetensors"})), ["lm_head.weight"]),
    "index: an absent shard": (index(lambda m: m.update({"lm_head.weight": "model-9.safetensors"})), ["model-9"]),
    "index: a tensor that no shard has": (index(lambda m: m.update({"x.weight": FIRST})), ["x.weight", "stale"]),
    "index: a tensor less": (index(lambda m: m.pop("lm_head.weight") and None), ["lm_head.weight", "stale"]),  # type: ignore[func-returns-value]
    "index: the wrong shard": (index(lambda m: m.update({"lm_head.weight": LAST})), ["lm_head.weight"]),
    "index: a name for a number": (index(lambda m: m.update({"lm_head.weight": 3})), ["lm_head.weight"]),
    # shards
    "shard: gone": (lambda p: (p / LAST).unlink(), [LAST, "not in the folder"]),
    "shard: empty": (cut(FIRST, lambda n: 0), [FIRST]),
    "shard: seven bytes": (cut(FIRST, lambda n: 7), [FIRST]),
    "shard: header cut": (cut(FIRST, lambda n: 60), [FIRST, "truncated"]),
    "shard: half": (cut(LAST, lambda n: n // 2), [LAST, "truncated"]),
    "shard: a byte less": (cut(LAST, lambda n: n - 1), [LAST, "truncated"]),
    "shard: a byte more": (cut(LAST, lambda n: n + 1), [LAST]),
    "shard: zeros throughout": (zeros(FIRST, 0), [FIRST]),
    "shard: zeros after the header": (zeros(LAST, 1), [LAST, "nothing but zeros"]),
    "shard: a header of 2^63 bytes": (text(FIRST, struct.pack("<Q", 2**63) + b"{}"), [FIRST]),
    "shard: a header that is no JSON": (text(FIRST, struct.pack("<Q", 2) + b"{]"), [FIRST]),
    "shard: offsets moved": (header(FIRST, moved), [FIRST]),
    "shard: a shape past all memory": (header(FIRST, huge), [FIRST]),
    "shard: a dtype of the future": (header(FIRST, lambda f: first_tensor(f).update(dtype="F4")), [FIRST, "F4"]),
    "shard: a name with a zero byte": (header(FIRST, renamed), [FIRST]),
    "shard: a name without end": (header(FIRST, longest), [FIRST, "100000 characters"]),
    "shard: a pointer of Git LFS": (text(FIRST, LFS), [FIRST, "Git LFS"]),
    "shard: a link to nowhere": (dangling(LAST), [LAST, "blobs/0123abcd"]),
    "shard: another format": (another_format, ["neither", "pytorch_model-00001-of-00002.bin"]),
    "shard: a link to itself": (link_to_itself, [FIRST]),
    "shard: a folder": (folder_for_a_shard, [FIRST]),
    "shard: a pipe": (pipe_for_a_shard, [FIRST]),
    "shard: one of another download": (stray("model-00004-of-00004.safetensors"), ["model-00004-of-00004"]),
    "shard: an adapter": (stray("adapter_model.safetensors"), ["adapter_model.safetensors"]),
    "shard: a single file beside": (stray("model.safetensors"), ["both"]),
    # tensors
    "tensor: a scale less": (tensors(lambda a: a.pop(f"{E}.weight_scale") is None), [f"{E}.weight_scale is missing"]),  # type: ignore[arg-type, return-value]
    "tensor: an expert less": (
        tensors(lambda a: [a.pop(f"{E}.weight_{p}") for p in ("packed", "scale", "shape")] and None),  # type: ignore[func-returns-value]
        ["1 of", f"{E}.weight"],
    ),
    "tensor: no head": (tensors(lambda a: a.pop("lm_head.weight") is None), ["lm_head.weight"]),  # type: ignore[arg-type, return-value]
    "tensor: no router bias": (
        tensors(lambda a: a.pop("model.layers.1.mlp.gate.e_score_correction_bias") is None),  # type: ignore[arg-type, return-value]
        ["e_score_correction_bias"],
    ),
    "tensor: an unknown one": (tensors(lambda a: a.update({"model.extra": np.ones(3, np.float32)})), ["model.extra"]),
    "tensor: zero points": (
        tensors(lambda a: a.update({f"{E}.weight_zero_point": np.ones((4, 2), np.int32)})), ["weight_zero_point"],
    ),
    "tensor: reordered groups": (tensors(lambda a: a.update({f"{E}.weight_g_idx": np.ones(64, np.int32)})), ["g_idx"]),
    "tensor: sizes of another matrix": (
        tensors(lambda a: a.update({f"{E}.weight_shape": np.array([64, 32], np.int32)})), [f"{E}.weight_shape"],
    ),
    "tensor: a scale that is NaN": (
        tensors(lambda a: a[f"{E}.weight_scale"].__setitem__((3, 1), 0x7FC0)), [E, "row 3"],
    ),
    "tensor: an infinite norm": (
        tensors(lambda a: a["model.norm.weight"].__setitem__(5, np.inf)), ["model.norm.weight", "index 5"],
    ),
}  # fmt: skip


def test_the_list_is_long_enough() -> None:
    assert len(DAMAGED) >= 40


def test_the_folder_is_sound_before_it_is_damaged(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    Engine.load(write_folder(tmp_path, CONFIG, arrays, shards=3), device="cpu")


@pytest.mark.parametrize("what", DAMAGED)
def test_each_is_refused_by_name(tmp_path: Path, arrays: dict[str, np.ndarray], what: str) -> None:
    damage, says = DAMAGED[what]
    path = write_folder(tmp_path / "model", CONFIG, arrays, shards=3)
    damage(path)
    with pytest.raises(EngineError) as caught:
        Engine.load(path, device="cpu")
    message = str(caught.value)
    assert all(word in message for word in says), message
    assert "\n" not in message and "\0" not in message and len(message) < 600 and str(path) in message
    assert caught.value.code in ("bad_file", "bad_model", "unsupported", "not_finite", "io")
    assert not [t for t in threading.enumerate() if t.name == "kdtree-read"]
    assert not [f for f in Path("/proc/self/fd").iterdir() if f.exists() and path in f.resolve().parents]
