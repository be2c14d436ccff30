"""What an engine keeps of drafts is what the last generation that ended has learned, whatever else is alive."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from models import SPECS, build, prompt
from runs import open_session

from kdtree_engine import _native

NAME = _native.NgramDrafter().name


@pytest.fixture
def engine() -> _native.Engine:
    return build(SPECS["k2"], threads=1)


def begun(engine: _native.Engine, seed: int, tokens: int) -> _native.Session:
    session = open_session(engine)
    session.append(prompt(256, 40, seed) * 2)  # its end was there before: n-gram lookup drafts
    session.begin(tokens, drafter=_native.NgramDrafter(), budget=-1)
    session.step()
    return session


def finish(session: _native.Session) -> None:
    while session.step().finished is None:
        pass


def record(engine: _native.Engine) -> dict[str, Any]:
    return engine.draft_record(NAME)


def test_a_live_session_does_not_overwrite_what_another_one_learned(engine: _native.Engine) -> None:
    """Catches lost updates: each round of each session wrote its own copy over what the others had left."""
    fresh = record(engine)
    assert fresh["tokens"] == 0 and fresh["sources"][1]["purse"] == 2
    long = begun(engine, 1, 300)
    for _ in range(20):
        long.step()
    assert record(engine) == fresh, "an unfinished text says nothing of the next one"
    short = begun(engine, 2, 30)
    finish(short)
    left = record(engine)
    assert left["tokens"] > 0 and left["time"] > 0
    for _ in range(20):
        assert long.step().finished is None
    assert record(engine) == left
    finish(long)
    assert record(engine) != left


@pytest.mark.parametrize("end", ["cancel", "rewind", "begin", "close"])
def test_a_generation_that_is_broken_off_leaves_what_it_learned(engine: _native.Engine, end: str) -> None:
    """Catches a record that only a generation which runs to its end leaves: stop texts end by a rewind, readers go."""
    session = begun(engine, 1, 300)
    for _ in range(10):
        session.step()
    before = record(engine)
    if end == "cancel":
        session.cancel()
        assert session.step().finished == "cancelled"
    elif end == "rewind":
        session.rewind(60)
    elif end == "begin":
        session.begin(5)
    else:
        del session
        gc.collect()
    after = record(engine)
    assert before["tokens"] == 0 and after["tokens"] > 0
