"""How well a model predicts a text: bits per byte, bits per token, perplexity. ::

    result = perplexity(engine, text, window=2048, stride=1024)
    result.bits_per_byte

A text longer than the window is scored by windows that overlap. A window computes `window` tokens and is asked for
the token behind each of them; of the second and later ones only the last `stride` answers count, so that every
token is scored once and with at least ``window - stride + 1`` tokens before it. The first token of a text has
nothing before it (unless the tokenizer opens texts with a token of its own) and is not scored.

Bits per byte compare models with different vocabularies; perplexity, which is per token, does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import fail
from .sampling import integer, token_logprobs

if TYPE_CHECKING:
    from .engine import Engine
    from .session import Session

__all__ = ["DEFAULT_WINDOW", "Perplexity", "Window", "perplexity", "perplexity_of_tokens", "windows"]

DEFAULT_WINDOW = 2048

_ROWS = 64  # tokens whose logits are held at a time


@dataclass(frozen=True)
class Perplexity:
    """``tokens`` were scored, which are ``bytes`` of the text, in ``windows``; ``nats``: the sum of
    -ln(probability) over them."""

    tokens: int
    bytes: int
    windows: int
    nats: float

    @property
    def bits_per_token(self) -> float:
        return self.nats / math.log(2) / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """NaN where the scored tokens have no text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Window:
    """Tokens ``begin`` to ``end - 1`` are computed; the tokens behind those from ``first`` on are scored."""

    begin: int
    end: int
    first: int


def windows(count: int, window: int, stride: int) -> Iterator[Window]:
    """The windows over a text of `count` tokens: tokens 1 to `count` - 1 are scored once each."""
    scored = begin = 0
    while scored < count - 1:
        end = min(begin + window, count - 1)
        yield Window(begin, end, scored)
        scored = end
        begin += stride


def perplexity(
    engine: Engine,
    text: str,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score `text`, or its first `limit` tokens. Special tokens in it are plain text.

    `window`: None is 2048 or what the model can hold; `stride`: 1 to `window`, None is half of it.
    `progress` is called with (tokens scored, in all). Raises EngineError: ``invalid_argument`` for numbers
    out of range and a text of fewer than two tokens, ``unsupported`` for a model without text,
    ``not_finite`` where the model's answer is no distribution.
    """
    tokenizer = engine.text_tokenizer("the score of a text")
    tokens = tokenizer.encode(text)
    if limit is not None:
        tokens = tokens[: integer(limit, "limit", 2, 2**31 - 1)]
    nats, count = _score(engine, tokens, window, stride, progress)
    size = sum(len(tokenizer.token_bytes(token)) for token in tokens[1:])
    return Perplexity(len(tokens) - 1, size, count, nats)


def perplexity_of_tokens(
    engine: Engine,
    tokens: Sequence[int],
    window: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The same for token ids of a model without text; ``bytes`` is 0."""
    nats, count = _score(engine, tokens, window, stride, progress)
    return Perplexity(len(tokens) - 1, 0, count, nats)


def _score(
    engine: Engine,
    tokens: Sequence[int],
    window: int | None,
    stride: int | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[float, int]:
    most = int(engine.config["max_position_embeddings"]) - 1  # a session wants room for one more
    window = min(DEFAULT_WINDOW, most) if window is None else integer(window, "window", 1, most)
    stride = max(1, window // 2) if stride is None else integer(stride, "stride", 1, window)
    if len(tokens) < 2:
        plural = "s" * (len(tokens) != 1)
        fail("invalid_argument", f"the text has {len(tokens)} token{plural}; at least 2 are needed to score one")
    session = engine.session(min(window, len(tokens) - 1) + 1)
    nats: list[float] = []
    count = 0
    for w in windows(len(tokens), window, stride):
        session.rewind(0)
        if w.first > w.begin:
            session.append(tokens=tokens[w.begin : w.first])
        for at in range(w.first, w.end, _ROWS):
            nats += _nats(session, tokens, at, min(at + _ROWS, w.end))
            if progress is not None:
                progress(len(nats), len(tokens) - 1)
        count += 1
    return math.fsum(nats), count


def _nats(session: Session, tokens: Sequence[int], begin: int, end: int) -> Iterator[float]:
    """-ln(probability) of the tokens behind `begin` to `end` - 1."""
    logits = session.score(tokens[begin:end])
    for i, row in enumerate(logits):
        logprob = token_logprobs(row, tokens[begin + i + 1], 0).logprob
        if not math.isfinite(logprob):
            fail("not_finite", f"token {begin + i + 1} of the text has the log-probability {logprob}")
        yield -logprob
