"""The draft model on CUDA beside the CPU backend: the same prefix, so the same proposal."""

from __future__ import annotations

import numpy as np
import pytest
from draft_models import DRAFTS, Draft, Pair, pair, require, watch
from models import prompt
from runs import generate, open_session

from kdtree_engine import _native

PROMPT, TOKENS = 70, 40
TOLERANCE = 1e-5


def text(p: Pair) -> list[int]:
    """A prompt and its greedy continuation on the CPU."""
    session = open_session(p.engine)
    session.append(prompt(p.vocab, PROMPT, seed=11))
    generate(session, TOKENS)
    return list(session.tokens)


def draft_behind(p: Pair, tokens: list[int]) -> Draft:
    """The first draft behind a prefix: the target's next token is its root."""
    session = open_session(p.engine)
    session.append(tokens)
    return watch(session, 2, drafter=_native.DFlashDrafter(), budget=8).drafts[0]


@pytest.mark.parametrize("name", list(DRAFTS))
def test_proposals_in_float32(name: str) -> None:
    """Catches a draft op that CUDA computes otherwise: at the prompt's end, at page borders, on both sides of one."""
    require("cuda_f32")
    cpu, cuda = pair(name), pair(name, "cuda_f32")
    tokens = text(cpu)
    for length in (1, 2, 63, 64, 65, PROMPT, PROMPT + TOKENS - 2):
        wanted, got = draft_behind(cpu, tokens[:length]), draft_behind(cuda, tokens[:length])
        assert (got.position, got.root) == (wanted.position, wanted.root)
        scale = max(1.0, float(np.abs(wanted.logits).max()))
        assert np.abs(got.logits - wanted.logits).max() < TOLERANCE * scale, length


@pytest.mark.parametrize("name", ["plain", "yarn_windows"])
def test_bf16_proposes_nearly_the_same(name: str) -> None:
    """Catches operands in another order, a scale or a norm left out on the bf16 path: with random weights, far from
    trained ones' margins, the likeliest tokens still overlap and the logits go the same way."""
    require("cuda_bf16")
    cpu, cuda = pair(name), pair(name, "cuda_bf16")
    tokens, alike, angles = text(cpu), [], []
    for length in range(20, PROMPT + TOKENS - 2, 7):
        wanted, got = draft_behind(cpu, tokens[:length]), draft_behind(cuda, tokens[:length])
        if got.root != wanted.root:
            continue  # the target's own choice moved
        for a, b in zip(got.logits.astype(np.float64), wanted.logits.astype(np.float64), strict=True):
            alike.append(len(set(np.argsort(-a)[:8]) & set(np.argsort(-b)[:8])) / 8)
            angles.append(a @ b / np.sqrt((a @ a) * (b @ b)))
    assert len(alike) >= 20 and np.mean(alike) > 0.8 and np.median(angles) > 0.99
