"""The second oracle: transformers' DeepseekV3 and DeepseekV2 against ours.

Two people's reading of the same architecture must give the same logits. The captured fixture keeps the check
alive where torch is absent; it is made by `python -m harness.transformers_logits --out
tests/data/transformers/logits.npz`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness import transformers_logits as second
from harness.reference.model import Model

FIXTURE = Path(__file__).parents[1] / "data" / "transformers" / "logits.npz"
TOLERANCE = 1e-5  # times max(1, largest |logit|), at every position


def ours(case, **options):
    model = Model(second.CASES[case], second.weights(case), **options)
    return model.forward(second.tokens(case), range(second.POSITIONS))


@pytest.fixture(scope="module")
def captured():
    with np.load(FIXTURE, allow_pickle=False) as archive:
        return dict(archive)


def test_fixture_is_complete_and_small(captured):
    """A case added without capturing it again would silently go untested."""
    assert set(captured) == {*second.CASES, "made_by"}
    assert second.MADE_BY in str(captured["made_by"])
    assert FIXTURE.stat().st_size < 200 * 1024


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("case", list(second.CASES))
def test_captured_logits(captured, case, absorbed):
    """Catches a misreading of the architecture that expanded and absorbed forms, float32 and float64 all
    share."""
    theirs = captured[case]
    assert theirs.shape == (second.POSITIONS, second.CASES[case]["vocab_size"])
    difference = np.abs(ours(case, absorbed=absorbed).logits - theirs).max()
    assert difference <= TOLERANCE * max(1.0, float(np.abs(theirs).max()))


def test_cases_differ_from_each_other(captured):
    """Two cases with the same logits would mean that the feature which tells them apart is not exercised."""
    for case in second.CASES:
        for other in second.CASES:
            if case < other:
                assert np.abs(captured[case] - captured[other]).max() > 0.1


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.mark.torch
@pytest.mark.parametrize("case", list(second.CASES))
def test_transformers_logits(torch, captured, case):
    """The installed release, live: the fixture could be stale."""
    theirs = second.logits(case)
    largest = max(1.0, float(np.abs(theirs).max()))
    assert np.abs(ours(case).logits - theirs).max() <= TOLERANCE * largest
    assert np.abs(captured[case] - theirs).max() <= TOLERANCE * largest


@pytest.mark.torch
@pytest.mark.parametrize("case", ["v3_yarn_q_lora", "v3_plain_neox", "v2_yarn"])
def test_transformers_cache(torch, case):
    """Latents after their norm, keys after RoPE: the caches must hold the same numbers. transformers' V3
    stores interleaved pairs taken apart, V2 and NeoX pairs as they are."""
    with torch.no_grad():
        out = second.build(case)(torch.tensor([second.tokens(case)]), use_cache=True)
    apart = case == "v3_yarn_q_lora"
    rope = second.CASES[case]["qk_rope_head_dim"]
    order = np.r_[0:rope:2, 1:rope:2] if apart else np.arange(rope)
    for layer, entry in enumerate(ours(case).cache):
        theirs = out.past_key_values.layers[layer]
        latent, key = theirs.keys[0, 0].numpy(), theirs.values[0, 0].numpy()
        assert np.abs(entry.latent - latent).max() <= TOLERANCE * max(1.0, float(np.abs(latent).max()))
        assert np.abs(entry.rope[:, order] - key).max() <= TOLERANCE * max(1.0, float(np.abs(key).max()))
