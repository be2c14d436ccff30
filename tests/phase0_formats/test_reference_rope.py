"""YaRN frequencies and corrections of the oracle against the numbers of released models (facts computed from
their configs with the published formulas)."""

from __future__ import annotations

import numpy as np
import pytest

from harness.reference import rope


def yarn(theta, factor, fast, slow, mscale=1.0, all_dim=1.0, nope=128):
    return {
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "rope_theta": theta,
        "rope_factor": factor,
        "rope_original_max_position_embeddings": 4096,
        "rope_beta_fast": fast,
        "rope_beta_slow": slow,
        "rope_mscale": mscale,
        "rope_mscale_all_dim": all_dim,
    }


PLAIN = yarn(50000, 0, 0, 0, 0.0, 0.0)
K2 = yarn(50000, 32, 1, 1)
K2_THINKING = yarn(50000, 64, 1, 1)
K25 = yarn(50000, 64, 32, 1)
V3 = yarn(10000, 40, 32, 1)
V2_LITE = yarn(10000, 40, 32, 1, 0.707, 0.707)


@pytest.mark.parametrize(
    ("config", "low", "high", "expected"),
    [
        (
            K2,
            19,
            20,
            {8: 6.68740e-2, 9: 4.76886e-2, 16: 4.47214e-3, 19: 1.62176e-3, 20: 3.61405e-5, 31: 8.76441e-7},
        ),
        (
            K2_THINKING,
            19,
            20,
            {9: 4.76886e-2, 16: 4.47214e-3, 19: 1.62176e-3, 20: 1.80702e-5, 31: 4.38221e-7},
        ),
        (
            K25,
            8,
            20,
            {8: 6.68740e-2, 9: 4.37767e-2, 16: 1.53730e-3, 19: 1.58375e-4, 20: 1.80702e-5, 31: 4.38221e-7},
        ),
        (V3, 10, 23, {8: 1e-1, 9: 7.49894e-2, 16: 5.5e-3, 19: 1.37051e-3, 20: 7.90569e-4, 31: 3.33380e-6}),
    ],
)
def test_yarn_frequencies(config, low, high, expected):
    """A ramp in the other direction, betas swapped, or floor and ceiling exchanged moves the pairs between
    `low` and `high`; a factor that is ignored moves the last one."""
    assert rope.correction_range(config) == (low, high)
    frequency = rope.inverse_frequencies(config)
    for pair, value in expected.items():
        assert f"{frequency[pair]:.5e}" == f"{value:.5e}", pair


def test_equal_betas_do_not_divide_by_zero():
    """Where both corrections land in one pair the ramp is a step, not NaN."""
    config = yarn(10000, 4, 1, 1) | {"rope_original_max_position_embeddings": 2 * np.pi}
    low, high = rope.correction_range(config)
    assert low < high
    assert np.isfinite(rope.inverse_frequencies(config)).all()


@pytest.mark.parametrize(
    ("config", "square", "scale"),
    [
        (K2, 1.81326, 0.130861),
        (K25, 2.00474, 0.144680),
        (V3, 1.87385, 0.135234),
        (V2_LITE, 1.58963, 0.114721),
    ],
)
def test_softmax_correction(config, square, scale):
    """m instead of m squared, or no correction at all, is the classic YaRN bug: fluent at first, wrong
    later."""
    assert rope.softmax_scale(config) == pytest.approx(scale, abs=5e-7)
    assert rope.softmax_scale(config) / 192**-0.5 == pytest.approx(square, abs=5e-6)
    assert rope.amplitude(config) == 1.0


def test_plain_rope_has_no_corrections():
    assert rope.softmax_scale(PLAIN) == 192**-0.5
    assert rope.amplitude(PLAIN) == 1.0
    assert rope.inverse_frequencies(PLAIN)[8] == pytest.approx(50000 ** (-1 / 4))


def test_amplitude_is_separate_from_the_softmax_correction():
    """mscale != mscale_all_dim: cos and sin are stretched by the ratio, the softmax by mscale_all_dim
    alone."""
    m = [0.1 * s * np.log(40) + 1 for s in (0.707, 1.0)]
    assert rope.amplitude(yarn(10000, 40, 32, 1, 1.0, 0.707)) == pytest.approx(m[1] / m[0])
    assert rope.softmax_scale(yarn(10000, 40, 32, 1, 1.0, 0.707)) == pytest.approx(192**-0.5 * m[0] ** 2)
    only = yarn(10000, 40, 32, 1, 0.0, 0.0)
    assert rope.amplitude(only) == pytest.approx(m[1])
    assert rope.softmax_scale(only) == 192**-0.5


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_relative(interleaved):
    """q . k may depend on the distance alone; a sign error or mixed pairings make it depend on the
    position."""
    rng = np.random.default_rng(6)
    q, k = rng.normal(size=(2, 1, 64))

    def score(at):
        x, y = (
            rope.rotate(v, *rope.tables(K25, np.array([p]), np.float64), interleaved)
            for v, p in ((q, at + 5), (k, at))
        )
        return float((x * y).sum())

    assert score(0) == pytest.approx(score(100), abs=1e-4)
    assert abs(score(0) - float((q * k).sum())) > 0.1


def test_interleaved_and_neox_differ_by_the_permutation():
    """Pairs (2j, 2j + 1) and (j, j + d/2) are one rotation under the de-interleaving permutation, and no
    other."""
    x = np.random.default_rng(7).normal(size=(3, 2, 64))
    cos, sin = rope.tables(V3, np.array([0, 7, 1000]), np.float64)
    order = np.r_[0:64:2, 1:64:2]
    neox = rope.rotate(x[..., order], cos, sin, False)
    assert np.array_equal(rope.rotate(x, cos, sin, True)[..., order], neox)
    assert not np.allclose(rope.rotate(x, cos, sin, False), rope.rotate(x, cos, sin, True))
