"""select and top_k: the rule against the oracle, the distribution, ties, and rows that hold no distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernel_inputs import ISAS, normal, same_bits

from harness.reference import sampling
from harness.reference.sampling import SampleParams
from kdtree_engine._native import ops


def select(logits: np.ndarray, position: int, params: SampleParams, **run: object) -> int:
    fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice")}
    return int(ops.select(logits[None], np.array([position], dtype=np.int32), **fields, **run)[0])


# ------------------------------------------------------------------------------------------------------------
# generator and functions


@pytest.mark.parametrize("isa", ISAS)
def test_philox_known_answers(isa: str) -> None:
    """The known answers published with Random123 (philox4x32, 10 rounds)."""
    for counter, key, expected in (
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ):
        words = ops.philox(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32), isa=isa)
        assert " ".join(f"{int(w):08x}" for w in words) == expected


@pytest.mark.parametrize("isa", ISAS)
def test_noise_is_the_oracles(isa: str) -> None:
    """Catches words, seeds or coordinates in another order. Tolerance: 2e-6, some units of float32 at the noise's
    largest values."""
    token = np.random.default_rng(0).integers(0, 200000, 5000).astype(np.int32)
    for position, seed, choice in ((0, 0, 0), (7, 3, 1), (2**31 - 1, 2**64 - 1, 2**32 - 1)):
        noise = ops.gumbel(token, position, seed, choice, isa=isa)
        assert np.abs(noise - sampling.gumbel(token, position, seed, choice)).max() < 2e-6


def ulps(value: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Errors in units of the last place of the true value's float32, subnormals included."""
    unit = np.spacing(np.maximum(np.abs(true), 2.0**-126).astype(np.float32)).astype(np.float64)
    return np.abs(value.astype(np.float64) - true) / unit


@pytest.mark.parametrize("isa", ISAS)
def test_exp_and_log_are_accurate(isa: str) -> None:
    """Catches a wrong coefficient, a range reduction off by one at its ends, results that are flushed to zero, and a
    special value that is not. At most 1 ulp, which is better than the 2 that are promised."""
    x = np.concatenate([np.linspace(-104, 89, 400_003), np.linspace(-0.4, 0.4, 100_001), np.geomspace(1e-30, 1, 9999)])
    x = x.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        true = np.exp(x.astype(np.float64))
        finite = true < np.finfo(np.float32).max
        assert ulps(ops.exp(x, isa=isa)[finite], true[finite]).max() <= 1.0
    assert np.isposinf(ops.exp(x, isa=isa)[true > 3.5e38]).all()
    bits = np.random.default_rng(1).integers(1, 0x7F800000, 400_003).astype(np.int32)
    y = np.concatenate([bits.view(np.float32), np.linspace(0.4, 2.5, 200_001).astype(np.float32)])
    assert ulps(ops.log(y, isa=isa), np.log(y.astype(np.float64))).max() <= 1.0
    special = np.array([-np.inf, np.inf, np.nan, 0, -0.0, -1e30, 1e30, -104.5], dtype=np.float32)
    e, g = ops.exp(special, isa=isa), ops.log(special, isa=isa)
    assert e[[0, 1, 3, 4, 5, 6, 7]].tolist() == [0, np.inf, 1, 1, 0, np.inf, 0] and np.isnan(e[2])
    assert g[[1, 3, 4]].tolist() == [np.inf, -np.inf, -np.inf] and np.isnan(g[[0, 2, 5]]).all()


# ------------------------------------------------------------------------------------------------------------
# select


