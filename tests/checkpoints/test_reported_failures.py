"""Failures that users of other engines reported for these models, one test each.

Each test names the report that it comes from and fails if this engine had the same fault. Rows that other tests
hold in full are here as the shortest form that still fails.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import CONFIG, FP8, INT4, QUANTIZED, bf16, fp8, int4, plain, safetensors_bytes, weights, write_folder

from harness.reference import rope as reference_rope
from harness.reference.model import Model
from kdtree_engine import Engine, EngineError, kdtr
from kdtree_engine.config import parse_config

TOKENS = list(b"some text that sends its tokens to all of the experts")
Arrays = dict[str, np.ndarray]
GATE = "model.layers.1.mlp.gate"


def engine(path: Path, config: dict[str, Any], arrays: Arrays | None = None, **options: Any) -> Engine:
    return Engine.load(write_folder(path, config, arrays), device="cpu", **options)


def scores(path: Path, config: dict[str, Any], arrays: Arrays | None = None, **options: Any) -> np.ndarray:
    return engine(path, config, arrays, **options).session().score(TOKENS)


def oracle(config: dict[str, Any], arrays: Arrays, positions: list[int] | None = None) -> np.ndarray:
    """float64 logits of TOKENS, at positions from 0 on unless given."""
    model = Model(dict(parse_config(config).fields), arrays)  # type: ignore[arg-type]
    return model.forward(TOKENS, positions or range(len(TOKENS))).logits


def agrees(ours: np.ndarray, theirs: np.ndarray, bound: float = 1e-5) -> bool:
    return float(np.abs(ours - theirs).max()) <= bound * max(1.0, float(np.abs(theirs).max()))


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(base) | changes


# -- numbers of the config -------------------------------------------------------------------------------------

K2_ROPE = {
    "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
V3_ROPE = K2_ROPE | {"beta_fast": 32.0, "factor": 40.0}
HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
RELEASES: dict[str, tuple[float, dict[str, Any], float, dict[int, float]]] = {
    "K2-Instruct": (
        50000.0, K2_ROPE, 0.130861, {8: 6.68740e-2, 9: 4.76886e-2, 16: 4.47214e-3, 19: 1.62176e-3, 20: 3.61405e-5},
    ),
    "K2-0905": (50000.0, K2_ROPE | {"factor": 64.0}, 0.144680, {19: 1.62176e-3, 20: 1.80702e-5, 31: 4.38221e-7}),
    "K2.5": (
        50000.0, K2_ROPE | {"factor": 64.0, "beta_fast": 32.0}, 0.144680,
        {8: 6.68740e-2, 9: 4.37767e-2, 16: 1.53730e-3, 19: 1.58375e-4, 20: 1.80702e-5, 31: 4.38221e-7},
    ),
    "DeepSeek-V3": (
        10000.0, V3_ROPE, 0.135234, {8: 0.1, 9: 7.49894e-2, 16: 5.5e-3, 19: 1.37051e-3, 20: 7.90569e-4, 31: 3.3338e-6},
    ),
    "V2-Lite": (10000.0, V3_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}, 0.114721, {9: 7.49894e-2}),
}  # fmt: skip
"""theta, YaRN, and what follows from them: the softmax scale and some inverse frequencies."""


@pytest.mark.parametrize("release", RELEASES)
def test_yarn_of_each_release(tmp_path: Path, release: str) -> None:
    """radixark/miles#335 (row 30): beta_fast defaulted to 32 where K2 has 1. NVIDIA/Megatron-LM#1429 (row 34),
    huggingface/optimum-intel#1877 (row 36): the softmax scale without its correction."""
    theta, yarn, scale, frequencies = RELEASES[release]
    loaded = engine(tmp_path, changed(CONFIG, rope_theta=theta, rope_scaling=yarn, **HEADS))
    assert loaded.native.config["softmax_scale"] == pytest.approx(scale, rel=4e-6)
    found = loaded.native.rope_inverse_frequencies
    assert len(found) == 32
    for i, value in frequencies.items():
        assert found[i] == pytest.approx(value, rel=4e-6), i


