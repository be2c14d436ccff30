"""What PyTorch computed once (tests/data/dflash_fixture/make.py), where PyTorch is absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draft_models import DEVICES, require, watch

from kdtree_engine import DFlashDrafter, DraftOptions, Engine, EngineError, kdtr

DATA = Path(__file__).parents[1] / "data"
FOLDER = DATA / "dflash_fixture"
OPTIONS = DraftOptions(block_size="rows", yarn="legacy", sliding="causal")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return kdtr.read(FOLDER / "expected.kdtr")


def load(options: DraftOptions, device: str = "cpu") -> Engine:
    require(device)
    backend, precision = DEVICES[device]
    return Engine.load(
        DATA / "hf_fixture", device=backend, threads=2, precision=precision, draft_model=FOLDER, draft_options=options
    )


def errors(engine: Engine, expected: dict[str, np.ndarray]) -> tuple[float, float]:
    """Largest error of the features and of the draft logits, in units of max(1, largest)."""
    tokens = [int(t) for t in expected["tokens"]]
    feature_error = logit_error = 0.0
    for position, wanted in zip(expected["draft.position"], expected["draft.logits"], strict=True):
        session = engine.session().native
        session.append(tokens[:position])
        seen = watch(session, 2, drafter=DFlashDrafter(), budget=4)
        assert session.tokens[: position + 1] == tokens[: position + 1]
        draft = seen.drafts[0]
        assert draft.position == position
        if draft.logits.shape != wanted.shape:
            return np.inf, np.inf
        logit_error = max(logit_error, np.abs(draft.logits - wanted).max() / max(1.0, np.abs(wanted).max()))
        scale = max(1.0, np.abs(expected["features"]).max())
        for at, row in seen.features.items():
            if at < position:
                feature_error = max(feature_error, np.abs(row - expected["features"][at]).max() / scale)
    return feature_error, logit_error


@pytest.mark.parametrize("device", ["cpu", "cuda_f32"])
def test_features_and_draft_logits(expected: dict[str, np.ndarray], device: str) -> None:
    """Catches, on any machine, a drafter that computes something else than PyTorch does from the same two folders."""
    assert max(errors(load(OPTIONS, device), expected)) < TOLERANCE
    assert len(expected["draft.position"]) == 5


@pytest.mark.parametrize(
    "options",
    [
        DraftOptions(block_size="drafts", yarn="legacy", sliding="causal"),
        DraftOptions(block_size="rows", yarn="ratio", sliding="causal"),
        DraftOptions(block_size="rows", yarn="legacy", sliding="block"),
        DraftOptions(block_size="rows", yarn="legacy", sliding="causal", window=60),
    ],
    ids=["block_size", "yarn", "sliding", "window"],
)
def test_every_other_reading_is_seen(expected: dict[str, np.ndarray], options: DraftOptions) -> None:
    """Catches an option that reaches nothing: each other reading of the config moves the logits far."""
    assert errors(load(options), expected)[1] > 100 * TOLERANCE


@pytest.mark.parametrize("missing", ["block_size", "yarn", "sliding"])
def test_what_the_config_leaves_open_is_asked(missing: str) -> None:
    values = {k: v for k, v in OPTIONS.__dict__.items() if k != missing}
    with pytest.raises(EngineError, match=f"{missing}="):
        load(DraftOptions(**values))
