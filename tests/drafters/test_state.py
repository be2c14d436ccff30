"""The draft model's state: a proposal is a bitwise function of the prefix alone, however the session came there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_models import DRAFTS, RUN_IDS, RUNS, Pair, build_pair, pair, require, watch
from models import prompt
from runs import generate, open_session

from kdtree_engine import _native

PROMPT = 70


def start(p: Pair, length: int = PROMPT, **kwargs: int) -> _native.Session:
    session = open_session(p.engine, **kwargs)
    session.append(prompt(p.vocab, length, seed=11))
    return session


def plain_tokens(p: Pair, count: int) -> list[int]:
    """Prompt and `count` greedy tokens."""
    session = start(p)
    generate(session, count)
    return session.tokens


def drafter(p: Pair, truth: list[int], seed: int = 5) -> _native.Drafter:
    planted = _native.PlantedDrafter(truth, p.vocab, seed, as_paths=True, break_probability=0.2)
    return _native.CombinedDrafter([_native.DFlashDrafter(), planted])


def draft_at(p: Pair, tokens: list[int], position: int) -> np.ndarray:
    """The logits of a draft whose root stands at `position`, from a session that has only seen this prefix."""
    session = open_session(p.engine)
    session.append(tokens[:position])
    seen = watch(session, 2, drafter=_native.DFlashDrafter(), budget=1)
    assert session.tokens[: position + 1] == tokens[: position + 1] and seen.drafts[0].position == position
    return seen.drafts[0].logits


def entries(p: Pair, session: _native.Session) -> list[bytes]:
    return [session.draft_cache(layer).tobytes() for layer in range(p.draft.layers)]


@pytest.fixture(scope="module", params=RUNS, ids=RUN_IDS)
def p(request: pytest.FixtureRequest) -> Pair:
    name, device = request.param
    require(device)
    return pair(name, device)


@pytest.mark.parametrize("budget", [0, 1, 4, 24, 64])
def test_incremental_equals_recomputed(p: Pair, budget: int) -> None:
    """Catches features of rejected rows, a path's rows in another order, a verify width that leaves no taps, keys at
    positions of the tree's rows instead of the path's, and any op whose bits depend on the batch."""
    truth = plain_tokens(p, 60)
    session = start(p)
    seen = watch(session, 60, drafter=drafter(p, truth), budget=budget)
    assert session.tokens == truth
    if budget == 0:
        assert not seen.drafts and session.draft_positions == (PROMPT, PROMPT + 59)
        seen = watch(session, 4, drafter=_native.DFlashDrafter(), budget=1)  # 59 waiting taps in one batch
        assert session.draft_positions[0] >= PROMPT + 60
    assert len(seen.drafts) >= 3
    for draft in seen.drafts[:: max(1, len(seen.drafts) // 4)]:
        assert draft.logits.tobytes() == draft_at(p, session.tokens, draft.position).tobytes(), draft.position


@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_prompt_chunks_change_no_bit(p: Pair, rows: int) -> None:
    """Catches features that depend on how a prompt was cut."""
    whole, cut = start(p), start(p, prefill_rows=rows)
    runs = [watch(s, 3, drafter=_native.DFlashDrafter(), budget=4) for s in (whole, cut)]
    assert entries(p, whole) == entries(p, cut)
    assert runs[0].drafts[0].logits.tobytes() == runs[1].drafts[0].logits.tobytes()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128])
def test_short_prompts_and_page_borders(p: Pair, length: int) -> None:
    """Catches an empty context, a first page that is not full, a chunk that begins with the block."""
    session = start(p, length)
    seen = watch(session, 3, drafter=_native.DFlashDrafter(), budget=4)
    taps = p.taps(session.tokens)
    for draft in seen.drafts:
        assert draft.logits.tobytes() == draft_at(p, session.tokens, draft.position).tobytes()
        if p.device == "cuda_bf16":
            continue  # the oracle has no bf16
        wanted = p.oracle().logits(draft.root, taps[: draft.position])
        assert np.abs(draft.logits - wanted).max() < 1e-5 * max(1, np.abs(wanted).max())


def test_a_rewind_forgets_and_goes_on(p: Pair) -> None:
    """Catches keys that survive a rewind, taps that wait past it, and positions fed twice or never."""
    truth = plain_tokens(p, 60)
    for length in (PROMPT + 31, PROMPT + 5, PROMPT, 65, 12):
        session = start(p)
        watch(session, 40, drafter=drafter(p, truth), budget=24)
        session.rewind(length)
        assert session.draft_positions[1] == min(length, PROMPT + 39)
        seen = watch(session, 25, drafter=drafter(p, truth, seed=6), budget=24)
        assert length < PROMPT or session.tokens == truth[: len(session.tokens)]
        for draft in (seen.drafts[0], seen.drafts[-1]):
            assert draft.logits.tobytes() == draft_at(p, session.tokens, draft.position).tobytes()


def test_another_text_after_a_rewind(p: Pair) -> None:
    """Catches keys of the old text behind the rewind point: positions are the same, tokens are not."""
    session = start(p)
    watch(session, 30, drafter=_native.DFlashDrafter(), budget=8)
    session.rewind(40)
    session.append(prompt(p.vocab, 50, seed=3))
    seen = watch(session, 10, drafter=_native.DFlashDrafter(), budget=8)
    for draft in seen.drafts:
        assert draft.logits.tobytes() == draft_at(p, session.tokens, draft.position).tobytes()


@pytest.mark.parametrize("limit", range(2, 12, 3))
def test_a_cut_path_feeds_only_what_was_committed(p: Pair, limit: int) -> None:
    """Catches taps behind max_tokens or a stop token that become context of the next turn."""
    truth = plain_tokens(p, 40)
    sure = _native.PlantedDrafter(truth, p.vocab, 1, as_paths=True, break_probability=0.0)
    for options in (dict(), dict(stop_tokens=[truth[PROMPT + limit - 1]])):
        session = start(p)
        combined = _native.CombinedDrafter([_native.DFlashDrafter(), sure])
        watch(session, limit if not options else 40, drafter=combined, budget=64, **options)
        cut = len(session.tokens)
        assert session.tokens == truth[:cut] and session.draft_positions[1] == cut - 1 == session.committed
        session.append(prompt(p.vocab, 5, seed=9))
        seen = watch(session, 4, drafter=_native.DFlashDrafter(), budget=4)
        assert seen.drafts[0].logits.tobytes() == draft_at(p, session.tokens, seen.drafts[0].position).tobytes()


def test_turns_without_the_draft_model_are_made_up_for(p: Pair) -> None:
    """Catches a draft model that drafts over a gap: positions that were decoded plainly, or scored, left no taps."""
    session = start(p)
    generate(session, 20)
    session.append(prompt(p.vocab, 30, seed=2))
    session.score(prompt(p.vocab, 20, seed=4))
    assert session.draft_positions == (0, 0)
    seen = watch(session, 6, drafter=_native.DFlashDrafter(), budget=4)
    for draft in seen.drafts:
        assert draft.logits.tobytes() == draft_at(p, session.tokens, draft.position).tobytes()


def test_many_rounds_without_a_draft(p: Pair) -> None:
    """Catches waiting taps that overflow their room: more rounds than it holds, then a draft."""
    session = start(p, context=400)
    watch(session, 300, drafter=_native.DFlashDrafter(), budget=0)
    ready, end = session.draft_positions
    assert end == PROMPT + 299 and 0 < end - ready <= 130 and ready > PROMPT
    seen = watch(session, 3, drafter=_native.DFlashDrafter(), budget=1)
    assert seen.drafts[0].logits.tobytes() == draft_at(p, session.tokens, seen.drafts[0].position).tobytes()


def test_two_sessions_of_one_executor(p: Pair) -> None:
    """Catches taps or keys of one session that reach another: waiting rows and pages are per sequence."""
    executor = _native.Executor(p.engine, 256, 2)
    sessions = [_native.Session(executor), _native.Session(executor)]
    alone: list[Any] = []
    for i, session in enumerate(sessions):
        text = prompt(p.vocab, 40 + 30 * i, seed=i)
        session.append(text)
        session.begin(12, drafter=_native.DFlashDrafter(), budget=4)
        single = open_session(p.engine)
        single.append(text)
        alone.append(watch(single, 12, drafter=_native.DFlashDrafter(), budget=4))
    done = [False, False]
    last: list[np.ndarray | None] = [None, None]
    while not all(done):
        for i, session in enumerate(sessions):
            if not done[i]:
                done[i] = session.step().finished is not None
                last[i] = session.draft_logits()
    for i, session in enumerate(sessions):
        assert session.tokens == alone[i].session.tokens
        assert entries(p, session) == entries(p, alone[i].session)
        assert last[i] is not None and last[i].tobytes() == alone[i].drafts[-1].logits.tobytes()


def test_the_context_limit_does_not_reach_the_block(p: Pair) -> None:
    """Catches a block that is cut, or angles that end, where its last rows stand past the context."""
    wide = start(p, context=400)
    watch(wide, 40, drafter=_native.DFlashDrafter(), budget=4)
    narrow = start(p, context=PROMPT + 12)
    seen = watch(narrow, 40, drafter=_native.DFlashDrafter(), budget=4)
    assert len(narrow.tokens) == PROMPT + 12 and seen.drafts
    last = seen.drafts[-1]
    assert last.position + p.draft.rows > PROMPT + 12
    assert last.logits.tobytes() == draft_at(p, wide.tokens, last.position).tobytes()


@pytest.mark.parametrize("name", list(DRAFTS))
def test_threads_and_instruction_sets_are_one_device_kind(name: str) -> None:
    """Catches a draft op that sums in another order on another code path."""
    q, results = pair(name), []
    for isa in ("portable", "avx2", "avx512"):
        for threads in (1, 2):
            try:
                engine = build_pair(q.target, q.draft, threads=threads, isa=isa)
            except _native.Error as error:
                assert error.code == "unsupported", error  # type: ignore[attr-defined]
                continue
            session = open_session(engine)
            session.append(prompt(q.vocab, PROMPT, seed=1))
            seen = watch(session, 4, drafter=_native.DFlashDrafter(), budget=4)
            results.append((seen.drafts[-1].logits.tobytes(), entries(q, session)))
    assert len(results) >= 2 and all(r == results[0] for r in results)