@pytest.mark.parametrize("isa", ISAS)
def test_select_against_the_oracle(isa: str) -> None:
    """Catches filters in another order, limits on another quantity, a border entry too many or too few. Where the
    oracle says that its decision hung by less than 1e-5, float32 may see it otherwise."""
    rng = np.random.default_rng(2)
    close = 0
    for i in range(400):
        n = int(rng.integers(1, 3000))
        x = normal(rng, n, scale=float(rng.choice([0.3, 2.0, 8.0])))
        if i % 5 == 0:
            x = np.round(x)
        if i % 7 == 0:
            x[rng.integers(0, n, n // 2)] = -np.inf
        if not np.isfinite(x).any():
            continue
        params = SampleParams(
            temperature=float(rng.choice([0.0, 0.2, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 7, 60, 900])),
            top_p=float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.01])),
            min_p=float(rng.choice([0.0, 0.02, 0.5, 1.0])),
            seed=int(rng.integers(0, 2**63)) * 2 + 1,
            choice=int(rng.integers(0, 9)),
        )
        want = sampling.select(x, i, params)
        if want.margin < 1e-5 and want.margin > 0 and params.temperature > 0:
            close += 1
            continue
        assert select(x, i, params, isa=isa) == want.token, (i, params, want.margin)
    assert close < 40


def test_select_on_a_real_vocabulary() -> None:
    """Catches a selection that is only right while its buffers do not overflow: 163840 tokens, nuclei from one token
    to nearly all of them, runs of equal logits."""
    rng = np.random.default_rng(3)
    n = 163840
    peaked, flat = normal(rng, n, scale=2.5), normal(rng, n, scale=0.1)
    ties = np.round(normal(rng, n) * 2).astype(np.float32) / 2
    rising = np.linspace(-30, 0, n).astype(np.float32)  # every entry beats all before it
    for x in (peaked, flat, ties, rising):
        for params in (
            SampleParams(),
            SampleParams(temperature=1.0),
            SampleParams(temperature=1.0, top_p=0.9, seed=4),
            SampleParams(temperature=1.0, top_p=0.999, seed=5),
            SampleParams(temperature=0.7, top_k=1000, top_p=0.95, seed=6),
            SampleParams(temperature=1.0, top_k=163839, seed=7),
        ):
            want = sampling.select(x, 11, params)
            if want.margin == 0 or want.margin > 1e-5:
                assert select(x, 11, params) == want.token, params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_are_minus_one(temperature: float) -> None:
    """Catches an argmax over NaN, which returns any index: the run would go on with garbage. In a row of 40, the NaN
    stands in every lane and in the tail."""
    for n in (1, 5, 16, 17, 40):
        for at in range(n):
            x = np.linspace(0, 1, n).astype(np.float32)
            x[at] = np.nan
            assert select(x, 0, SampleParams(temperature=temperature)) == -1
        none = np.full(n, -np.inf, dtype=np.float32)
        assert select(none, 0, SampleParams(temperature=temperature, top_p=0.9, top_k=3)) == -1


def test_the_maximum_is_found_in_every_place() -> None:
    """Catches a lane or tail element that the vector pass skips, and ties that go to the higher id."""
    for n in (1, 15, 16, 17, 33, 100):
        for at in range(n):
            x = np.full(n, -5.0, dtype=np.float32)
            x[at] = -1.0
            assert select(x, 0, SampleParams()) == at
            x[at:] = -1.0
            assert select(x, 0, SampleParams()) == at
    zeros = np.array([-1.0, -0.0, 0.0], dtype=np.float32)
    assert select(zeros, 0, SampleParams()) == 1


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
@pytest.mark.parametrize("top_k", [0, 4])
def test_border_of_top_p(top_p: float, kept: int, top_k: int) -> None:
    """Catches <= for <: of four equal tokens, exactly those before which less than top_p has been summed are drawn."""
    x = np.full((200, 5), -np.inf, dtype=np.float32)
    x[:, 1:] = 0.5
    token = ops.select(x, np.arange(200, dtype=np.int32), temperature=1.0, top_p=top_p, top_k=top_k)
    assert set(token.tolist()) == set(range(1, 1 + kept))


