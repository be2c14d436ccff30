"""Router and experts: order of slots, sums and ties; the chosen set against numpy; rows that are not numbers."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_inputs import ISAS, KINDS, Matrix, exact_fma, matrix, normal, same_bits

from kdtree_engine._native import ops


def experts_of(rng: np.random.Generator, kind: str, count: int, hidden: int, inner: int) -> tuple[ops.Experts, list]:
    gate, up = ([matrix(rng, kind, inner, hidden, 0.3) for _ in range(count)] for _ in range(2))
    down = [matrix(rng, kind, hidden, inner, 0.3) for _ in range(count)]
    packed = [[m.packed for m in part] for part in (gate, up, down)]
    return ops.Experts(*packed), [gate, up, down]


def expert_output(parts: list[list[Matrix]], e: int, x: np.ndarray) -> np.ndarray:
    """One expert on one row by the single ops."""
    gate, up, down = (part[e].packed for part in parts)
    return ops.linear(ops.gated_linear(x[None], gate, up), down)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [True, False])
def test_experts_sum_in_slot_order(kind: str, shared: bool) -> None:
    """Catches a sum by expert id or by arrival, a weight applied before down, the shared expert added first, and
    products rounded before the sum: bit for bit against the rule on the single ops."""
    rng = np.random.default_rng(0)
    hidden, inner = (64, 32) if kind.startswith("w4") else (20, 13)
    experts, parts = experts_of(rng, kind, 6, hidden, inner)
    rows, top_k = 5, 3
    x, y, extra = normal(rng, rows, hidden), normal(rng, rows, hidden), normal(rng, rows, hidden)
    expert = np.array([rng.choice(6, top_k, replace=False) for _ in range(rows)], dtype=np.int32)
    expert[1] = [5, 4, 3]  # descending ids: slot order is not id order
    weight = normal(rng, rows, top_k)
    expected = np.empty_like(y)
    for i in range(rows):
        outputs = [expert_output(parts, int(e), x[i]) for e in expert[i]]
        for c in range(hidden):
            acc = np.float32(0)
            for slot in range(top_k):
                acc = exact_fma(weight[i, slot], outputs[slot][c], acc)
            if shared:
                acc = np.float32(acc + extra[i, c])
            expected[i, c] = y[i, c] + acc
    ops.experts(x, experts, expert, weight, extra if shared else None, y, threads=2)
    assert same_bits(y, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 8, 65, 200])
def test_experts_close_to_float64(isa: str, rows: int) -> None:
    """Catches a slot given to another row's expert when many rows meet at one, and the border of the workspace's pass
    over rows. Tolerance: 1e-5 of the largest output."""
    rng = np.random.default_rng(rows)
    experts, (gate, up, down) = experts_of(rng, "f32", 5, 48, 40)
    x, y = normal(rng, rows, 48), normal(rng, rows, 48)
    expert = np.array([rng.choice(5, 2, replace=False) for _ in range(rows)], dtype=np.int32)
    if rows > 8:
        expert[:, 0], expert[:, 1] = 3, np.where(expert[:, 1] == 3, 0, expert[:, 1])
    weight = normal(rng, rows, 2)
    wide = y.astype(np.float64)
    for i in range(rows):
        for slot, e in enumerate(expert[i]):
            g, u = gate[e].values @ x[i].astype(np.float64), up[e].values @ x[i].astype(np.float64)
            wide[i] += weight[i, slot] * (down[e].values.astype(np.float64) @ (g / (1 + np.exp(-g)) * u))
    ops.experts(x, experts, expert, weight, None, y, isa=isa, threads=2)
    assert np.abs(y - wide).max() < 1e-5 * max(1.0, np.abs(wide).max())


def choose(choice: np.ndarray, top_k: int, groups: int, top_groups: int, largest_only: bool) -> list[int]:
    """The rule, read literally: groups, then experts of them, each descending, ties to the lower id."""
    score = choice.reshape(groups, -1)
    ranked = -np.sort(-score, axis=1)
    best = ranked[:, 0] if largest_only or score.shape[1] == 1 else ranked[:, 0] + ranked[:, 1]
    allowed = set(range(groups))
    if groups > 1:
        allowed = set(np.argsort(-best, kind="stable")[:top_groups].tolist())
    order = np.argsort(-choice, kind="stable")
    return [int(e) for e in order if e // score.shape[1] in allowed][:top_k]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k"), [(8, 1, 1, 2), (384, 1, 1, 8), (24, 4, 2, 5), (6, 6, 3, 3)]
)
@pytest.mark.parametrize("scoring", ["sigmoid_noaux_tc", "softmax_greedy"])
def test_route_follows_the_rule(isa: str, experts: int, groups: int, top_groups: int, top_k: int, scoring: str) -> None:
    """Catches bias in the weights, a group score of one expert instead of two, ties to the higher id, experts outside
    the chosen groups, normalisation over all experts, scaling left out or applied twice. Logits are multiples of 1/8
    with many exact ties, and the backend's own exp makes the scores, so that choices and weights are exact."""
    rng = np.random.default_rng(experts)
    gate = np.eye(experts, dtype=np.float32)
    logits = (rng.integers(-24, 24, (17, experts)) / 8).astype(np.float32)
    bias = (rng.integers(-4, 5, experts) / 8).astype(np.float32) if scoring == "sigmoid_noaux_tc" else None
    for normalize in (True, False):
        expert, weight = ops.route(
            logits, ops.Matrix.f32(gate), bias, scoring, top_k, groups, top_groups, normalize, 2.5, isa=isa
        )
        for i in range(17):
            if bias is not None:
                score = np.float32(1) / (np.float32(1) + ops.exp(-logits[i]))
                choice = score + bias
            else:
                e = ops.exp(logits[i] - logits[i].max())
                total = np.float32(0)
                for value in e:
                    total = np.float32(total + value)
                score = choice = e / total
            want = choose(choice, top_k, groups, top_groups, bias is None)
            assert expert[i].tolist() == want
            chosen = score[want]
            if normalize:
                total = np.float32(0)
                for value in chosen:
                    total = np.float32(total + value)
                chosen = chosen / np.float32(total + np.float32(1e-20))
            assert same_bits(weight[i], chosen * np.float32(2.5))


@pytest.mark.parametrize("scoring", ["sigmoid_noaux_tc", "softmax_greedy"])
@pytest.mark.parametrize("groups", [1, 4])
def test_route_of_rows_that_are_not_numbers(scoring: str, groups: int) -> None:
    """Catches ids out of range or chosen twice where every comparison is false: they would index foreign memory."""
    rng = np.random.default_rng(1)
    gate = matrix(rng, "f32", 16, 10).packed
    bias = normal(rng, 16) if scoring == "sigmoid_noaux_tc" else None
    x = normal(rng, 5, 10)
    x[1], x[2], x[3, 4] = np.nan, np.inf, -np.inf
    expert, weight = ops.route(x, gate, bias, scoring, 4, groups, max(1, groups // 2))
    for i in range(5):
        assert len(set(expert[i].tolist())) == 4 and min(expert[i]) >= 0 and max(expert[i]) < 16
    assert np.isfinite(weight[0]).all() and np.isfinite(weight[4]).all()
    assert np.isnan(weight[1]).all()
