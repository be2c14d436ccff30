"""Small random models on disk for tests of the command line: a Hugging Face folder and a .kdtr bundle.

The weights mean nothing; what matters is that a model loads, runs fast, and is the same on every run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

EOS = 256
VOCAB = 272  # 256 bytes, the end-of-text token, and padding as real checkpoints have it

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "max_position_embeddings": 100_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def weights(config: dict[str, Any] = CONFIG, seed: int = 7) -> dict[str, np.ndarray]:
    """Every tensor that the config implies, float32, by its checkpoint name."""
    from kdtree_engine import _native
    from kdtree_engine.config import parse_config

    rng = np.random.default_rng(seed)
    fields = dict(parse_config(config, "config.json").fields)
    tensors = {}
    for name, shape, _ in _native.EngineBuilder(fields, "cpu", 1).expected():
        if name.endswith("norm.weight"):
            value = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("bias"):
            value = rng.uniform(-0.1, 0.1, shape)
        else:
            value = rng.normal(0.0, 1.5 / np.sqrt(shape[-1]), shape)
        tensors[name] = value.astype(np.float32)
    return tensors


def write_folder(
    path: Path,
    config: dict[str, Any] = CONFIG,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
) -> Path:
    """A Hugging Face folder with one safetensors file and a tokenizer whose tokens are bytes."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, path / "model.safetensors")
    if tokenizer:
        write_tokenizer(path / "tokenizer.json")
    return path


def write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letter[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(path))


def write_bundle(
    path: Path,
    config: dict[str, Any] = CONFIG,
    tensors: dict[str, np.ndarray] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The same model as a .kdtr bundle; `extra`: tensors beside it, such as prompt.tokens."""
    from kdtree_engine import kdtr
    from kdtree_engine.config import parse_config

    path.parent.mkdir(parents=True, exist_ok=True)
    fields = parse_config(config, "config.json").fields
    scalars = {f"config.{key}": np.float64(value).reshape(()) for key, value in fields.items()}
    kdtr.write(path, {**scalars, **(weights(config) if tensors is None else tensors), **(extra or {})})
    return path
