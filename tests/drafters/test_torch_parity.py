"""Against PyTorch: transformers runs the target, an independent reading of the paper the draft model.

Whole generations on the engine; features and draft logits within 1e-5 x max(1, largest).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from draft_folders import CONFIG, draft_weights, write_draft
from draft_models import watch

from kdtree_engine import CombinedDrafter, DFlashDrafter, DraftOptions, Engine, PlantedDrafter

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
PROMPT = list(b"It was the best of times, it was the worst of times, it was the age of wisdom")
TOKENS = 64
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LAYERS = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 24}
VARIANTS: dict[str, tuple[dict[str, Any], DraftOptions]] = {
    "published": ({}, DraftOptions(block_size="rows")),
    "yarn_legacy": ({"rope_scaling": YARN, "rope_theta": 50000.0}, DraftOptions(block_size="rows", yarn="legacy")),
    "yarn_ratio": ({"rope_scaling": YARN, "rope_theta": 50000.0}, DraftOptions(block_size="rows", yarn="ratio")),
    "nine_rows": ({"num_key_value_heads": 1}, DraftOptions(block_size="drafts")),
    "windows_causal": (LAYERS | {"num_hidden_layers": 3}, DraftOptions(block_size="rows", sliding="causal")),
    "windows_block": (LAYERS | {"num_hidden_layers": 3}, DraftOptions(block_size="rows", sliding="block")),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_folder(tmp_path_factory.mktemp("models") / "target")


@pytest.mark.parametrize("name", list(VARIANTS))
def test_features_and_logits_of_a_generation(target: Path, tmp_path: Path, name: str) -> None:
    """Catches a misreading of the architecture that engine and numpy oracle share."""
    from torch_dflash import TorchDFlash

    changes, options = VARIANTS[name]
    config = CONFIG | changes
    arrays = draft_weights(config, options)
    folder = write_draft(tmp_path / "draft", config, arrays, options=options)
    engine = Engine.load(target, device="cpu", threads=2, draft_model=folder, draft_options=options)

    plain = engine.session().native
    plain.append(PROMPT)
    plain.begin(TOKENS)
    while plain.step().finished is None:
        pass
    session = engine.session().native
    session.append(PROMPT)
    planted = PlantedDrafter(plain.tokens, engine.vocab_size, 4, as_paths=True)
    seen = watch(session, TOKENS, drafter=CombinedDrafter([DFlashDrafter(), planted]), budget=16)
    assert session.tokens == plain.tokens and len(seen.drafts) >= 8
    assert max(session.stats["accepted_lengths"]) >= 4

    model = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    told = engine.native.draft_config
    assert told is not None
    drafter = TorchDFlash(config, told["block_rows"], told["causal"], told["window"], told["rope_amplitude"]).double()
    drafter.load_state_dict({n: torch.from_numpy(a.astype(np.float64)) for n, a in arrays.items()}, strict=True)
    with torch.inference_mode():
        states = model(torch.tensor([session.tokens]), output_hidden_states=True).hidden_states
        features = drafter.features([s[0] for s in states])
        wanted = features.numpy()
        scale = max(1.0, np.abs(wanted).max())
        assert max(np.abs(row - wanted[at]).max() for at, row in seen.features.items()) < TOLERANCE * scale
        embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        for draft in seen.drafts:
            logits = drafter(draft.root, features[: draft.position], embed, head).numpy()
            assert logits.shape == draft.logits.shape
            assert np.abs(logits - draft.logits).max() < TOLERANCE * max(1.0, np.abs(logits).max()), draft.position


def test_amplitudes_of_yarn_are_those_of_transformers() -> None:
    """Catches "ratio" and "legacy" in each other's place: transformers computes the ratio where both mscales are
    given, and m(1) where they are not."""
    from torch_dflash import ROPE_INIT_FUNCTIONS, Qwen3Config

    from kdtree_engine.draft_config import parse_draft_config

    for drop, option in ((), "ratio"), (("mscale", "mscale_all_dim"), "legacy"):
        scaling = {k: v for k, v in (YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}).items() if k not in drop}
        rope = {k: v for k, v in scaling.items() if k != "type"} | {"rope_type": "yarn", "rope_theta": 50000.0}
        other = Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope)
        _, amplitude = ROPE_INIT_FUNCTIONS["yarn"](other, torch.device("cpu"))
        config = json.loads(json.dumps(CONFIG | {"rope_scaling": scaling}))
        options = DraftOptions(block_size="rows", yarn=option)  # type: ignore[arg-type]
        assert parse_draft_config(config, "config.json", options).fields["rope_amplitude"] == pytest.approx(amplitude)