def test_the_softmax_correction_is_of_mscale_all_dim(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1429 (row 34): taken from mscale, which most releases give the same value."""
    yarn = K2_ROPE | {"mscale": 0.5, "mscale_all_dim": 1.5}
    loaded = engine(tmp_path, changed(CONFIG, rope_scaling=yarn, **HEADS))
    m = 0.1 * 1.5 * np.log(32.0) + 1
    assert loaded.native.config["softmax_scale"] == pytest.approx(192**-0.5 * m * m, rel=1e-12)


def test_v2_has_the_softmax_correction(tmp_path: Path) -> None:
    """huggingface/transformers#47435 (row 33): the reference itself left it out for DeepSeek V2."""
    v2 = {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
        "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
        "rope_scaling": V3_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }  # fmt: skip
    config = changed(CONFIG, **v2, **HEADS)
    arrays = {n: a for n, a in weights(config).items() if not n.endswith("bias")}
    assert engine(tmp_path, config, arrays).native.config["softmax_scale"] == pytest.approx(0.114721, rel=4e-6)


def test_the_amplitude_of_cos_and_sin_is_one(tmp_path: Path) -> None:
    """kekzl/imp#880 (row 32): mscale applied to cos and sin as well, an error that grows with the position. A
    rotation keeps the length of every pair."""
    loaded = engine(tmp_path, changed(CONFIG, rope_scaling=K2_ROPE))
    session = loaded.session()
    session.score([5] * 300)  # one token over and over: before its rotation, one key
    pairs = session.native.cache(0)[:, -8:].reshape(300, 4, 2)
    length = np.hypot(pairs[..., 0], pairs[..., 1])
    assert np.abs(length / length[0] - 1).max() < 1e-6


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_the_eps_of_the_latent_norms(tmp_path: Path, eps: float) -> None:
    """huggingface/transformers#44261, vllm#35515 (row 38): 1e-6 whatever rms_norm_eps says in one engine,
    rms_norm_eps in another. Logits hide it; latents as small as their eps do not."""
    arrays = weights(CONFIG)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    arrays[name] *= 1e-3
    options = {} if eps == 1e-6 else {"latent_norm_eps": eps}
    session = engine(tmp_path, CONFIG, arrays, **options).session()
    session.score([7])
    x = arrays["model.embed_tokens.weight"][7].astype(np.float64)
    h = x / np.sqrt((x * x).mean() + CONFIG["rms_norm_eps"]) * arrays["model.layers.0.input_layernorm.weight"]
    latent = (arrays[name].astype(np.float64) @ h)[:24]
    gain = arrays["model.layers.0.self_attn.kv_a_layernorm.weight"]
    expected = latent / np.sqrt((latent * latent).mean() + eps) * gain
    assert np.allclose(session.native.cache(0)[0, :24], expected, rtol=2e-6, atol=0)
    assert (latent * latent).mean() < 1e-5


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_of_rope(tmp_path: Path, interleaved: bool) -> None:
    """huggingface/transformers#39687, vllm#26995 (row 37): neighbours and halves confused. The keys of one
    token at two positions, against the rotation in float64."""
    config = changed(CONFIG, rope_interleave=interleaved)
    session = engine(tmp_path, config).session()
    session.score([5] * 3)
    keys = session.native.cache(0)[:, -8:].astype(np.float64)
    frequency = reference_rope.inverse_frequencies(dict(parse_config(config).fields))  # type: ignore[arg-type]
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 4), slice(4, 8))
    for position in (1, 2):
        turned = (keys[0, first] + 1j * keys[0, second]) * np.exp(1j * position * frequency)
        assert np.allclose(keys[position, first], turned.real, atol=1e-6)
        assert np.allclose(keys[position, second], turned.imag, atol=1e-6)


# -- the router ------------------------------------------------------------------------------------------------

ONE_EXPERT = changed(CONFIG, num_experts_per_tok=1, norm_topk_prob=False)


def test_the_bias_keeps_its_32_bits(tmp_path: Path) -> None:
    """vllm#23640, huggingface/transformers#42580 (row 39): kept in bf16, it loses what decides between two
    experts. Experts 0 and 1 score alike; expert 1's bias is larger by less than bf16 can say."""
    arrays = weights(ONE_EXPERT)
    arrays[f"{GATE}.weight"][1] = arrays[f"{GATE}.weight"][0]
    bias = f"{GATE}.e_score_correction_bias"

    def with_bias(name: str, first: float, second: float) -> bytes:
        changed_ = arrays | {bias: np.array([first, second, -9, -9], np.float32)}
        return scores(tmp_path / name, ONE_EXPERT, changed_).tobytes()

    assert np.float32(1 + 2**-20) != 1 and bf16(np.array([1 + 2**-20], np.float32)) == bf16(np.ones(1, np.float32))
    first, second = with_bias("a", 9, 0), with_bias("b", 0, 9)
    assert first != second
    assert with_bias("c", 1, 1 + 2**-20) == second and with_bias("d", 1 + 2**-20, 1) == first
    assert with_bias("e", 1, 1) == first, "a tie goes to the lower id"