def test_infinite_and_tiny() -> None:
    """Catches inf - inf in the shifted logits and overflow of a tiny temperature, which would leave NaN to choose
    from."""
    x = np.array([1.0, np.inf, -3.0, 0.5], dtype=np.float32)
    down = np.array([-7.0, -5.0, -6.0], dtype=np.float32)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.5), (3, 0.5, 1.0)):
        for temperature in (1e-38, 1.0, 1e30):
            params = SampleParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            assert select(x, 0, params) == 1
        assert select(down, 0, SampleParams(temperature=1e-38, top_k=top_k, top_p=top_p, min_p=min_p)) == 1


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3, "temperature": 2.0}]
)
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    """Chi-square of 200000 draws: catches noise that is not Gumbel, that repeats between positions, or filters on the
    wrong quantity."""
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    draws = 200_000
    logits = np.tile(np.log(p).astype(np.float32), (draws, 1))
    full = {"temperature": 1.0} | params
    token = ops.select(logits, np.arange(draws, dtype=np.int32), seed=99, **full)
    kept = sampling.select(logits[0], 0, SampleParams(**full)).kept
    weight = p ** (1 / full["temperature"])
    expected = np.zeros(5)
    expected[kept] = weight[kept] / weight[kept].sum() * draws
    count = np.bincount(token, minlength=5)
    assert count[expected == 0].sum() == 0
    live = expected > 0
    assert ((count[live] - expected[live]) ** 2 / expected[live]).sum() < 23.5  # 0.9999 quantile, 4 degrees of freedom


def test_rare_tokens_are_drawn() -> None:
    """Catches noise on a coarse grid, whose largest value no rare token overcomes: 160000 tokens of 1e-8 each beside
    one of nearly 1, drawn 6000 times, must win about 10 times."""
    n, draws = 160_001, 6_000
    x = np.full((400, n), math.log(1e-8), dtype=np.float32)
    x[:, 0] = math.log(1 - 160_000e-8)
    wins = 0
    for block in range(draws // 400):
        position = np.arange(block * 400, (block + 1) * 400, dtype=np.int32)
        wins += int((ops.select(x, position, temperature=1.0, seed=1, threads=2) > 0).sum())
    assert 1 <= wins <= 25  # 5 standard deviations around 9.6


# ------------------------------------------------------------------------------------------------------------
# top_k


@pytest.mark.parametrize("isa", ISAS)
def test_top_k_against_a_sort(isa: str) -> None:
    """Catches an entry lost when the selection's buffer is cut, ties to the higher id, and log-probabilities over the
    k entries instead of the row."""
    rng = np.random.default_rng(4)
    for n, k in ((1, 1), (17, 17), (700, 9), (20000, 64), (20000, 5000)):
        x = np.stack([normal(rng, n, scale=3.0), np.round(normal(rng, n)), np.linspace(-9, 9, n).astype(np.float32)])
        token, logp = ops.top_k(x, k, isa=isa)
        order = np.argsort(-x, axis=1, kind="stable")[:, :k]
        assert np.array_equal(token, order)
        wide = x.astype(np.float64)
        true = wide - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        true -= wide.max(axis=1, keepdims=True)
        assert np.abs(logp - np.take_along_axis(true, order, axis=1)).max() < 1e-5


def test_top_k_of_rows_without_a_distribution() -> None:
    """Catches tokens out of range, or probabilities that look real, where logits are NaN or all -inf."""
    x = np.zeros((4, 50), dtype=np.float32)
    x[0, 7], x[1], x[2, 3] = np.nan, -np.inf, np.inf
    token, logp = ops.top_k(x, 5)
    assert ((token >= 0) & (token < 50)).all()
    assert np.isnan(logp[:3]).all() and np.isfinite(logp[3]).all()


def test_top_k_sums_in_lanes() -> None:
    """The documented order of the log-sum-exp, bit for bit."""
    x = normal(np.random.default_rng(5), 1, 75, scale=2.0)
    token, logp = ops.top_k(x, 3)
    top = x.max()
    lanes = np.zeros(16, dtype=np.float32)
    for i, e in enumerate(ops.exp(x[0] - top)):
        lanes[i % 16] += e
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    assert same_bits(logp[0], (x[0, token[0]] - top) - ops.log(lanes)[0])
