"""The select rule of the oracle: generator, order of the filters, ties, and that it draws from the
distribution."""

from __future__ import annotations

import numpy as np
import pytest

from harness.reference import sampling
from harness.reference.sampling import SampleParams, select


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The known answers published with Random123 (philox4x32, 10 rounds): catches a round, key or word out of
    place."""
    words = sampling.philox4x32(np.array([counter], dtype=np.uint64), key)[0]
    assert " ".join(f"{int(w):08x}" for w in words) == expected


def test_noise_of_the_extreme_words():
    """A v that rounds to 1 gives noise of minus infinity, one of 0 plus infinity, so that one token in 2^32
    would win against any logit; a v on a grid of 2^-23 ends the noise at 16.6: rarer tokens never come."""
    v = sampling.to_uniform(np.array([0, 1, 2**32 - 1], dtype=np.uint32))
    assert v.dtype == np.float32 and v[0] == 2.0**-33 and v[1] == 3 * 2.0**-33 and v[2] == 1 - 2.0**-24
    noise = -np.log(-np.log1p(-v.astype(np.float64)))
    assert np.isfinite(noise).all() and noise[0] > 22.8 and noise[2] < -2.8


def test_noise_depends_on_every_coordinate():
    """Noise that ignores the seed's high word, the position or the choice repeats itself between requests."""
    token = np.arange(64)
    base = sampling.gumbel(token, 3, 5, 0)
    for other in ((4, 5, 0), (3, 6, 0), (3, 5 + 2**32, 0), (3, 5, 1)):
        assert not np.intersect1d(base, sampling.gumbel(token, *other)).size
    assert np.array_equal(base[10:20], sampling.gumbel(token[10:20], 3, 5, 0))


def test_greedy_ties_go_to_the_lower_id():
    assert select(np.array([0.0, 2.0, 2.0, 1.0], dtype=np.float32), 0, SampleParams()).token == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[1.0, np.nan, 2.0], [-np.inf, -np.inf], [np.nan, np.nan]])
def test_no_choice_is_minus_one(row, temperature):
    """argmax over NaN would return the NaN's index, or 0, and the run would go on with garbage."""
    assert select(np.array(row, dtype=np.float32), 0, SampleParams(temperature=temperature)).token == -1


LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05])).astype(np.float32)


def kept(**params):
    return select(LOGITS, 0, SampleParams(temperature=params.pop("temperature", 1.0), **params)).kept.tolist()


def test_filters():
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=9) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.75) == [0, 1, 2]  # the crossing token is kept
    assert kept(top_p=0.1) == [0]  # at least one
    assert kept(min_p=0.3) == [0, 1, 2]  # 0.15 >= 0.3 * 0.4
    assert kept(min_p=1.0) == [0]


def test_order_of_the_filters():
    """Each pair in the other order keeps another set."""
    assert kept(top_k=2, top_p=0.55) == [0]  # 0.57 of what top-k kept; top-p first would keep two
    assert kept(temperature=0.25, top_p=0.7) == [0]  # temperature sharpens first
    assert kept(temperature=4.0, min_p=0.5) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.75, min_p=0.3) == [0, 1, 2]


def test_ties_at_the_border_of_top_k():
    logits = np.array([1.0, 3.0, 1.0, 1.0], dtype=np.float32)
    assert select(logits, 0, SampleParams(temperature=1.0, top_k=2)).kept.tolist() == [1, 0]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3, "temperature": 2.0}]
)
def test_draws_follow_the_distribution(params):
    """Chi-square of 6000 draws: noise that is not Gumbel, or filters on the wrong quantity, shift
    frequencies."""
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    temperature = params.get("temperature", 1.0)
    full = SampleParams(**({"temperature": 1.0} | params), seed=123456789012345)
    draws = [select(LOGITS, position, full) for position in range(6000)]
    weight = p ** (1 / temperature)
    expected = np.zeros(5)
    expected[draws[0].kept] = weight[draws[0].kept] / weight[draws[0].kept].sum() * len(draws)
    count = np.bincount([d.token for d in draws], minlength=5)
    live = expected > 0
    assert count[~live].sum() == 0
    chi2 = float(((count[live] - expected[live]) ** 2 / expected[live]).sum())
    assert chi2 < 23.5  # 0.9999 quantile at 4 degrees of freedom
