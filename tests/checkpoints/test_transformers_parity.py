"""Logits against transformers on the CPU, on checkpoints that transformers itself saved.

Bound: 1e-5 x max(1, largest |logit|) at every position of a few hundred tokens of real text. What the bound
can see is shown in test_fixture.py; here the shapes vary: every way to write a checkpoint down, and every
branch of the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import write_folder

from kdtree_engine import Engine, EngineError

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

TEXT = (Path(__file__).parents[1] / "data" / "hf_fixture" / "text.txt").read_text(encoding="utf-8")
TOKENS = list((TEXT * 2).encode())[:400]

K2 = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 56,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "norm_topk_prob": True,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128, "beta_fast": 1.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "attn_implementation": "eager",
}  # fmt: skip
"""Kimi K2's architecture in small: q_lora, YaRN with its step-like ramp, sigmoid router with a bias, one
group."""

YARN: dict[str, Any] = K2["rope_scaling"]  # type: ignore[assignment]

VARIANTS: dict[str, dict[str, Any]] = {
    "k2": {},
    "k2.5 ramp": {"rope_scaling": YARN | {"beta_fast": 32.0, "factor": 64.0}},
    "two mscales": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "mscale_all_dim 0": {"rope_scaling": YARN | {"mscale_all_dim": 0.0}},
    "moonlight": {
        "q_lora_rank": None, "rope_scaling": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446,
    },
    "v3 groups": {"n_group": 4, "topk_group": 2, "rope_theta": 10000.0, "routed_scaling_factor": 2.5},
    "no normalisation": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "neox rope": {"rope_interleave": False},
    "dense only": {"first_k_dense_replace": 4},
    "no dense layer": {"first_k_dense_replace": 0},
    "tied": {"tie_word_embeddings": True},
    "ragged widths": {  # as ragged as the grouped matmul of torch allows
        "hidden_size": 76, "kv_lora_rank": 36, "q_lora_rank": 28, "v_head_dim": 12,
        "moe_intermediate_size": 20,
    },
}  # fmt: skip


def make(seed: int = 0, **changes: Any) -> Any:
    """A random model whose every part matters: biases as large as the gaps between scores, norms that are
    not 1."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**(K2 | changes)))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            x = rng.standard_normal(tuple(p.shape))
            if name.endswith("bias"):
                x = 0.1 * x
            elif "norm" in name:
                x = 1 + 0.2 * x
            else:
                x = x / np.sqrt(p.shape[-1])
            p.copy_(torch.from_numpy(x).float())
    return model.eval()


def reference(folder: Path) -> np.ndarray:
    """float32 [tokens, vocab] of the checkpoint as transformers loads it, computed in float32."""
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return np.array(model.float().eval()(torch.tensor([TOKENS])).logits[0].numpy())


def compare(folder: Path) -> None:
    expected = reference(folder)
    logits = Engine.load(folder, device="cpu").session().score(TOKENS)
    difference = np.abs(logits.astype(np.float64) - expected).max(-1)
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    worst = int(difference.argmax())
    assert difference[worst] <= bound, f"{difference[worst]:g} at position {worst}; at most {bound:g}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_position_agrees(tmp_path: Path, variant: str) -> None:
    make(**VARIANTS[variant]).save_pretrained(tmp_path)
    compare(tmp_path)


def save_bf16(model: Any, path: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(path)


def save_f16(model: Any, path: Path) -> None:
    model.half().save_pretrained(path)


def save_fused(model: Any, path: Path) -> None:
    model.save_pretrained(path, save_original_format=False)


def save_fused_bf16(model: Any, path: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(path, save_original_format=False)


def save_shards(model: Any, path: Path) -> None:
    model.save_pretrained(path, max_shard_size="300KB")


def save_router_kept_in_f32(model: Any, path: Path) -> None:
    model.save_pretrained(path / "f32")
    half = transformers.DeepseekV3ForCausalLM.from_pretrained(path / "f32", dtype=torch.bfloat16)
    half.save_pretrained(path)


@pytest.mark.parametrize(
    "save", [save_bf16, save_f16, save_fused, save_fused_bf16, save_shards, save_router_kept_in_f32]
)
def test_every_way_of_saving_is_read(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    save(make(seed=1), tmp_path)
    compare(tmp_path)


def test_greedy_generation_agrees(tmp_path: Path) -> None:
    """Across decode steps too, and with trees: the token that transformers' own loop chooses."""
    model = make(seed=2)
    model.save_pretrained(tmp_path)
    prompt = TOKENS[:200]
    with torch.no_grad():
        run = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    best = torch.stack(run.logits)[:, 0].topk(2).values
    sure = (best[:, 0] - best[:, 1] > 1e-3).numpy()
    count = len(sure) if sure.all() else int(sure.argmin())
    assert count > 10, "near-ties from the start: the seed tests nothing"
    tokens = run.sequences[0, len(prompt) : len(prompt) + count].tolist()
    engine = Engine.load(tmp_path, device="cpu")
    for drafter in ("none", "planted"):
        result = (
            engine.session()
            .generate(prompt_tokens=prompt, max_tokens=count, ignore_eos=True, drafter=drafter, budget=16)
            .run()
        )
        assert result.tokens == tokens
    assert result.stats["accepted"] > 0


def test_the_cache_holds_what_transformers_caches(tmp_path: Path) -> None:
    """Latents after their norm, RoPE part after rotation. transformers writes that part de-interleaved."""
    model = make(seed=3)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        cache = model(torch.tensor([TOKENS]), use_cache=True).past_key_values
    session = Engine.load(tmp_path, device="cpu").session()
    session.score(TOKENS)
    for layer in range(4):
        ours = session.native.cache(layer)
        latent, rope = (getattr(cache.layers[layer], part)[0, 0].numpy() for part in ("keys", "values"))
        order = [*range(0, 16, 2), *range(1, 16, 2)]
        theirs = np.concatenate([latent, rope], -1)
        permuted = np.concatenate([ours[:, :64], ours[:, 64:][:, order]], -1)
        assert np.abs(permuted - theirs).max() <= 1e-5 * max(1.0, float(np.abs(theirs).max()))


def test_what_transformers_takes_in_silence_we_refuse(tmp_path: Path) -> None:
    """A missing router bias is zero there, a missing head random."""
    make(seed=4).save_pretrained(tmp_path / "model")
    arrays = dict(safetensors_numpy.load_file(tmp_path / "model" / "model.safetensors"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for name in ("model.layers.2.mlp.gate.e_score_correction_bias", "lm_head.weight"):
        broken = write_folder(tmp_path / "broken", config, {n: a for n, a in arrays.items() if n != name})
        transformers.DeepseekV3ForCausalLM.from_pretrained(broken)
        with pytest.raises(EngineError, match=name):
            Engine.load(broken, device="cpu")
