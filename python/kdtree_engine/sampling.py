"""Sampling settings, checked once, and log-probabilities of recorded logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import fail

__all__ = ["Sampling", "TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Order: temperature, top_k, top_p (the token that crosses the border is kept), min_p; ties go to the
    lower token id. The noise is a counter-based generator of (seed, choice, position, token id), added as
    Gumbel noise before an argmax, so the same seed gives the same text whatever drafts and budgets do.
    Raises EngineError ``invalid_argument`` for a value out of range.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0
    choice: int = 0  # number of this answer among several to one request

    def __post_init__(self) -> None:
        t, p, m = (_real(getattr(self, name), name) for name in ("temperature", "top_p", "min_p"))
        _require(0 <= t <= 1e6, "temperature", t, "0 (greedy) to 1e6")
        _require(0 < p <= 1, "top_p", p, "more than 0 and at most 1 (off)")
        _require(0 <= m <= 1, "min_p", m, "0 (off) to 1")
        integer(self.top_k, "top_k", 0, 2**31 - 1)
        integer(self.seed, "seed", 0, 2**64 - 1)
        integer(self.choice, "choice", 0, 2**32 - 1)


def integer(value: Any, name: str, least: int, most: int) -> int:
    """`value` as an int between `least` and `most`; EngineError ``invalid_argument`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        fail("invalid_argument", f"{name} is {value!r}; expected an integer from {least} to {most}")
    return int(value)


def _real(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        fail("invalid_argument", f"{name} is {value!r}; expected a number")
    number = float(value)
    if math.isnan(number):
        fail("invalid_argument", f"{name} is NaN; expected a number")
    return number


def _require(ok: bool, name: str, value: float, expected: str) -> None:
    if not ok:
        fail("invalid_argument", f"{name} is {value:g}; expected {expected}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities behind one token: its own, and the most probable tokens, best first."""

    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """log-softmax of `logits` (float32 [vocab]) at `token` and at the `count` largest, ties to the lower id.

    The model's own distribution: temperature 1, before any top-k, top-p or min-p. Computed in float64.
    """
    x = logits.astype(np.float64)
    top = x.max()
    logp = x - (top + np.log(np.exp(x - top).sum()))
    count = min(count, len(logp))
    # Only values at or above the count-th largest can be among the best; sorting those settles ties.
    border = np.partition(logits, len(logits) - count)[len(logits) - count] if count else np.inf
    candidates = np.flatnonzero(logits >= border)
    best = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
    return TokenLogprobs(float(logp[token]), [(int(i), float(logp[i])) for i in best])