def test_the_router_computes_in_32_bits(tmp_path: Path) -> None:
    """vllm#14027 (row 43): logits of the router in bf16. Experts 0 and 1 differ by a few units of float32."""
    arrays = weights(ONE_EXPERT)
    gate = np.full((4, 32), -1.0, np.float32) * np.sign(arrays[f"{GATE}.weight"][0])
    gate[0] = gate[1] = arrays[f"{GATE}.weight"][0]
    arrays |= {f"{GATE}.weight": gate, f"{GATE}.e_score_correction_bias": np.array([5, 5, 0, 0], np.float32)}
    same = scores(tmp_path / "a", ONE_EXPERT, arrays)
    nearly = gate.copy()
    nearly[1] *= np.float32(1 + 2**-16)
    other = scores(tmp_path / "b", ONE_EXPERT, arrays | {f"{GATE}.weight": nearly})
    assert (bf16(nearly) == bf16(gate)).all()
    positive = (same != other).any(axis=1)
    assert positive.any() and not positive.all(), "a larger positive score wins, a larger negative one loses"


def test_the_bias_chooses_and_does_not_weigh(tmp_path: Path) -> None:
    """vllm#11971 (row 41): the bias added into the weights of the experts."""
    config = changed(CONFIG, norm_topk_prob=False)
    arrays = weights(config)
    bias = f"{GATE}.e_score_correction_bias"
    shifted = arrays | {bias: arrays[bias] + np.float32(4)}
    assert scores(tmp_path / "a", config, arrays).tobytes() == scores(tmp_path / "b", config, shifted).tobytes()


