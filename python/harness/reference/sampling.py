"""The token that the target emits after a row (counterpart of the op `select`; docs/numerics.md has the
rule).

Noise is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a pure
function of (seed, token id, position, choice), used as Gumbel-max: the arg max of log-probability plus Gumbel
noise is a draw from the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: npt.NDArray[Any], key: tuple[int, int], rounds: int = 10) -> npt.NDArray[np.uint32]:
    """Philox4x32: counter integers [..., 4], key two words; returns uint32 [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) & _LOW for i in range(4))
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(token: npt.NDArray[Any], position: int, seed: int, choice: int) -> npt.NDArray[np.float32]:
    """float32 [n] in (0, 1), one for each token id: v = (float32(word0) + 0.5) * 2^-32, at most 1 - 2^-24."""
    counter = np.zeros((len(token), 4), dtype=np.uint64)
    counter[:, 0] = token
    counter[:, 1] = position
    counter[:, 2] = choice
    word = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[:, 0]
    return to_uniform(word)


def to_uniform(word: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """float32 [n] of random words. Small values are as fine as float32 is: they make the large noise."""
    raw = (word.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    values: npt.NDArray[np.float32] = np.minimum(raw, np.float32(1 - 2.0**-24))
    return values


def gumbel(token: npt.NDArray[Any], position: int, seed: int, choice: int) -> npt.NDArray[np.float64]:
    """float64 [n]: standard Gumbel noise -log E of each token id, E = -log(1 - v) exponential (1 - v rounded
    to float32 from v = 2^-12 on)."""
    v = uniform(token, position, seed, choice)
    rounded = -np.log((np.float32(1) - v).astype(np.float64))
    exponential = np.where(v < np.float32(2.0**-12), -np.log1p(-v.astype(np.float64)), rounded)
    values: npt.NDArray[np.float64] = -np.log(exponential)
    return values


@dataclass(frozen=True)
class SampleParams:
    """temperature 0: greedy; top_k 0, top_p 1, min_p 0: off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True)
class Selected:
    """token: the choice, -1 where the logits hold a NaN or no finite value. kept: integers, the candidates in
    order (logit descending, id ascending). margin: how far the nearest decision was from going the other way
    (float64; relative to 1 for top-p and min-p, absolute for the final arg max): comparisons in other
    precision may differ where it is tiny."""

    token: int
    kept: npt.NDArray[np.int64]
    margin: float


def select(logits: npt.NDArray[Any], position: int, params: SampleParams) -> Selected:
    """The token emitted at absolute position `position` + 1 after a row at `position`. logits: float32 [V].

    Order: temperature, top-k, top-p (the crossing token is kept), min-p, then arg max of z + Gumbel noise.
    Every tie goes to the lower token id. z = (logit - max) / temperature is rounded to float32; the rest is
    float64.
    """
    x = np.asarray(logits, dtype=np.float32)
    if np.isnan(x).any() or not np.isfinite(x).any():
        return Selected(-1, np.zeros(0, dtype=np.int64), np.inf)
    if params.temperature == 0.0:
        order = np.argsort(-x, kind="stable")
        gap = float(x[order[0]]) - float(x[order[1]]) if len(x) > 1 else np.inf
        return Selected(int(order[0]), order[:1].astype(np.int64), gap)

    with np.errstate(over="ignore", invalid="ignore"):
        z = np.where(x == x.max(), np.float32(0), (x - x.max()) / np.float32(params.temperature))
    order = np.argsort(-x, kind="stable").astype(np.int64)
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    p = np.exp(z[order].astype(np.float64))
    margin = np.inf
    if params.top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        limit = float(np.float32(params.top_p)) * float(p.sum())
        margin = min(margin, float(np.abs(before[1:] - limit).min(initial=np.inf)) / float(p.sum()))
        keep = int((before < limit).sum())
        order, p = order[: max(keep, 1)], p[: max(keep, 1)]
    if params.min_p > 0.0:
        limit = float(np.float32(params.min_p))
        margin = min(margin, float(np.abs(p - limit).min(initial=np.inf)))
        order = order[p >= limit]
    noisy = z[order].astype(np.float64) + gumbel(order, position + 1, params.seed, params.choice)
    best = int(np.lexsort((order, -noisy))[0])
    others = np.delete(noisy, best)
    margin = min(margin, float(noisy[best] - others.max(initial=-np.inf)))
    return Selected(int(order[best]), order, margin)
