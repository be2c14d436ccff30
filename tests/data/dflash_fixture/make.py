"""Makes this folder: a tiny DFlash draft model for the target in ../hf_fixture, and what PyTorch computes with it.
Run by hand, with torch and transformers (5.x) installed::

    PYTHONPATH=python:tests/support python tests/data/dflash_fixture/make.py

The tests read the folder and need neither. transformers runs the target in float64, tests/support/torch_dflash.py
the draft model. Everything that a reader of the format can get wrong is in the config: YaRN with the legacy
amplitude, a sliding window in one of two layers, causal there, fewer key heads than heads, names with ``model.``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from draft_folders import CONFIG, draft_weights
from safetensors.torch import save_file
from torch_dflash import TorchDFlash

from kdtree_engine import DraftOptions, kdtr
from kdtree_engine.draft_config import parse_draft_config

HERE = Path(__file__).parent
TARGET = HERE.parent / "hf_fixture"
OPTIONS = DraftOptions(block_size="rows", yarn="legacy", sliding="causal")
PROMPT, NEW = 90, 30  # tokens
EVERY = 6  # positions between the drafts that are kept
LEAST_GAP = 1e-3  # between the best and the second-best logit of each generated token


def main() -> None:
    target = json.loads((TARGET / "config.json").read_text())
    config = CONFIG | {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 64,
        "block_size": 6,
        "dflash_config": {"mask_token_id": 317, "target_layer_ids": [0, 1]},
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 40,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }  # fmt: skip
    weights = {n: torch.from_numpy(a).bfloat16() for n, a in draft_weights(config, OPTIONS, seed=29).items()}
    save_file({f"model.{n}": a for n, a in weights.items()}, HERE / "model.safetensors")
    (HERE / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    model = transformers.AutoModelForCausalLM.from_pretrained(
        TARGET, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    text = (TARGET / "text.txt").read_text(encoding="utf-8")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TARGET / "tokenizer.json"))
    tokens = tokenizer(text)["input_ids"][:PROMPT]
    told = parse_draft_config(config, "config.json", OPTIONS)
    amplitude = told.fields["rope_amplitude"]
    drafter = TorchDFlash(config, int(told.fields["block_rows"]), told.causal, told.window, amplitude).double()
    drafter.load_state_dict({n: a.double() for n, a in weights.items()}, strict=True)
    with torch.inference_mode():
        for _ in range(NEW):
            top = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            assert top.values[0] - top.values[1] > LEAST_GAP, "another seed"
            tokens.append(int(top.indices[0]))
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        features = drafter.features([s[0] for s in states])
        embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        positions = list(range(PROMPT, PROMPT + NEW, EVERY))
        logits = [drafter(tokens[p], features[:p], embed, head).numpy() for p in positions]
    kdtr.write(
        HERE / "expected.kdtr",
        {
            "prompt": np.array(PROMPT, np.int32),
            "tokens": np.array(tokens, np.int32),
            "features": features.numpy().astype(np.float32),
            "draft.position": np.array(positions, np.int32),
            "draft.logits": np.stack(logits).astype(np.float32),
        },
    )


if __name__ == "__main__":
    main()
