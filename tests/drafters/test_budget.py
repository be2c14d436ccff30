"""The budget on synthetic worlds with a simulated clock: it never loses much, and finds what a fixed one would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from budget_world import (
    COSTS,
    PATH,
    SIZES,
    TABLE,
    Memory,
    Outcome,
    World,
    answer,
    dense,
    row_by_row,
    simulate,
    sparse_moe,
)

from kdtree_engine import _native

TOKENS = 1200
MATH = lambda rng: rng.beta(6, 1)  # noqa: E731
CHAT = lambda rng: rng.beta(2, 1.6)  # noqa: E731
POOR = lambda rng: rng.beta(1, 4)  # noqa: E731
FIXED = (0, 2, 4, 6, 8, 12, 24)


def mean_rate(make: Callable[[int], World], fixed: int = -1, tokens: int = TOKENS, seeds: int = 3) -> float:
    outcomes = [simulate(make(seed), tokens, fixed) for seed in range(seeds)]
    return sum(o.tokens for o in outcomes) / sum(o.seconds for o in outcomes)


# ------------------------------------------------------------------------------------------------------------
# never much slower than plain


USELESS = {
    "sure": dict(sure=MATH),
    "dear": dict(sure=MATH, draft_seconds=8e-3),
    "paths": dict(sure=None, path=[0.7] * 12),
    "both": dict(sure=MATH, path=[0.7] * 12),
}


@pytest.mark.parametrize("cost", list(COSTS))
@pytest.mark.parametrize("kind", list(USELESS))
def test_useless_drafts_cost_little(cost: str, kind: str) -> None:
    """Catches a budget that believes a confident drafter, probes at a fixed rate, or probes with a large tree: on
    text made of random tokens nothing is ever accepted."""
    plain = mean_rate(lambda seed: World(COSTS[cost], None, seed=seed), fixed=0)
    useless = mean_rate(lambda seed: World(COSTS[cost], useful=lambda t: False, seed=seed, **USELESS[kind]))
    assert useless > (0.955 if kind == "both" else 0.97) * plain


def test_probes_are_spaced_by_what_they_cost() -> None:
    """Catches probes at a fixed rate: a dear draft must come more seldom, and neither may cost more than its share."""
    gaps = []
    for seconds in (1e-3, 8e-3):
        world = World(sparse_moe, MATH, useful=lambda t: False, draft_seconds=seconds)
        outcome = simulate(world, 3000)
        asked = [at for at, sources, _, _ in outcome.rounds if sources & TABLE]
        gaps.append(float(np.median(np.diff(asked))))
        late = [nodes for at, sources, nodes, _ in outcome.rounds if sources and at > 200]
        wasted = sum(seconds + sparse_moe(nodes) - sparse_moe(0) for nodes in late)
        assert all(nodes <= 2 for nodes in late) and 0.003 < wasted / outcome.seconds < 0.02
    assert gaps[1] > 2 * gaps[0] > 40


# ------------------------------------------------------------------------------------------------------------
# short answers, one after the other on one engine


ANSWER = 128
STEPS = {"cheap": 0.1, "half a step": 0.5, "a step": 1.0, "dear": 5.0}  # what a draft takes, in plain steps


def quiet(cost: Callable[[int], float], steps: float, **world: Any) -> World:
    """A world whose clock has no noise: plain decoding takes exactly tokens x cost(0)."""
    return World(cost, MATH, noise=0.0, draft_seconds=steps * cost(0), **world)


def against_plain(outcome: Outcome, cost: Callable[[int], float]) -> float:
    return outcome.rate * cost(0)


@pytest.mark.parametrize("cost", list(COSTS))
@pytest.mark.parametrize("steps", list(STEPS))
def test_a_first_answer_is_not_sacrificed_to_learning(cost: str, steps: str) -> None:
    """Catches a warm-up whose cost only a long text pays back: 128 tokens of an engine that knows nothing yet, and
    drafts that are sure of themselves and never right."""
    rates = [
        against_plain(
            simulate(quiet(COSTS[cost], STEPS[steps], useful=lambda t: False, seed=seed), ANSWER), COSTS[cost]
        )
        for seed in range(4)
    ]
    assert np.mean(rates) > 0.97 and min(rates) > 0.96


@pytest.mark.parametrize("cost", list(COSTS))
@pytest.mark.parametrize("steps", list(STEPS))
def test_answers_in_a_row_lose_little(cost: str, steps: str) -> None:
    """Catches an engine that learns anew with every session."""
    memory = Memory()
    rates = [
        against_plain(
            simulate(quiet(COSTS[cost], STEPS[steps], useful=lambda t: False, seed=seed), ANSWER, memory=memory),
            COSTS[cost],
        )
        for seed in range(12)
    ]
    assert np.mean(rates[2:]) > 0.982 and min(rates) > 0.92


@pytest.mark.parametrize("steps", ["cheap", "half a step", "a step"])
def test_answers_in_a_row_come_to_the_best_fixed_budget(steps: str) -> None:
    """Catches an engine that finds in every session anew, and slowly, that drafts pay."""
    memory, make = Memory(), lambda seed: quiet(dense, STEPS[steps], seed=seed)
    best = max(np.mean([simulate(make(seed), ANSWER, fixed).rate for seed in range(6)]) for fixed in FIXED)
    rates = [simulate(make(seed), ANSWER, memory=memory).rate / best for seed in range(12)]
    assert rates[0] > 0.8 and np.mean(rates[1:]) > 0.96


@pytest.mark.parametrize("steps", ["cheap", "half a step", "a step"])
@pytest.mark.parametrize("long_one_is_useful", [True, False])
def test_a_long_answer_beside_short_ones_does_not_teach_them(steps: str, long_one_is_useful: bool) -> None:
    """Catches a record that every live session overwrites each round: beside a long text on which drafts pay, each
    short one on which they do not lost up to 13 % instead of 1; the other way round, up to 24 % of the speed."""
    rates: dict[bool, list[float]] = {}
    for beside in (False, True):
        memory = Memory()
        long = answer(quiet(dense, STEPS[steps], useful=lambda t: long_one_is_useful, seed=99), 10**6, memory=memory)
        for _ in range(200 * beside):
            next(long)
        rates[beside] = []
        for seed in range(16):
            world = quiet(dense, STEPS[steps], useful=lambda t: not long_one_is_useful, seed=seed)
            outcome = Outcome(0, 0.0, [])
            for outcome in answer(world, ANSWER, memory=memory):  # noqa: B007
                if beside:
                    next(long)
            rates[beside].append(against_plain(outcome, dense))
    assert np.mean(rates[True]) > (0.985 if long_one_is_useful else 0.94 * np.mean(rates[False]))


def test_drafts_that_cost_five_steps_and_pay_are_found() -> None:
    """Catches a rule that never asks whom it cannot afford at once: eight tokens a draft are worth five steps."""
    memory = Memory()
    sure = lambda rng: rng.beta(60, 1)  # noqa: E731
    world = lambda seed: World(dense, sure, noise=0.0, draft_seconds=5 * dense(0), depth=12, seed=seed)  # noqa: E731
    rates = [against_plain(simulate(world(seed), ANSWER, memory=memory), dense) for seed in range(12)]
    assert min(rates) > 0.94 and np.mean(rates[6:]) > 1.3


def test_a_text_that_repeats_itself_is_looked_at_early() -> None:
    """Catches a hint that nobody hears, and one that is believed: drafts that are never right cost no more with it
    than one advance, however long it lasts."""
    memory = Memory()
    for seed in range(6):  # teaches that drafts bring nothing
        simulate(quiet(dense, 0.5, useful=lambda t: False, seed=seed), ANSWER, memory=memory)
    turned = dict(useful=lambda t: t >= 40)
    first: list[int] = []
    for repeats in (lambda t: 0.0, lambda t: float(t >= 42)):
        world = quiet(dense, 0.5, seed=7, **turned)
        taught = Memory()
        taught.costs, taught.budget = memory.costs, memory.budget
        rounds = simulate(world, 4 * ANSWER, memory=taught, repeats=repeats).rounds
        first.append(min((at for at, _, _, new in rounds if new > 2), default=4 * ANSWER))
    assert first[1] < 60 and first[0] > first[1], first
    rates = [
        against_plain(
            simulate(quiet(dense, 0.5, useful=lambda t: False), 4 * ANSWER, memory=memory, repeats=lambda t: 1.0), dense
        )
        for _ in range(4)
    ]
    assert min(rates) > 0.975


def test_how_much_a_text_repeats_itself() -> None:
    """Catches a share that counts tokens instead of how the text went on, one that never falls, and a text that is
    counted twice when it is seen in parts."""
    text = [*range(20), *range(5, 20)]
    whole, parts = _native.Repetition(), _native.Repetition()
    whole.see(text)
    for end in range(len(text) + 1):
        parts.see(text[:end])
    assert whole.share == parts.share == pytest.approx(1 - (7 / 8) ** 12)
    other = _native.Repetition()
    other.see([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 3, 7])  # 2 3 x -> 1 and the like were never seen twice
    assert other.share == 0.0
    whole.see([*text, *range(100, 140)])
    assert whole.share < 0.01


@pytest.mark.parametrize("cost", ["sparse_moe", "dense"])
def test_a_text_of_another_kind_may_follow(cost: str) -> None:
    """Catches a session that trusts what an earlier text taught, for as long as that text lasted: in either way."""
    memory = Memory()
    make = lambda seed, useful: quiet(COSTS[cost], 0.5, useful=lambda t: useful, seed=seed)  # noqa: E731
    best = max(np.mean([simulate(make(seed, True), ANSWER, fixed).rate for seed in range(6)]) for fixed in FIXED)
    for turn in range(3):
        good = [simulate(make(10 * turn + i, True), ANSWER, memory=memory).rate / best for i in range(5)]
        assert np.mean(good[1:]) > 0.85, (turn, good)
        bad = [
            against_plain(simulate(make(10 * turn + i, False), ANSWER, memory=memory), COSTS[cost]) for i in range(5)
        ]
        assert bad[0] > 0.87 and np.mean(bad[1:]) > 0.98, (turn, bad)


# ------------------------------------------------------------------------------------------------------------
# as good as the best fixed budget


ACCEPTING = {
    "sparse_moe_math": (sparse_moe, MATH, 0.94),
    "sparse_moe_chat": (sparse_moe, CHAT, 0.98),
    "fast_sparse_moe_math": (lambda n: sparse_moe(n, 0.0), MATH, 0.96),
    "fast_sparse_moe_chat": (lambda n: sparse_moe(n, 0.0), CHAT, 0.97),
    "dense_math": (dense, MATH, 0.95),
    "dense_chat": (dense, CHAT, 0.97),
    "dense_poor": (dense, POOR, 0.97),
    "row_by_row_math": (row_by_row, MATH, 0.97),
}


@pytest.mark.parametrize("name", list(ACCEPTING))
def test_as_good_as_the_best_fixed_budget(name: str) -> None:
    """Catches a wrong objective (the ratio of one round), a size that is never tried, and costs of sizes in between
    taken for free."""
    cost, sure, share = ACCEPTING[name]
    make = lambda seed: World(cost, sure, seed=seed)  # noqa: E731
    best = max(mean_rate(make, fixed, seeds=2) for fixed in FIXED)
    assert mean_rate(make) > share * best


def test_overconfident_drafts_are_calibrated() -> None:
    """Catches probabilities taken at their word: this drafter claims 0.74 where 0.37 is true."""
    make = lambda seed: World(sparse_moe, lambda rng: rng.beta(2, 4), claim=lambda p: p**0.3, seed=seed)  # noqa: E731
    best = max(mean_rate(make, fixed, seeds=2) for fixed in FIXED)
    assert mean_rate(make) > 0.92 * best
    late = [nodes for at, _, nodes, _ in simulate(make(0), TOKENS).rounds if at > TOKENS // 2]
    assert np.mean(late) < 6


# ------------------------------------------------------------------------------------------------------------
# adapts


def rate_between(outcome: Outcome, first: int, last: int) -> float:
    """Tokens per round of the part of a run."""
    part = [new for at, _, _, new in outcome.rounds if first <= at < last]
    return sum(part) / len(part)


def test_adapts_when_drafts_turn_good_and_bad_again() -> None:
    """Catches a source that, once closed, stays closed; and one that lives on its good past."""
    world = World(sparse_moe, MATH, useful=lambda t: 600 <= t < 1400)
    outcome = simulate(world, 2400)
    assert rate_between(outcome, 200, 600) < 1.1
    assert rate_between(outcome, 800, 1400) > 2.5
    wasted = [nodes for at, _, nodes, _ in outcome.rounds if at >= 1450]
    assert np.mean(wasted) < 0.3


def test_adapts_when_costs_change() -> None:
    """Catches a cost table that is measured once and believed for ever: the context grows, and wide verifies become
    dear."""
    clock = {"rows": 0.0}
    world = World(lambda n: 10e-3 + (5e-5 + clock["rows"]) * n, MATH)
    costs, budget = _native.CostTable(), _native.Budget(-1)
    chosen: list[int] = []
    for i in range(600):
        if i == 300:
            clock["rows"] = 4e-3
        if costs.plain_known and not costs.measured:
            costs.measure(world.seconds)
        asked = budget.sources(TABLE, costs)
        tree = world.draft(asked)
        nodes = budget.choose(*tree.arrays, costs)
        path, new = world.walk(tree, nodes, 0)
        seconds = world.seconds(nodes)
        costs.observe(nodes, seconds)
        budget.observe(*tree.arrays, nodes, path, new, asked, 1e-3, 0.0, seconds, costs)
        chosen.append(nodes)
    assert np.mean(chosen[200:300]) > 10 and np.mean(chosen[500:]) < 6


def test_each_source_is_judged_on_its_own() -> None:
    """Catches a dear draft model that is kept because paths beside it are accepted, and paths that are given up with
    it."""
    for truth_of_table, expected in ((0.0, PATH), (0.6, TABLE | PATH)):
        world = World(dense, MATH, draft_seconds=2e-3, path=[0.4] * 4, path_truth=0.4)
        draft = world.draft

        def scaled(asked: int, draft=draft, scale: float = truth_of_table):  # type: ignore[no-untyped-def]
            tree = draft(asked)
            tree.truth = [p * (scale if s == TABLE else 1.0) for p, s in zip(tree.truth, tree.source, strict=True)]
            return tree

        world.draft = scaled  # type: ignore[method-assign]
        late = [asked for at, asked, _, _ in simulate(world, 1500).rounds if at > 700]
        for bit in (TABLE, PATH):
            share = np.mean([bool(asked & bit) for asked in late])
            assert share > 0.9 if expected & bit else share < 0.2, (truth_of_table, bit, share)


# ------------------------------------------------------------------------------------------------------------
# rules


def test_fixed_budgets_are_fixed() -> None:
    costs = _native.CostTable()
    chain = ([1, 2, 3, 4], [-1, 0, 1, 2], [0, 1, 1, 1], [0.0, -9.0, -18.0, -27.0])
    for fixed in (0, 1, 2, 3, 64):
        budget = _native.Budget(fixed)
        assert budget.sources(3, costs) == (0 if fixed == 0 else 3)
        assert budget.choose(*chain, costs) == min(fixed, 3)


def test_nothing_is_drafted_before_the_plain_cost_is_known() -> None:
    """Catches a first round that is drafted, and costs that are measured, without knowing what fits half a second."""
    costs, budget = _native.CostTable(), _native.Budget(-1)
    assert budget.sources(3, costs) == 0
    costs.observe(0, 0.01)
    assert budget.sources(3, costs) == 3 and costs.plain_known and not costs.measured


@pytest.mark.parametrize("plain", [1e-4, 0.01, 0.05, 0.2, 0.4, 3.0])
def test_measuring_takes_at_most_half_a_second(plain: float) -> None:
    """Catches a slow model whose first answer waits for seconds, and a fast one of which too little is measured."""
    costs, spent, sizes = _native.CostTable(), [], []

    def verify(nodes: int) -> float:
        spent.append(plain * (1 + 0.3 * nodes))
        sizes.append(nodes)
        return spent[-1]

    costs.observe(0, plain)
    costs.measure(verify)
    assert sum(spent) <= 0.5 and costs.measured
    assert plain > 1e-4 or (set(sizes) == set(SIZES) and len(sizes) == 3 * len(SIZES))
    assert plain > 0.01 or len(set(sizes)) >= 6
    table = [costs.seconds(n) for n in range(65)]
    assert table == sorted(table) and table[0] > 0
    if plain <= 0.01:
        for nodes in (1, 3, 8, 16):
            assert table[nodes] == pytest.approx(plain * (1 + 0.3 * nodes), rel=0.15)


def test_the_best_of_several_measurements_counts() -> None:
    """Catches a table that keeps what other work on the machine added."""
    costs, calls = _native.CostTable(), []

    def verify(nodes: int) -> float:
        calls.append(nodes)
        return 1e-4 * (1 + nodes) * (5.0 if calls.count(nodes) == 1 else 1.0)

    costs.measure(verify)
    assert costs.seconds(8) == pytest.approx(9e-4)


def test_costs_of_unmeasured_sizes_are_learned() -> None:
    """Catches an extrapolated entry that no observation can correct."""
    costs = _native.CostTable()
    costs.observe(0, 1.0)
    costs.measure(lambda nodes: 1.0)
    assert costs.seconds(8) == pytest.approx(5.0)
    for _ in range(40):
        costs.observe(8, 1.5)
    assert costs.seconds(8) == pytest.approx(1.5, rel=0.05) and costs.seconds(6) <= 1.6


def test_one_outlier_moves_little() -> None:
    """Catches a single hiccup that makes drafting look dear for a hundred rounds."""
    costs = _native.CostTable()
    costs.measure(lambda nodes: 1e-3 * (1 + nodes))
    before = costs.seconds(4)
    costs.observe(4, 10.0)
    assert costs.seconds(4) < 1.2 * before


def test_the_rule_of_the_margin() -> None:
    """Catches a rule other than p_n > lambda * dC(n): one node of probability p pays where p > C(1) / C(0) - 1."""
    for probability, pays in ((0.55, True), (0.45, False)):
        costs, budget = _native.CostTable(), _native.Budget(-1)
        costs.observe(0, 1e-3)
        costs.measure(lambda nodes: 1e-3 if nodes == 0 else 1.5e-3 + 1e-3 * (nodes - 1))
        budget.sources(TABLE, costs)
        assert budget.choose([0, 1], [-1, 0], [0, 1], [0.0, np.log(probability)], costs) == int(pays)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (([0] * 66, [-1] + [0] * 65, [0] + [1] * 65, [0.0] * 66), "66"),
        (([0, 1], [-1, 1], [0, 1], [0.0, -1.0]), "parent 1"),
        (([0, 1], [-1, 0], [0, 4], [0.0, -1.0]), "source 4"),
        (([0, 1], [-1], [0, 1], [0.0, -1.0]), "1 parents"),
    ],
)
def test_impossible_trees_are_refused(tree: tuple[list, ...], words: str) -> None:
    with pytest.raises(_native.Error, match=words):
        _native.Budget(-1).choose(*tree, _native.CostTable())
