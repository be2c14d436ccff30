"""Running sessions and comparing what they leave behind, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdtree_engine import _native


@dataclass
class Run:
    """What a generation left: tokens, logits behind them, why it ended, committed latents per layer, statistics."""

    tokens: list[int]
    logits: np.ndarray
    finished: str
    committed: int
    caches: list[np.ndarray]
    stats: dict[str, Any] = field(repr=False)


def generate(session: _native.Session, max_tokens: int, **options: Any) -> Run:
    """Steps one generation of `session` to its end."""
    session.begin(max_tokens, keep_logits=True, **options)
    tokens: list[int] = []
    while True:
        result = session.step()
        tokens += result.tokens
        if result.finished is not None:
            break
    layers = session_layers(session)
    return Run(tokens, session.logits(), result.finished, session.committed,
               [session.cache(i) for i in range(layers)], session.stats)  # fmt: skip


def session_layers(session: _native.Session) -> int:
    layer = 0
    while True:
        try:
            session.cache(layer)
        except _native.Error:
            return layer
        layer += 1


def open_session(engine: _native.Engine, context: int = 512, prefill_rows: int = 0) -> _native.Session:
    return _native.Session(_native.Executor(engine, context, 1, prefill_rows))


def assert_same(got: Run, wanted: Run) -> None:
    """Tokens, logits bits, end reason and latent bytes are equal."""
    assert got.tokens == wanted.tokens
    assert got.finished == wanted.finished
    assert got.logits.tobytes() == wanted.logits.tobytes()
    assert got.committed == wanted.committed
    for layer, (a, b) in enumerate(zip(got.caches, wanted.caches, strict=True)):
        assert a.tobytes() == b.tobytes(), f"latents of layer {layer} differ"