def test_a_bias_that_is_not_there_is_not_zero(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4199 (row 42): a conversion that left the bias at zero."""
    arrays = weights(CONFIG)
    del arrays[f"{GATE}.e_score_correction_bias"]
    with pytest.raises(EngineError, match="e_score_correction_bias"):
        engine(tmp_path, CONFIG, arrays)


def test_more_than_256_experts(tmp_path: Path) -> None:
    """llama.cpp#14642 (row 28): 384 experts refused, or counted in a byte. Against the float64 oracle."""
    config = changed(CONFIG, n_routed_experts=384, num_experts_per_tok=8)
    arrays = weights(config)
    assert agrees(scores(tmp_path, config, arrays), oracle(config, arrays))


def test_no_norm_of_a_query_that_has_no_latent(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5261 (row 45): q_lora_rank null, and a q norm that does not exist."""
    config = changed(CONFIG, q_lora_rank=None)
    arrays = weights(config)
    assert agrees(scores(tmp_path / "a", config, arrays), oracle(config, arrays))
    extra = {"model.layers.0.self_attn.q_a_layernorm.weight": np.ones(20, np.float32)}
    with pytest.raises(EngineError, match="q_a_layernorm"):
        engine(tmp_path / "b", config, arrays | extra)


def test_positions_at_the_end_of_a_long_context(tmp_path: Path) -> None:
    """ktransformers#1961 (row 10): random tokens after some tens of thousands of positions. A draft of the text
    as a chain at the last positions of K2's context, against the float64 oracle; angles one unit of float32
    off would show."""
    config = changed(CONFIG, max_position_embeddings=262144, rope_scaling=K2_ROPE | {"factor": 64.0})
    arrays = weights(config)
    session = engine(tmp_path, config, arrays).session(context=262144)
    n, first = len(TOKENS), 262144 - len(TOKENS)
    positions = [first + i for i in range(n)]
    chain = [list(range(i + 1)) for i in range(n)]
    logits, _ = session.native.run_rows(TOKENS, positions, [0] * n, chain, list(range(n)))
    assert agrees(logits, oracle(config, arrays, positions))
    assert not agrees(logits, oracle(config, arrays, [p - 1 for p in positions]), 1e-6), "the bound is too wide"


# -- loading ---------------------------------------------------------------------------------------------------

INT4_CONFIG = changed(QUANTIZED, quantization_config=INT4)
EVERYWHERE = changed(INT4, ignore=[])


def test_the_format_is_told_by_type_and_scales(tmp_path: Path) -> None:
    """sglang#24091 (row 4): plain INT4 taken for MXINT4 because bits and group agree."""
    arrays = int4(weights(QUANTIZED))
    bytes_for_scales = {
        n: (a >> 8).astype(np.uint8) if n.endswith("weight_scale") else a for n, a in arrays.items()
    }  # E8M0: exponents alone
    with pytest.raises(EngineError, match="weight_scale"):
        engine(tmp_path / "a", INT4_CONFIG, bytes_for_scales)
    float4 = copy.deepcopy(INT4)
    float4["config_groups"]["group_0"]["weights"]["type"] = "float"
    with pytest.raises(EngineError, match="type is 'float'"):
        engine(tmp_path / "b", changed(QUANTIZED, quantization_config=float4), arrays)


def test_the_value_of_each_code(tmp_path: Path) -> None:
    """vllm#28574 (row 14): float4 codes where uint4 with offset 8 was meant. The head in INT4: a logit is the
    code's value times an input times the scale, and the first row's code is 1."""
    config = changed(QUANTIZED, vocab_size=16, quantization_config=changed(INT4, ignore=[]))
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["lm_head"]
    arrays = weights(config)
    del arrays["lm_head.weight"]
    codes = np.array([9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15], np.uint32)  # of input 5; others are 0
    words = np.full((16, 8), 0x88888888, np.uint32)
    words[:, 0] = 0x88088888 | codes << 20
    arrays |= {
        "lm_head.weight_packed": words.view(np.int32),
        "lm_head.weight_scale": bf16(np.full((16, 2), 0.5, np.float32)),
        "lm_head.weight_shape": np.array([16, 64], np.int32),
    }
    logits = engine(tmp_path, config, arrays).session().score([3])[0]
    assert (logits == logits[0] * (codes.astype(np.float32) - 8)).all() and logits[0] != 0


def test_int4_on_every_linear_layer(tmp_path: Path) -> None:
    """compressed-tensors#652 (row 17): code that reads ``.weight`` of a layer that has none. Attention (kv_b too),
    shared experts, dense layers and the head in INT4, as generic quantisers leave them."""
    config = changed(QUANTIZED, q_lora_rank=32, kv_lora_rank=32, v_head_dim=16, quantization_config=EVERYWHERE)
    names = {
        n.replace("_proj", ".mlp.experts._proj").replace("lm_head", "lm_head.mlp.experts."): a
        for n, a in weights(config).items()
    }
    arrays = {
        n.replace(".mlp.experts._proj", "_proj").replace("lm_head.mlp.experts.", "lm_head"): a
        for n, a in int4(names).items()
    }
    packed = [n for n in arrays if n.endswith("weight_packed")]
    assert any("kv_b_proj" in n for n in packed) and any("lm_head" in n for n in packed)
    expected = scores(tmp_path / "a", changed(config, quantization_config=None), plain(arrays))
    assert (scores(tmp_path / "b", config, arrays) == expected).all()


def test_two_ways_to_load_are_one_model(tmp_path: Path) -> None:
    """ktransformers#2092 (row 12): one of several load paths did not load the weights. A folder, a folder with
    fused experts, a bundle: the same bits."""
    arrays = int4(weights(QUANTIZED))
    expected = scores(tmp_path / "a", INT4_CONFIG, arrays).tobytes()
    bundle: Arrays = {f"config.{k}": np.array(v) for k, v in parse_config(INT4_CONFIG).fields.items()}
    for name, a in arrays.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            bundle[f"{module}.qw"] = a
        elif part == "weight_scale":
            bundle[f"{module}.sc"] = a.view(kdtr.BF16_BITS)
        elif part != "weight_shape":
            bundle[name] = a
    kdtr.write(tmp_path / "model.kdtr", bundle)
    loaded = Engine.load(tmp_path / "model.kdtr", device="cpu")
    assert loaded.session().score(TOKENS).tobytes() == expected
    numbers = plain(arrays)
    base = "model.layers.1.mlp.experts"
    parts = {
        p: np.stack([numbers.pop(f"{base}.{e}.{p}_proj.weight") for e in range(4)]) for p in ("gate", "up", "down")
    }
    numbers |= {
        f"{base}.gate_up_proj": np.concatenate([parts["gate"], parts["up"]], 1),
        f"{base}.down_proj": parts["down"],
    }
    assert scores(tmp_path / "b", QUANTIZED, numbers).tobytes() == expected


def test_words_of_the_wrong_width_stop_at_the_border(tmp_path: Path) -> None:
    """ktransformers#2075 (row 11): int32 words passed where rows of bytes were expected."""
    arrays = int4(weights(QUANTIZED))
    name = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    with pytest.raises(EngineError, match="weight_packed"):
        engine(tmp_path, INT4_CONFIG, arrays | {name: arrays[name].view(np.uint8)})


def test_ignored_fused_experts(tmp_path: Path) -> None:
    """sglang#38443 (row 19): an ignore list that is not read for the fused name of its members."""
    arrays = weights(QUANTIZED)
    base = "model.layers.1.mlp.experts"
    parts = {p: np.stack([arrays.pop(f"{base}.{e}.{p}_proj.weight") for e in range(4)]) for p in ("gate", "up", "down")}
    arrays |= {
        f"{base}.gate_up_proj": np.concatenate([parts["gate"], parts["up"]], 1),
        f"{base}.down_proj": parts["down"],
    }
    ignoring = changed(INT4, ignore=[*INT4["ignore"], r"re:.*experts\.[0-9]+\..*"])
    engine(tmp_path / "a", changed(QUANTIZED, quantization_config=ignoring), arrays)
    with pytest.raises(EngineError, match="is to be INT4"):
        engine(tmp_path / "b", INT4_CONFIG, arrays)


def test_the_names_of_another_exporter(tmp_path: Path) -> None:
    """sglang#18370 (row 21): ``language_model.layers`` where ``language_model.model.layers`` was expected."""
    arrays = weights(CONFIG)
    renamed = {n.replace("model.", "language_model.", 1) if n.startswith("model.") else n: a for n, a in arrays.items()}
    assert (scores(tmp_path / "a", CONFIG, renamed) == scores(tmp_path / "b", CONFIG, arrays)).all()


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path, kind: Any) -> None:
    """huggingface/transformers#35688, deepseek-ai/DeepSeek-V3#267 (row 46): layer 61 reported as unused. As many
    as the config says, in whatever format; one more is a model whose config was cut."""
    extra = {
        "model.layers.2.eh_proj.weight": np.ones((32, 64), kind),
        "model.layers.2.mlp.experts.0.up_proj.weight": np.ones((16, 32), kind),
        "model.layers.2.mlp.experts.0.up_proj.weight_scale_inv": np.ones((1, 1), np.float32),
        "model.layers.2.shared_head.head.weight": np.ones((300, 32), kind),
    }
    arrays = weights(CONFIG)
    assert CONFIG["num_nextn_predict_layers"] == 1
    assert (scores(tmp_path / "a", CONFIG, arrays | extra) == scores(tmp_path / "b", CONFIG, arrays)).all()
    with pytest.raises(EngineError, match=r"model\.layers\.2"):
        engine(tmp_path / "c", changed(CONFIG, num_nextn_predict_layers=0), arrays | extra)


def test_an_absent_shard_stops_the_start(tmp_path: Path) -> None:
    """sglang#32279 (row 49): the index names a shard that is not there, and the server starts."""
    path = write_folder(tmp_path, CONFIG, shards=4)
    (path / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(EngineError, match="model-00003-of-00004"):
        Engine.load(path, device="cpu")


def test_offsets_that_contradict_shapes(tmp_path: Path) -> None:
    """llama.cpp#17064 (row 29): a converter wrote wrong offsets."""
    path = write_folder(tmp_path, CONFIG)
    raw = safetensors_bytes(weights(CONFIG))
    (path / "model.safetensors").write_bytes(raw.replace(b'"shape": [24]', b'"shape": [25]', 1))
    with pytest.raises(EngineError, match="kv_a_layernorm"):
        Engine.load(path, device="cpu")


def test_vision_is_left_out_by_name_not_by_chance(tmp_path: Path) -> None:
    """rtp-llm#942 (row 51): weights skipped in silence. Only the two known parts of a wrapper are; a third is
    an error."""
    config = {
        "model_type": "kimi_k25", "text_config": changed(CONFIG, model_type="kimi_k2"), "vision_config": {},
        "media_placeholder_token_id": 299, "tie_word_embeddings": False,
    }  # fmt: skip
    arrays = {f"language_model.{n}": a for n, a in weights(CONFIG).items()}
    known = {"vision_tower.a.weight": np.ones(2, np.float32), "mm_projector.b.weight": np.ones(2, np.float32)}
    engine(tmp_path / "a", config, arrays | known)
    with pytest.raises(EngineError, match="audio_tower"):
        engine(tmp_path / "b", config, arrays | known | {"audio_tower.a.weight": np.ones(2, np.float32)})


def test_fp8_is_dequantised_by_its_own_blocks(tmp_path: Path) -> None:
    """sglang#8120 (row 52): gibberish from the fp8 release. K2's kv_a_proj has four blocks and a half of rows:
    who spreads five scales evenly over 576 rows is wrong from row 116 on."""
    config = changed(CONFIG, kv_lora_rank=152, quantization_config=FP8)  # 160 rows: a block and a quarter
    arrays = fp8(weights(config))
    expected = scores(tmp_path / "a", changed(config, quantization_config=None), plain(arrays))
    assert (scores(tmp_path / "b", config, arrays) == expected).all()
