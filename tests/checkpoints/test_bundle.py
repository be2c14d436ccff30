"""Model bundles (.kdtr): what the container's own rules cannot know, checked when a bundle is opened as a
model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import CONFIG, bf16, weights, write_folder

from kdtree_engine import Engine, EngineError, kdtr
from kdtree_engine.config import parse_config

CONFIG32 = CONFIG | {
    "moe_intermediate_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 64,
}
"""Widths that INT4 groups of 32 divide."""

MODULE = "model.layers.1.mlp.experts.2.up_proj"
KV_B = "model.layers.0.self_attn.kv_b_proj"
Arrays = dict[str, np.ndarray]


def bundle() -> Arrays:
    """A sound bundle: float32, one expert matrix in INT4, and golden data beside the model."""
    arrays = weights(CONFIG32)
    config = {f"config.{k}": np.array(v, np.float64) for k, v in parse_config(CONFIG32).fields.items()}
    out, width = arrays.pop(f"{MODULE}.weight").shape
    rng = np.random.default_rng(1)
    words = rng.integers(-(2**31), 2**31, (out, width // 8)).astype(np.int32)
    scales = rng.uniform(0.01, 0.1, (out, width // 32)).astype(np.float32)
    more = {f"{MODULE}.qw": words, f"{MODULE}.sc": scales, "plain.tokens": np.arange(3, dtype=np.int32)}
    return arrays | config | more


def load(tmp_path: Path, arrays: Arrays, **options: Any) -> Engine:
    kdtr.write(tmp_path / "model.kdtr", arrays)
    return Engine.load(tmp_path / "model.kdtr", device="cpu", **options)


def dequantised(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    shifts = 4 * np.arange(8, dtype=np.uint32)
    nibbles = (words.view(np.uint32)[:, :, None] >> shifts) & 15
    q = nibbles.reshape(len(words), -1).astype(np.float32) - 8
    return np.asarray(q * np.repeat(scales, 32, axis=1), np.float32)


@pytest.mark.parametrize("scale_dtype", ["f32", "bf16"])
def test_int4_is_the_model_with_the_dequantised_matrix(tmp_path: Path, scale_dtype: str) -> None:
    arrays = bundle()
    scales = arrays[f"{MODULE}.sc"]
    if scale_dtype == "bf16":
        bits = bf16(scales)
        arrays[f"{MODULE}.sc"] = bits.view(kdtr.BF16_BITS)
        scales = (bits.astype(np.uint32) << 16).view(np.float32)
    plain = {n: a for n, a in arrays.items() if not n.startswith(MODULE)}
    plain[f"{MODULE}.weight"] = dequantised(arrays[f"{MODULE}.qw"], scales)
    tokens = list(range(60))
    logits = load(tmp_path, arrays).session().score(tokens)
    assert logits.tobytes() == load(tmp_path, plain).session().score(tokens).tobytes()
    assert np.isfinite(logits).all()


def test_f16_and_bf16_are_widened(tmp_path: Path) -> None:
    arrays = bundle()
    name = "model.layers.0.mlp.up_proj.weight"
    halves = arrays[name].astype(np.float16)
    tokens = list(range(30))
    widened = load(tmp_path, arrays | {name: halves.astype(np.float32)}).session().score(tokens)
    assert load(tmp_path, arrays | {name: halves}).session().score(tokens).tobytes() == widened.tobytes()


def change(name: str, edit: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        if edit is None:
            del arrays[name]
        else:
            arrays[name] = edit(arrays.get(name, np.zeros(3, np.float32)))

    return apply


def poke(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def edit(a: np.ndarray) -> np.ndarray:
        a = a.copy()
        a.flat[5] = value
        return a

    return edit


def field(name: str, value: Any) -> Callable[[Arrays], None]:
    return change(f"config.{name}", lambda _: np.array(value))


def cast(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: a.astype(dtype)


def zeros(*shape: int, dtype: Any = np.float32) -> Callable[[np.ndarray], np.ndarray]:
    return lambda _: np.zeros(shape, dtype)


BAD: dict[str, tuple[Callable[[Arrays], None], list[str]]] = {
    "NaN scale": (change(f"{MODULE}.sc", poke(np.nan)), [MODULE, "scale", "NaN"]),
    "infinite scale": (change(f"{MODULE}.sc", poke(np.inf)), [MODULE, "scale", "infinite"]),
    "NaN weight": (change("model.norm.weight", poke(np.nan)), ["model.norm.weight", "nan"]),
    "infinite weight": (change("lm_head.weight", poke(-np.inf)), ["lm_head.weight", "infinity"]),
    "words without scales": (change(f"{MODULE}.sc", None), [f"{MODULE}.sc", "missing"]),
    "scales without words": (change(f"{MODULE}.qw", None), [f"{MODULE}.qw", "missing"]),
    "scales of the wrong width": (change(f"{MODULE}.sc", lambda a: a[:, :1]), [f"{MODULE}.sc", "shape"]),
    "words of the wrong width": (change(f"{MODULE}.qw", lambda a: a[:, :-1]), [f"{MODULE}.qw", "shape"]),
    "words of the wrong dtype": (change(f"{MODULE}.qw", cast(np.float32)), [f"{MODULE}.qw", "i32"]),
    "f64 scales": (change(f"{MODULE}.sc", cast(np.float64)), [MODULE, "f64"]),
    "both forms": (change(f"{MODULE}.weight", zeros(32, 64)), [MODULE, "both"]),
    "INT4 beside kv_b": (change(f"{KV_B}.qw", zeros(44, 3, dtype=np.int32)), [KV_B, "both"]),
    "unknown weight": (change("model.layers.0.extra.weight", zeros(3)), ["model.layers.0.extra.weight"]),
    "missing weight": (change("lm_head.weight", None), ["lm_head.weight", "missing"]),
    "f64 weight": (change("lm_head.weight", cast(np.float64)), ["lm_head.weight", "f64"]),
    "transposed weight": (change("model.layers.0.mlp.up_proj.weight", np.transpose), ["up_proj", "[96, 64]"]),
    "missing field": (change("config.rms_norm_eps", None), ["config.rms_norm_eps", "missing"]),
    "unknown field": (field("extra", 1.0), ["config.extra"]),
    "field that is no scalar": (field("rope_theta", [1e4]), ["config.rope_theta", "scalar"]),
    "field that is NaN": (field("rope_theta", np.nan), ["config.rope_theta", "nan"]),
    "NaN layers": (field("num_hidden_layers", np.nan), ["config.num_hidden_layers", "nan"]),
    "fractional layers": (field("num_hidden_layers", 1.5), ["num_hidden_layers", "1.5"]),
    "no layers": (field("num_hidden_layers", 0.0), ["num_hidden_layers"]),
    "a million layers": (field("num_hidden_layers", 1e6), ["num_hidden_layers is 1000000"]),
    "a million experts": (field("n_routed_experts", 1e6), ["n_routed_experts is 1000000"]),
    "more experts chosen than there are": (field("num_experts_per_tok", 5.0), ["num_experts_per_tok"]),
}
NOT_FINITE = ("NaN scale", "infinite scale", "NaN weight", "infinite weight")


@pytest.mark.parametrize("what", BAD)
def test_a_bad_bundle_is_refused_by_name(tmp_path: Path, what: str) -> None:
    edit, says = BAD[what]
    arrays = bundle()
    edit(arrays)
    with pytest.raises(EngineError) as caught:
        load(tmp_path, arrays)
    message = str(caught.value)
    kind = "not_finite" if what in NOT_FINITE else "bad_model"
    assert caught.value.code == kind, message
    assert all(word in message for word in [*says, "model.kdtr"]) and "\n" not in message, message


def test_int4_where_none_may_be(tmp_path: Path) -> None:
    """The embedding is a table that rows are read from, no matrix of a product."""
    arrays = bundle()
    del arrays["model.embed_tokens.weight"]
    words, scales = np.zeros((64, 4), np.int32), np.ones((64, 1), np.float32)
    arrays |= {"model.embed_tokens.qw": words, "model.embed_tokens.sc": scales}
    with pytest.raises(EngineError, match="embed_tokens") as caught:
        load(tmp_path, arrays)
    assert caught.value.code == "unsupported"


def test_int4_of_kv_b_is_dequantised_exactly(tmp_path: Path) -> None:
    """kv_b is absorbed into its neighbours, half of it transposed: its groups of 32 do not survive that. Left
    out or rounded, the logits would be other ones."""
    config = CONFIG32 | {"kv_lora_rank": 32}
    arrays = weights(config)
    arrays |= {f"config.{k}": np.array(v, np.float64) for k, v in parse_config(config).fields.items()}
    rng = np.random.default_rng(2)
    words = rng.integers(-(2**31), 2**31, (44, 4)).astype(np.int32)
    scales = rng.uniform(0.01, 0.1, (44, 1)).astype(np.float32)
    arrays[f"{KV_B}.weight"] = dequantised(words, scales)
    (tmp_path / "float").mkdir()
    expected = load(tmp_path / "float", arrays).session().score([1, 2, 3])
    del arrays[f"{KV_B}.weight"]
    arrays |= {f"{KV_B}.qw": words, f"{KV_B}.sc": scales}
    assert load(tmp_path, arrays).session().score([1, 2, 3]).tobytes() == expected.tobytes()


def test_data_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not a model bundle") as caught:
        load(tmp_path, {"plain.tokens": np.arange(3, dtype=np.int32)})
    assert caught.value.code == "bad_model"


def test_the_latent_eps_of_a_bundle_is_its_own_unless_given(tmp_path: Path) -> None:
    arrays = bundle() | {"config.latent_norm_eps": np.array(3e-6)}
    assert load(tmp_path, arrays).config["latent_norm_eps"] == 3e-6
    assert load(tmp_path, arrays, latent_norm_eps=1e-5).config["latent_norm_eps"] == 1e-5


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_routed_experts"])
def test_a_claim_of_millions_costs_nothing(tmp_path: Path, field: str) -> None:
    """The builder allocates for what the config says: a small folder could ask for all of the memory."""
    path = write_folder(tmp_path, CONFIG | {field: 2**24}, weights(CONFIG))
    with pytest.raises(EngineError, match=f"{field} is {2**24}") as caught:
        Engine.load(path, device="cpu")
    assert caught.value.code == "bad_model"


@pytest.mark.parametrize("empty", ["prompt.tokens", "plain.tokens"])
def test_a_golden_run_of_nothing_is_refused(tmp_path: Path, empty: str) -> None:
    """Catches kdtree-verify reading before the first token, or behind the last, of a list without any."""
    program = Path(sys.executable).with_name("kdtree-verify")
    if not program.exists():
        pytest.skip(f"NOT RUN: {program.name} is not installed beside this Python")
    vocab = int(CONFIG32["vocab_size"])
    arrays = bundle() | {
        "prompt.tokens": np.arange(4, dtype=np.int32),
        "plain.tokens": np.arange(3, dtype=np.int32),
        "draft.position": np.arange(1, dtype=np.int32),
        "draft.tokens": np.zeros((1, 1, 1), np.int32),
        "draft.logp": np.zeros((1, 1, 1), np.float32),
    }
    arrays[empty] = arrays[empty][:0]
    arrays["plain.logits"] = np.zeros((len(arrays["plain.tokens"]), vocab), np.float32)
    kdtr.write(tmp_path / "golden.kdtr", arrays)
    run = subprocess.run([program, tmp_path / "golden.kdtr"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1 and run.stdout == ""
    assert f"{empty} has 0 tokens" in run.stderr or f"{empty} 0" in run.stderr
