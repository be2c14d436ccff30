"""Law 2: tree decoding emits the tokens, logits bits and latent bytes of plain decoding.

Drafts are planted from the plain run, so that long paths through children that are not the first are accepted; each
test asserts that this happened, else it would prove nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from models import SPECS, build, prompt
from runs import Run, assert_same, generate, open_session

from kdtree_engine import _native

BUDGETS = [0, 1, 4, 8, 16, 31, 64]
SAMPLING = {
    "greedy": {},
    "sampled": dict(temperature=0.9, seed=7),
    "filtered": dict(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, seed=2**63 + 5, choice=3),
}


@pytest.fixture(scope="module", params=list(SPECS))
def engine(request: pytest.FixtureRequest) -> _native.Engine:
    return build(SPECS[request.param], threads=2)


def start(engine: _native.Engine, length: int = 70, **kwargs: int) -> _native.Session:
    session = open_session(engine, **kwargs)
    session.append(prompt(engine.config["vocab_size"], length, seed=11))
    return session


def planted(engine: _native.Engine, truth: list[int], seed: int, **kwargs: float) -> _native.PlantedDrafter:
    return _native.PlantedDrafter(truth, engine.config["vocab_size"], seed, **kwargs)


@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_every_budget_equals_plain(engine: _native.Engine, sampling: str) -> None:
    """Catches any op whose bits depend on row count, slot or neighbours, and any slip in masks, positions or commit."""
    options = SAMPLING[sampling]
    session = start(engine)
    plain = generate(session, 90, **options)
    assert plain.stats["target_forwards"] == 90 and len(set(plain.tokens)) > 10
    accepted = branching = longest = 0
    for budget in BUDGETS:
        for seed in range(2):
            tree = start(engine)
            run = generate(tree, 90, drafter=planted(engine, session.tokens, seed), budget=budget, **options)
            assert_same(run, plain)
            assert tree.tokens == session.tokens
            accepted += run.stats["accepted"]
            branching += run.stats["branching_rounds"]
            longest = max(longest, *run.stats["accepted_lengths"])
            assert run.stats["target_forwards"] == run.stats["rounds"] + 1
            assert 1 + sum(run.stats["accepted_lengths"]) == 90
    assert accepted > 300 and branching > 20 and longest >= 10, "the drafts accepted too little to prove anything"


def test_automatic_budget_equals_plain(engine: _native.Engine) -> None:
    """Catches a cost measurement that touches the session, and a clock that reaches the output."""
    session = start(engine)
    plain = generate(session, 60)
    tree = start(engine)
    assert_same(generate(tree, 60, drafter=planted(engine, session.tokens, 3), budget=-1), plain)


def test_max_tokens_inside_an_accepted_path(engine: _native.Engine) -> None:
    """Catches tokens emitted, committed or counted past the limit."""
    session = start(engine)
    generate(session, 40)
    cut = 0
    for limit in range(1, 24):
        plain = generate(start(engine), limit)
        drafter = planted(engine, session.tokens, 5, break_probability=0.0)
        run = generate(start(engine), limit, budget=64, drafter=drafter)
        assert run.finished == "length"
        assert_same(run, plain)
        cut += run.stats["rounds"] < limit - 1
    assert cut > 15


def test_stop_token_inside_an_accepted_path(engine: _native.Engine) -> None:
    """Catches latents committed behind the stop token, and a stop that only the last token of a round can trigger."""
    session = start(engine)
    free = generate(session, 40)
    inside = 0
    for at in range(0, 30, 3):
        stop = free.tokens[at]
        plain = generate(start(engine), 40, stop_tokens=[stop])
        assert plain.finished == "stop" and plain.tokens[-1] == stop
        run = generate(
            start(engine), 40, stop_tokens=[stop], budget=64,
            drafter=planted(engine, session.tokens, at, break_probability=0.0),
        )  # fmt: skip
        assert_same(run, plain)
        inside += run.stats["rounds"] < len(plain.tokens) - 1
    assert inside >= 5


@pytest.mark.parametrize("context", [95, 96, 97, 127, 128, 129])
def test_context_limit_inside_an_accepted_path(engine: _native.Engine, context: int) -> None:
    """Catches rows past the RoPE table or the last page, and a limit that a long path can jump over."""
    wide = start(engine)
    generate(wide, 80)
    plain = generate(start(engine, context=context), 200)
    assert plain.finished == "context" and len(plain.tokens) == context - 70
    run = generate(
        start(engine, context=context), 200, budget=64, drafter=planted(engine, wide.tokens, 1, break_probability=0.0)
    )
    assert_same(run, plain)
    assert run.stats["rounds"] < len(plain.tokens) - 1


def test_continued_session_equals_plain_and_fresh(engine: _native.Engine) -> None:
    """Catches state that a rejected branch or a cut path leaves behind: the second turn would differ."""
    more = prompt(engine.config["vocab_size"], 9, seed=5)

    def two_turns(truth: list[int] | None) -> tuple[list[Run], _native.Session]:
        session = start(engine)
        runs = []
        for turn in range(2):
            options = {} if truth is None else dict(drafter=planted(engine, truth, turn), budget=31)
            runs.append(generate(session, 33, temperature=0.8, seed=turn, **options))
            if turn == 0:
                session.append(more)
        return runs, session

    plain, session = two_turns(None)
    tree, _ = two_turns(session.tokens)
    for a, b in zip(tree, plain, strict=True):
        assert_same(a, b)
    fresh = open_session(engine)
    fresh.append(session.tokens[: 70 + 33 + 9])
    assert_same(generate(fresh, 33, temperature=0.8, seed=1), plain[1])


def test_rewind_forgets(engine: _native.Engine) -> None:
    """Catches latents that survive a rewind."""
    session = start(engine)
    first = generate(session, 30)
    session.rewind(70 + 12)
    assert len(session.tokens) == 82
    again = generate(session, 18)
    assert again.tokens == first.tokens[12:]
    assert again.logits.tobytes() == first.logits[12:].tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(again.caches, first.caches, strict=True))


def test_wrong_drafts_change_nothing(engine: _native.Engine) -> None:
    """Catches a rejected branch that leaves a trace: every drafted node is wrong here."""
    session = start(engine)
    plain = generate(session, 30)
    wrong = [(t + 1) % engine.config["vocab_size"] for t in session.tokens]
    run = generate(start(engine), 30, drafter=planted(engine, wrong, 2, break_probability=0.0), budget=64)
    assert_same(run, plain)
    assert run.stats["drafted"] > 1000


def test_hostile_draft_tables_only_cost_acceptance(engine: _native.Engine) -> None:
    """Catches NaN, infinities, positive values, unsorted rows and token ids out of range reaching the forward pass."""
    rng = np.random.default_rng(0)
    session = start(engine)
    plain = generate(session, 25)
    vocab = engine.config["vocab_size"]
    positions = np.arange(70, 96, dtype=np.int32)
    tokens = rng.integers(-3, vocab + 3, (len(positions), 12, 6)).astype(np.int32)
    logp = rng.normal(-1, 1, tokens.shape).astype(np.float32)
    logp[rng.random(tokens.shape) < 0.2] = np.nan
    logp[rng.random(tokens.shape) < 0.1] = np.inf
    logp[rng.random(tokens.shape) < 0.1] = -np.inf
    run = generate(start(engine), 25, drafter=_native.ReplayDrafter(positions, tokens, logp), budget=64)
    assert_same(run, plain)


@pytest.mark.timeout(120)
def test_rows_that_repeat_a_token(engine: _native.Engine) -> None:
    """Catches a builder that tries every one of 6^12 rank paths where they are twelve different prefixes."""
    plain = generate(start(engine), 5)
    positions = np.arange(70, 76, dtype=np.int32)
    tokens = np.full((len(positions), 12, 6), 3, np.int32)
    logp = np.full(tokens.shape, -1.0, np.float32)
    run = generate(start(engine), 5, drafter=_native.ReplayDrafter(positions, tokens, logp), budget=64)
    assert_same(run, plain)


def test_ngram_on_repeating_text(engine: _native.Engine) -> None:
    """Prompt lookup on a prompt that repeats itself: same output, whatever it drafts."""
    text = prompt(engine.config["vocab_size"], 12, seed=2) * 6

    def run(**options: object) -> Run:
        session = open_session(engine)
        session.append(text)
        return generate(session, 40, **options)

    plain = run()
    tree = run(drafter=_native.NgramDrafter(), budget=16)
    assert_same(tree, plain)
    assert tree.stats["drafted"] > 0
