"""DFlash folders in the published form, beside the small targets of `tiny_models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models

from harness.reference import dflash
from kdtree_engine.draft_config import DraftConfig, DraftOptions, parse_draft_config

# As z-lab publishes them: one anchor and seven drafts, block_size at the top, the rest in dflash_config.
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 270, "target_layer_ids": [0, 1]},
    "dtype": "bfloat16",
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": tiny_models.CONFIG["hidden_size"],
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 262144,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": tiny_models.CONFIG["num_hidden_layers"],
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": tiny_models.VOCAB,
}
ROWS = DraftOptions(block_size="rows")


def reference_config(parsed: DraftConfig) -> dflash.DraftConfig:
    return dflash.DraftConfig(parsed.fields, parsed.target_layers, parsed.window, parsed.causal)


def draft_weights(
    config: dict[str, Any] = CONFIG, options: DraftOptions = ROWS, seed: int = 3
) -> dict[str, np.ndarray]:
    """Every tensor, float32, by its published name."""
    rng = np.random.default_rng(seed)
    shapes = dflash.weight_shapes(reference_config(parse_draft_config(config, "config.json", options)))
    return {
        name: (rng.normal(0, 0.2 if len(s) == 1 else 1.5 / np.sqrt(s[1]), s) + (len(s) == 1)).astype(np.float32)
        for name, s in shapes.items()
    }


def write_draft(
    path: Path,
    config: dict[str, Any] = CONFIG,
    tensors: dict[str, np.ndarray] | None = None,
    prefix: str = "",
    options: DraftOptions = ROWS,
) -> Path:
    """The folder of a draft model; `prefix` stands before every name."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = draft_weights(config, options) if tensors is None else tensors
    save_file({prefix + name: array for name, array in tensors.items()}, path / "model.safetensors")
    return path
