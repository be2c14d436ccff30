"""INT4 and fp8 folders: the tensors arrive as they are stored, and the engine computes with code x scale.

Expected values come from `folders.plain`, which follows the definition number by number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import CONFIG, FP8, INT4, QUANTIZED, bf16, e4m3, fp8, int4, plain, safetensors_bytes, weights, write_folder

from kdtree_engine import Engine, EngineError
from kdtree_engine.checkpoint import open_checkpoint

TOKENS = list(b"a few tokens, so that several experts are chosen")
INT4_CONFIG = QUANTIZED | {"quantization_config": INT4}
FP8_CONFIG = CONFIG | {"quantization_config": FP8}


def scores(path: Path, **options: Any) -> bytes:
    return Engine.load(path, device="cpu", **options).session().score(TOKENS).tobytes()


def test_int4_has_the_bits_of_the_exact_products(tmp_path: Path) -> None:
    """Nibbles in another order, an offset of 7 for 8, scales of the wrong group: each changes the bits."""
    arrays = int4(weights(QUANTIZED))
    quantised = write_folder(tmp_path / "int4", INT4_CONFIG, arrays)
    assert scores(quantised) == scores(write_folder(tmp_path / "plain", QUANTIZED, plain(arrays)))


def test_int4_rounded_has_the_bits_of_the_bf16_matrix(tmp_path: Path) -> None:
    arrays = int4(weights(QUANTIZED))
    quantised = write_folder(tmp_path / "int4", INT4_CONFIG, arrays)
    expected = scores(write_folder(tmp_path / "plain", QUANTIZED, plain(arrays, rounded=True)))
    assert scores(quantised, rounding="bf16") == expected
    assert scores(quantised) != expected


def test_int4_all_sixteen_codes_and_both_scale_types(tmp_path: Path) -> None:
    """A quantiser with an amax / 7 grid never writes code 0: a kernel that cannot read it goes unnoticed."""
    arrays = int4(weights(QUANTIZED))
    name = "model.layers.1.mlp.experts.0.up_proj"
    words = np.tile(np.array([0x76543210, 0xFEDCBA98], np.uint32).view(np.int32), (32, 4))
    arrays[f"{name}.weight_packed"] = words
    expected = plain(arrays)
    assert set(expected[f"{name}.weight"][0, :16] / expected[f"{name}.weight"][0, 9]) == set(range(-8, 8))
    reference = scores(write_folder(tmp_path / "plain", QUANTIZED, expected))
    assert scores(write_folder(tmp_path / "bf16", INT4_CONFIG, arrays)) == reference
    wide = {
        n: (a.astype(np.uint32) << 16).view(np.float32) if n.endswith("weight_scale") else a for n, a in arrays.items()
    }
    assert scores(write_folder(tmp_path / "f32", INT4_CONFIG, wide)) == reference


def test_int4_sizes_of_64_bits(tmp_path: Path) -> None:
    """32 bits in Kimi's files, 64 in those that the package itself writes."""
    arrays = int4(weights(QUANTIZED))
    long = {n: a.astype(np.int64) if n.endswith("weight_shape") else a for n, a in arrays.items()}
    a, b = (write_folder(tmp_path / str(i), INT4_CONFIG, x) for i, x in enumerate((arrays, long)))
    assert scores(a) == scores(b)


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "language_model.", "model.language_model."])
@pytest.mark.parametrize("inside", [False, True])
def test_prefixes_of_a_wrapper(tmp_path: Path, prefix: str, inside: bool) -> None:
    """Published, of some exporters, of transformers 5: the same model. A prefix that is not known leaves the
    model without weights."""
    arrays = int4(weights(QUANTIZED))
    expected = scores(write_folder(tmp_path / "plain", QUANTIZED, plain(arrays)))
    named: dict[str, np.ndarray] = {}
    for name, a in arrays.items():
        head = "language_model.lm_head." if prefix.startswith("language_model.") else "lm_head."
        named[name.replace("model.", prefix, 1) if prefix and name.startswith("model.") else name] = a
        if name.startswith("lm_head."):
            del named[name]
            named[name.replace("lm_head.", head)] = a
    config: dict[str, Any] = INT4_CONFIG
    if inside:
        config = {
            "model_type": "kimi_k25", "text_config": INT4_CONFIG | {"model_type": "kimi_k2"}, "vision_config": {},
            "media_placeholder_token_id": 299, "tie_word_embeddings": False,
        }  # fmt: skip
        named |= {
            "vision_tower.encoder.blocks.0.wo.weight": np.zeros((3, 5), np.float32),
            "mm_projector.proj.0.bias": np.zeros(7, np.float32),
        }
    path = write_folder(tmp_path / "model", config, named, shards=3)
    assert scores(path) == expected
    if inside:
        with pytest.raises(EngineError, match="token 299 stands for an image"):
            Engine.load(path, device="cpu").session().score([5, 299])


