"""Law 2 with the draft model: tokens, logits bits and latent bytes of plain decoding, whoever drafts."""

from __future__ import annotations

import numpy as np
import pytest
from draft_models import RUN_IDS, RUNS, TABLE, Pair, pair, require, watch
from models import prompt
from runs import assert_same, generate, open_session

from kdtree_engine import _native

SAMPLING = {"greedy": {}, "sampled": dict(temperature=0.9, top_p=0.97, seed=7)}


@pytest.fixture(scope="module", params=RUNS, ids=RUN_IDS)
def p(request: pytest.FixtureRequest) -> Pair:
    name, device = request.param
    require(device)
    return pair(name, device)


def start(p: Pair, length: int = 70, **kwargs: int) -> _native.Session:
    session = open_session(p.engine, **kwargs)
    session.append(prompt(p.vocab, length, seed=11))
    return session


@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_every_budget_equals_plain(p: Pair, sampling: str) -> None:
    """Catches taps that change the forward they are taken from, and draft ops that write where the target reads."""
    options = SAMPLING[sampling]
    session = start(p)
    plain = generate(session, 60, **options)
    accepted = branching = 0
    for budget in (0, 1, 4, 8, 16, 31, 64):
        planted = _native.PlantedDrafter(session.tokens, p.vocab, budget, as_paths=True)
        tree = start(p)
        run = generate(
            tree, 60, drafter=_native.CombinedDrafter([_native.DFlashDrafter(), planted]), budget=budget, **options
        )
        assert_same(run, plain)
        assert tree.tokens == session.tokens
        accepted += run.stats["accepted"]
        branching += run.stats["branching_rounds"]
        alone = generate(start(p), 60, drafter=_native.DFlashDrafter(), budget=budget, **options)
        assert_same(alone, plain)
        assert budget == 0 or alone.stats["drafted"] > 0
    assert accepted > 150 and branching > 3, "the drafts accepted too little to prove anything"


def test_drafts_begun_ahead_are_the_same_drafts(p: Pair) -> None:
    """Catches a draft that a device began behind a round and that another session, a rewind or another text made
    stale: with a trace none is begun ahead, and what a fixed budget accepts must not differ."""
    ahead = generate(start(p), 40, drafter=_native.DFlashDrafter(), budget=8)
    asked = start(p)
    watch(asked, 40, drafter=_native.DFlashDrafter(), budget=8)
    lengths = ahead.stats["accepted_lengths"]
    assert asked.stats["accepted_lengths"] == lengths

    executor = _native.Executor(p.engine, 512, 2)
    both = [_native.Session(executor), _native.Session(executor)]
    for seed, session in enumerate(both):
        session.append(prompt(p.vocab, 70, seed=11 + seed))
        session.begin(40, drafter=_native.DFlashDrafter(), budget=8)
    running = [True, True]
    while any(running):  # in turn, so that each begins a draft while the other's is not read yet
        running = [r and session.step().finished is None for r, session in zip(running, both, strict=True)]
    assert both[0].stats["accepted_lengths"] == lengths and both[0].tokens == asked.tokens

    again = start(p)  # the same root at the same position behind another text
    again.begin(40, drafter=_native.DFlashDrafter(), budget=8)
    while again.step().finished is None and len(again.tokens) < 90:
        pass
    again.rewind(30)
    again.append(prompt(p.vocab, 70, seed=11)[30:])
    assert generate(again, 40, drafter=_native.DFlashDrafter(), budget=8).stats["accepted_lengths"] == lengths


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrow_table_is_the_first_ranks_of_the_whole(p: Pair, width: int) -> None:
    """Catches a table whose rows shift when it is cut, a width that is not kept, and a chain that is no path."""
    plain = generate(start(p), 40)
    assert_same(generate(start(p), 40, drafter=_native.DFlashDrafter(width), budget=64), plain)
    seen = watch(start(p), 40, drafter=_native.DFlashDrafter(width), budget=64)
    assert len(seen.rounds) == len(seen.drafts) > 5
    for r, draft in zip(seen.rounds, seen.drafts, strict=True):
        best = np.argsort(-draft.logits, axis=1, kind="stable")[:, :width]
        nodes = list(zip(r["tokens"], r["depths"], r["parents"], strict=True))[1:]
        assert nodes and all(token in best[depth - 1] for token, depth, _ in nodes)
        if width == 1:
            assert [parent for _, _, parent in nodes] == list(range(len(nodes)))
        else:
            assert max(r["parents"].count(parent) for _, _, parent in nodes) == width


