"""The second oracle: logits of Hugging Face transformers for small models, on the CPU in float32.

    python -m harness.transformers_logits --out tests/data/transformers/logits.npz

writes the captured fixture that tests compare with where torch is absent. Needs torch and transformers.
Weights come from the integer hashes of the golden bundles, so that the fixture holds logits alone.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import hashing, models
from harness.reference import config as fields

Array = npt.NDArray[Any]
POSITIONS = 48
MADE_BY = "python -m harness.transformers_logits --out tests/data/transformers/logits.npz"

_PLAIN = {
    "rope_factor": 0.0,
    "rope_original_max_position_embeddings": 0.0,
    "rope_beta_fast": 0.0,
    "rope_beta_slow": 0.0,
    "rope_mscale": 0.0,
    "rope_mscale_all_dim": 0.0,
}
_BASE = {
    **models.TINY.config,
    "vocab_size": 128,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "latent_norm_eps": 1e-6,
}
_V2 = {
    "scoring": fields.SOFTMAX_GREEDY,
    "norm_topk_prob": 0,
    "routed_scaling_factor": 4.0,
    "rope_interleave": 1,
}

# transformers' DeepseekV2 has no correction bias and never normalises; group-limited routing needs another
# topk_method.
CASES: dict[str, dict[str, float | int]] = {
    "v3_yarn_q_lora": {**_BASE, "rope_mscale_all_dim": 1.0},
    "v3_yarn_amplitude_groups": {**_BASE, "n_group": 4, "topk_group": 2, "q_lora_rank": 0, "v_head_dim": 24},
    "v3_plain_neox": {
        **_BASE,
        **_PLAIN,
        "rope_interleave": 0,
        "norm_topk_prob": 0,
        "first_k_dense_replace": 0,
    },
    "v3_two_shared": {**_BASE, "n_shared_experts": 2, "num_experts_per_tok": 3, "rope_beta_fast": 1.0},
    "v2_yarn": {**_BASE, **_V2, "q_lora_rank": 0, "rope_mscale": 0.75},
    "v2_q_lora_groups": {**_BASE, **_V2, "n_group": 4, "topk_group": 2},
}


def weights(case: str) -> dict[str, Array]:
    """float32 weights of a case under the checkpoint's names."""
    return models.weights(models.Shape(f"transformers/{case}", 0, CASES[case]), 0)


def tokens(case: str) -> list[int]:
    """POSITIONS token ids."""
    return [int(t) for t in hashing.integers(f"transformers/{case}/tokens", (POSITIONS,), 0, 128)]


def hugging_face_config(config: Mapping[str, float | int]) -> dict[str, Any]:
    """Keyword arguments of DeepseekV3Config or DeepseekV2Config."""
    skipped = {"scoring", "latent_norm_eps", "rope_theta"}
    out: dict[str, Any] = {k: v for k, v in config.items() if k not in skipped and not k.startswith("rope_")}
    out["q_lora_rank"] = config["q_lora_rank"] or None
    out["norm_topk_prob"] = bool(config["norm_topk_prob"])
    out["num_key_value_heads"] = config["num_attention_heads"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if config["rope_factor"]:
        names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        rope |= {"rope_type": "yarn"} | {name: float(config[f"rope_{name}"]) for name in names}
        rope["original_max_position_embeddings"] = int(config["rope_original_max_position_embeddings"])
    out["rope_parameters"] = rope
    if config["scoring"] == fields.SIGMOID_NOAUX_TC:
        out["rope_interleave"] = bool(config["rope_interleave"])
    else:
        out["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return out


def state_dict(config: Mapping[str, float | int], made: Mapping[str, Array]) -> dict[str, Array]:
    """The weights as transformers names them: the experts of a layer fused, gate rows before up rows."""
    out = {name: value for name, value in made.items() if ".mlp.experts." not in name}
    for layer in range(int(config["num_hidden_layers"])):
        if not fields.is_moe(config, layer):
            continue
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([made[f"{at}.{e}.{part}_proj.weight"] for e in range(int(config["n_routed_experts"]))])
            for part in ("gate", "up", "down")
        )
        out[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{at}.down_proj"] = down
    return out


def libraries() -> tuple[Any, Any]:
    """torch and transformers, untyped: types are checked alike where they are installed and where they are
    not."""
    return importlib.import_module("torch"), importlib.import_module("transformers")


def build(case: str) -> Any:
    """The transformers model of a case, in float32, evaluation mode."""
    torch, transformers = libraries()
    config = CASES[case]
    v3 = config["scoring"] == fields.SIGMOID_NOAUX_TC
    config_class = transformers.DeepseekV3Config if v3 else transformers.DeepseekV2Config
    model_class = transformers.DeepseekV3ForCausalLM if v3 else transformers.DeepseekV2ForCausalLM
    settings = config_class(**hugging_face_config(config), attn_implementation="eager")
    model = model_class(settings).to(torch.float32).eval()
    named = {k: torch.from_numpy(v) for k, v in state_dict(config, weights(case)).items()}
    model.load_state_dict(named, strict=True)
    return model


def logits(case: str) -> npt.NDArray[np.float32]:
    """float32 [POSITIONS, vocab], every position of one prompt."""
    torch, _ = libraries()
    with torch.no_grad():
        out = build(case)(torch.tensor([tokens(case)]), use_cache=False).logits[0]
    values: npt.NDArray[np.float32] = out.to(torch.float32).numpy()
    return values


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.transformers_logits")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .npz to write")
    args = parser.parse_args(argv)
    torch, transformers = libraries()
    made = f"{MADE_BY} (torch {torch.__version__}, transformers {transformers.__version__})"
    arrays: dict[str, Any] = {case: logits(case) for case in CASES}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, made_by=np.array(made), **arrays)
    print(f"{args.out}: {len(CASES)} cases, {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