def test_vision_tensors_are_skipped_in_a_wrapper_only(tmp_path: Path) -> None:
    extra = {"vision_tower.patch_embed.proj.bias": np.ones(3, np.float32)}
    with pytest.raises(EngineError, match="vision_tower"):
        Engine.load(write_folder(tmp_path, CONFIG, weights(CONFIG) | extra), device="cpu")


def test_one_tensor_under_two_prefixes(tmp_path: Path) -> None:
    arrays = weights(CONFIG)
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(EngineError, match="both hold") as caught:
        Engine.load(write_folder(tmp_path, CONFIG, arrays | {f"language_model.{name}": arrays[name]}), device="cpu")
    assert name in str(caught.value)


# -- fp8 -----------------------------------------------------------------------------------------------------

RAGGED = FP8_CONFIG | {"hidden_size": 160, "moe_intermediate_size": 136, "kv_lora_rank": 132}
"""Blocks that are cut off on both sides."""


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_fp8_has_the_bits_of_the_products(tmp_path: Path, powers_of_two: bool) -> None:
    """Scales transposed, a block border missed, an exponent bias off by one."""
    arrays = fp8(weights(RAGGED), powers_of_two=powers_of_two)
    quantised = write_folder(tmp_path / "fp8", RAGGED, arrays)
    expected = write_folder(tmp_path / "plain", RAGGED | {"quantization_config": None}, plain(arrays))
    assert scores(quantised) == scores(expected)


def test_fp8_takes_half_the_memory_where_that_loses_nothing(tmp_path: Path) -> None:
    """With scales that are powers of two (ue8m0) every product is a bf16 number."""
    sizes = {}
    for powers_of_two in (False, True):
        arrays = fp8(weights(RAGGED), powers_of_two=powers_of_two)
        path = write_folder(tmp_path / str(powers_of_two), RAGGED, arrays)
        sizes[powers_of_two] = [
            Engine.load(path, device="cpu", rounding=rule).weight_bytes  # type: ignore[arg-type]
            for rule in ("exact", "bf16")
        ]
    assert sizes[True] == [sizes[False][1]] * 2 and sizes[False][0] > 1.5 * sizes[False][1]


def test_fp8_rounded_has_the_bits_of_the_bf16_matrix(tmp_path: Path) -> None:
    arrays = fp8(weights(RAGGED))
    quantised = write_folder(tmp_path / "fp8", RAGGED, arrays)
    rounded = plain(arrays, rounded=True)
    expected = scores(write_folder(tmp_path / "plain", RAGGED | {"quantization_config": None}, rounded))
    assert scores(quantised, rounding="bf16") == expected and scores(quantised) != expected


def test_fp8_bf16_scales_are_widened(tmp_path: Path) -> None:
    arrays = fp8(weights(RAGGED), powers_of_two=True)
    halves = {n: bf16(a) if n.endswith("_scale_inv") else a for n, a in arrays.items()}
    assert scores(write_folder(tmp_path / "a", RAGGED, arrays)) == scores(write_folder(tmp_path / "b", RAGGED, halves))


def test_the_values_of_all_fp8_codes(tmp_path: Path) -> None:
    """The 254 codes that are numbers, subnormals and both zeros among them, one by one through the head:
    logits are sums over one weight each where the norm before it leaves one input."""
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    values = e4m3(codes)
    assert values.max() == 448 and values[1] == 2.0**-9 and len(set(values.tolist())) == 253
    config = CONFIG | {"vocab_size": 254}
    arrays = weights(config)
    arrays["model.norm.weight"] = np.eye(1, 32, 5, dtype=np.float32)[0]
    head = np.zeros((254, 32), np.uint8)
    head[:, 5] = codes
    quantised = {"lm_head.weight": head, "lm_head.weight_scale_inv": np.array([[1.0], [1.0]], np.float32)}
    path = write_folder(tmp_path, config | {"quantization_config": FP8}, arrays | quantised)
    logits = Engine.load(path, device="cpu").session().score([7])[0]
    assert (logits == logits[0x38] * values).all(), "code 0x38 is 1"


# -- refusals ------------------------------------------------------------------------------------------------

EXPERT = "model.layers.1.mlp.experts.2.down_proj"
FP8_NAME = "model.layers.0.self_attn.kv_b_proj.weight"