def test_a_width_out_of_range_is_refused() -> None:
    for width in (0, -1, 65):
        with pytest.raises(_native.Error, match=f"width {width}; expected 1 to 64"):
            _native.DFlashDrafter(width)


def test_automatic_budget_equals_plain(p: Pair) -> None:
    """Catches a cost measurement that touches the session, and a budget that reaches the output."""
    plain = generate(start(p), 50)
    combined = _native.CombinedDrafter([_native.DFlashDrafter(), _native.NgramDrafter()])
    assert_same(generate(start(p), 50, drafter=combined, budget=-1), plain)


@pytest.mark.parametrize("context", [95, 96, 97, 128])
def test_the_context_limit(p: Pair, context: int) -> None:
    """Catches a block, or the rows that wait, past the last page."""
    plain = generate(start(p, context=context), 200)
    run = generate(start(p, context=context), 200, budget=16, drafter=_native.DFlashDrafter())
    assert plain.finished == "context"
    assert_same(run, plain)


def test_cancelling_leaves_the_session_usable(p: Pair) -> None:
    """Catches state that is half fed: a step that was cancelled counts for neither the target nor the draft model."""
    plain = generate(start(p), 30)
    session = start(p)
    session.begin(30, drafter=_native.DFlashDrafter(), budget=8)
    tokens: list[int] = []
    for _ in range(4):
        tokens += session.step().tokens
    session.cancel()
    assert session.step().finished == "cancelled"
    assert session.draft_positions[1] == session.committed
    rest = watch(session, 30 - len(tokens), drafter=_native.DFlashDrafter(), budget=8)
    assert session.tokens[70:] == plain.tokens and rest.drafts


def test_a_node_keeps_all_its_sources(p: Pair) -> None:
    """Catches a merge in which one source hides another: the n-gram's and the table's nodes stand in one tree."""
    session = open_session(p.engine)
    session.append(prompt(p.vocab, 12, seed=2) * 6)
    combined = _native.CombinedDrafter([_native.DFlashDrafter(), _native.NgramDrafter()])
    seen = watch(session, 30, drafter=combined, budget=64)
    sources = {source for r in seen.rounds for source in r["sources"][1:]}
    assert {TABLE, 2} <= sources
    for r in seen.rounds:
        assert r["asked"] == 3 and r["nodes"] == len(r["tokens"]) - 1 <= 64
        children = list(zip(r["parents"], r["tokens"], strict=True))
        assert len(set(children)) == len(children), "a prefix stands in the tree twice"


def test_two_tables_are_refused() -> None:
    with pytest.raises(_native.Error, match="2 of the drafters propose a table"):
        _native.CombinedDrafter([_native.DFlashDrafter(), _native.PlantedDrafter([1, 2], 256)])


def test_a_drafter_without_its_model_is_refused() -> None:
    """Catches a session that would draft with nothing, and a session that is broken by the refusal."""
    from models import SPECS, build

    session = open_session(build(SPECS["k2"]))
    session.append([1, 2, 3])
    with pytest.raises(_native.Error, match="dflash needs a draft model, and the engine has none"):
        session.begin(5, drafter=_native.DFlashDrafter())
    assert len(generate(session, 5).tokens) == 5