class Unused:
    """A builder that no tensor may reach."""

    def __init__(self, config: dict[str, Any]) -> None:
        from folders import shapes

        self.wanted = shapes(config)

    def expected(self) -> list[tuple[str, list[int], bool]]:
        return [(name, list(shape), name != "model.embed_tokens.weight") for name, shape in self.wanted.items()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add"):
            raise AssertionError("a tensor was used before the audit was over")
        raise AttributeError(name)


def refused(path: Path, config: dict[str, Any], *says: str) -> str:
    with pytest.raises(EngineError) as caught, open_checkpoint(path) as checkpoint:
        checkpoint.load_into(Unused(config))
    message = str(caught.value)
    assert all(word in message for word in says) and "\n" not in message, message
    return caught.value.code


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape"])
def test_int4_each_missing_part_is_named(tmp_path: Path, part: str) -> None:
    """transformers pairs the scales that are left with the wrong experts, and says nothing."""
    arrays = int4(weights(QUANTIZED))
    for module in (EXPERT, "model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts.3.up_proj"):
        less = {n: a for n, a in arrays.items() if n != f"{module}.{part}"}
        path = write_folder(tmp_path / module, INT4_CONFIG, less)
        assert refused(path, QUANTIZED, f"{module}.{part} is missing") == "bad_model"


@pytest.mark.parametrize(
    ("part", "bad", "says"),
    [
        ("weight_packed", np.ones((64, 4), np.float32), "dtype F32"),
        ("weight_packed", np.ones((64, 5), np.int32), "[64, 4]"),
        ("weight_packed", np.ones((4, 64), np.int32), "[64, 4]"),
        ("weight_scale", np.ones((64, 1), np.float16), "dtype F16"),
        ("weight_scale", np.ones((64, 2), np.uint16), "[64, 1]"),
        ("weight_scale", np.ones((1, 64), np.uint16), "[64, 1]"),
        ("weight_scale", np.ones((64, 1), np.int32), "dtype I32"),
        ("weight_shape", np.ones(3, np.int32), "[2]"),
        ("weight_shape", np.ones(2, np.float32), "dtype F32"),
        ("weight_zero_point", np.ones((8, 1), np.int32), "asymmetric"),
        ("weight_g_idx", np.ones(32, np.int32), "g_idx"),
        ("weight_scale_inv", np.ones((1, 1), np.float32), "another format"),
        ("weight", np.ones((64, 32), np.float32), "whole without it"),
    ],
)
def test_int4_parts_that_do_not_fit(tmp_path: Path, part: str, bad: np.ndarray, says: str) -> None:
    arrays = int4(weights(QUANTIZED)) | {f"{EXPERT}.{part}": bad}
    refused(write_folder(tmp_path, INT4_CONFIG, arrays), QUANTIZED, EXPERT, says)


def test_int4_sizes_that_contradict_the_words(tmp_path: Path) -> None:
    """Sizes are values, not header: read in the stream, refused before the model is there."""
    arrays = int4(weights(QUANTIZED)) | {f"{EXPERT}.weight_shape": np.array([32, 64], np.int32)}
    with pytest.raises(EngineError, match=r"weight_shape is \[32, 64\]; expected \[64, 32\]"):
        Engine.load(write_folder(tmp_path, INT4_CONFIG, arrays), device="cpu")


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0])
@pytest.mark.parametrize("rounding", ["exact", "bf16"])
def test_int4_scales_that_are_not_finite(tmp_path: Path, value: int, rounding: Any) -> None:
    arrays = int4(weights(QUANTIZED))
    arrays[f"{EXPERT}.weight_scale"][63, 0] = value
    with pytest.raises(EngineError, match=EXPERT) as caught:
        Engine.load(write_folder(tmp_path, INT4_CONFIG, arrays), device="cpu", rounding=rounding)
    assert caught.value.code == "not_finite"


def test_int4_a_width_that_groups_do_not_divide(tmp_path: Path) -> None:
    config = INT4_CONFIG | {"moe_intermediate_size": 48}
    arrays = int4(weights(QUANTIZED | {"moe_intermediate_size": 48}))
    refused(write_folder(tmp_path, config, arrays), config, "48 inputs", "group size 32")


def test_int4_where_floating_point_must_be(tmp_path: Path) -> None:
    arrays = weights(QUANTIZED)
    del arrays["model.embed_tokens.weight"]
    arrays |= {
        "model.embed_tokens.weight_packed": np.ones((300, 8), np.int32),
        "model.embed_tokens.weight_scale": np.ones((300, 2), np.float32),
        "model.embed_tokens.weight_shape": np.array([300, 64], np.int32),
    }
    refused(write_folder(tmp_path, INT4_CONFIG, arrays), QUANTIZED, "embed_tokens", "floating point")


def test_int4_without_a_quantization_config_and_the_reverse(tmp_path: Path) -> None:
    """Half a conversion: the tensors are new and the config is old, or the other way round."""
    arrays = int4(weights(QUANTIZED))
    refused(write_folder(tmp_path / "a", QUANTIZED, arrays), QUANTIZED, "int4", "no quantization_config")
    refused(write_folder(tmp_path / "b", INT4_CONFIG, plain(arrays)), QUANTIZED, "is to be INT4", "experts.0")
    fp8_said = QUANTIZED | {"quantization_config": FP8}
    refused(write_folder(tmp_path / "c", fp8_said, arrays), QUANTIZED, "int4", "says otherwise")
    refused(write_folder(tmp_path / "d", fp8_said, plain(arrays)), QUANTIZED, "fp8, but none is")


def test_int4_of_a_module_that_the_config_ignores(tmp_path: Path) -> None:
    """And an expert that was left in floating point: something was replaced by half."""
    arrays = int4(weights(QUANTIZED))
    head = {
        "lm_head.weight_packed": np.ones((300, 8), np.int32),
        "lm_head.weight_scale": np.ones((300, 2), np.float32),
        "lm_head.weight_shape": np.array([300, 64], np.int32),
    }
    packed = {n: a for n, a in arrays.items() if n != "lm_head.weight"} | head
    refused(write_folder(tmp_path / "a", INT4_CONFIG, packed), QUANTIZED, "lm_head", "is not to be INT4")
    one = {n: a for n, a in arrays.items() if not n.startswith(EXPERT)}
    one[f"{EXPERT}.weight"] = plain(arrays)[f"{EXPERT}.weight"]
    refused(write_folder(tmp_path / "b", INT4_CONFIG, one), QUANTIZED, EXPERT, "is to be INT4")


@pytest.mark.parametrize(
    ("part", "bad", "says"),
    [
        ("_scale_inv", None, "is missing"),
        ("", None, "is missing"),
        ("_scale_inv", np.ones((1, 1), np.float16), "dtype F16"),
        ("_scale_inv", np.ones((2, 1), np.float32), "[1, 1]"),
        ("_scale_inv", np.ones(1, np.float32), "[1, 1]"),
        ("", np.ones((44, 23), np.uint8), "[44, 24]"),
    ],
)
def test_fp8_parts_that_do_not_fit(tmp_path: Path, part: str, bad: np.ndarray | None, says: str) -> None:
    arrays = fp8(weights(CONFIG))
    if bad is None:
        del arrays[FP8_NAME + part]
    else:
        arrays[FP8_NAME + part] = bad
    refused(write_folder(tmp_path, FP8_CONFIG, arrays), CONFIG, FP8_NAME, says)


def test_fp8_scales_beside_a_matrix_that_needs_none(tmp_path: Path) -> None:
    arrays = fp8(weights(CONFIG))
    arrays[FP8_NAME] = weights(CONFIG)[FP8_NAME]
    refused(write_folder(tmp_path, FP8_CONFIG, arrays), CONFIG, FP8_NAME)


def test_fp8_of_a_vector(tmp_path: Path) -> None:
    arrays = weights(CONFIG) | {
        "model.norm.weight": np.ones(32, np.uint8), "model.norm.weight_scale_inv": np.ones(1, np.float32),
    }  # fmt: skip
    refused(write_folder(tmp_path, FP8_CONFIG, arrays), CONFIG, "model.norm.weight", "floating point")


@pytest.mark.parametrize("what", ["NaN code", "NaN scale", "infinite scale", "overflow"])
@pytest.mark.parametrize("rounding", ["exact", "bf16"])
def test_fp8_that_is_not_finite(tmp_path: Path, what: str, rounding: Any) -> None:
    arrays = fp8(weights(CONFIG))
    if what == "NaN code":
        arrays[FP8_NAME][43, 23] = 0xFF
    else:
        arrays[FP8_NAME][0, 0] = 0x7E
        arrays[f"{FP8_NAME}_scale_inv"][0, 0] = {"NaN scale": np.nan, "infinite scale": -np.inf, "overflow": 1e38}[what]
    with pytest.raises(EngineError, match="kv_b_proj") as caught:
        Engine.load(write_folder(tmp_path, FP8_CONFIG, arrays), device="cpu", rounding=rounding)
    assert caught.value.code == "not_finite"


def test_rounding_is_one_of_two_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="rounding is 'f16'; expected one of exact, bf16"):
        Engine.load(tmp_path, rounding="f16")  # type: ignore[arg-type]


def test_data_that_is_as_misaligned_as_its_header(tmp_path: Path) -> None:
    """A header of odd length puts every number at an odd address."""
    arrays = int4(weights(QUANTIZED))
    expected = scores(write_folder(tmp_path / "even", INT4_CONFIG, arrays))
    path = write_folder(tmp_path / "odd", INT4_CONFIG, arrays)
    raw = safetensors_bytes(arrays)
    size = int.from_bytes(raw[:8], "little")
    pad = 1 + (size % 2 == 1)
    text = raw[8 : 8 + size] + b" " * pad
    assert len(text) % 2 == 1
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    assert scores(path) == expected
