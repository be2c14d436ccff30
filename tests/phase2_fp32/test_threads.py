"""Any number of threads on one engine: each gets what it would have got alone, bit for bit, and none waits for ever.

Before calls took turns, two threads wrote into the same workspace of the backend, took the same vacancy of an executor,
and lost each other's pages.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from models import SPECS, build, prompt
from runs import Run, assert_same, generate, open_session

from kdtree_engine import Engine, _native

FIXTURE = Path(__file__).parents[1] / "data" / "hf_fixture"
THREADS = 6


@pytest.fixture(scope="module")
def engine() -> _native.Engine:
    return build(SPECS["k2"], threads=2)


@pytest.fixture(autouse=True)
def switch_often() -> Any:
    """Python changes threads 100 times as often: what can go wrong in between does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that begin at the same moment, a thread each."""
    start = threading.Barrier(len(calls))

    def call(i: int) -> Any:
        start.wait()
        return calls[i]()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(timeout=300) for f in [pool.submit(call, i) for i in range(len(calls))]]


def decode(engine: _native.Engine, session: _native.Session, seed: int) -> Run:
    """Another prompt, sampling, drafter and budget for each seed."""
    session.append(prompt(256, 300 + 13 * seed, seed))
    options: dict[str, Any] = dict(temperature=0.9, seed=seed) if seed % 2 else {}
    if seed % 3:
        plain = open_session(engine)
        plain.append(session.tokens)
        generate(plain, 40, **options)
        options["drafter"] = _native.PlantedDrafter(plain.tokens, 256, seed)
        options["budget"] = -1 if seed % 3 == 1 else 31
    return generate(session, 40, **options)


@pytest.mark.parametrize("shared", [False, True], ids=["executors", "one_executor"])
def test_threads_get_what_they_get_alone(engine: _native.Engine, shared: bool) -> None:
    """Catches steps of two sessions that run at the same time in the engine's one workspace."""
    def sessions() -> list[_native.Session]:
        executor = _native.Executor(engine, 512, THREADS, 48)
        return [_native.Session(executor) if shared else open_session(engine) for _ in range(THREADS)]

    alone = [decode(engine, session, seed) for seed, session in enumerate(sessions())]
    assert sum(run.stats["accepted"] for run in alone) > 20, "the drafts accepted too little to prove anything"
    for _ in range(3):
        runs = together([lambda s=s, i=i: decode(engine, s, i) for i, s in enumerate(sessions())])  # type: ignore[misc]
        for got, wanted in zip(runs, alone, strict=True):
            assert_same(got, wanted)


def test_sessions_open_and_close_in_any_thread(engine: _native.Engine) -> None:
    """Catches a slot or a page that two threads take, and a deadlock of a destructor with the interpreter's lock."""
    executor = _native.Executor(engine, 128, THREADS, 0)

    def churn(seed: int) -> list[list[int]]:
        found = []
        for _ in range(8):
            session = _native.Session(executor)
            session.append(prompt(256, 30, seed))
            found.append(generate(session, 6, drafter=_native.NgramDrafter(), budget=4).tokens)
            del session
            gc.collect()
        return found

    for seed, texts in enumerate(together([lambda i=i: churn(i) for i in range(THREADS)])):  # type: ignore[misc]
        session = open_session(engine)
        session.append(prompt(256, 30, seed))
        assert texts == [generate(session, 6).tokens] * 8


def test_calls_of_one_session_are_whole(engine: _native.Engine) -> None:
    """Catches a prompt that another thread's prompt cuts in two, and reading while it grows."""
    session = open_session(engine)
    parts = [[seed + 1] * 7 for seed in range(THREADS)]
    lengths: list[int] = []

    def add(part: list[int]) -> None:
        for _ in range(10):
            session.append(part)
            lengths.append(len(session.tokens))

    together([lambda part=part: add(part) for part in parts])  # type: ignore[misc]
    tokens = session.tokens
    assert sorted(tokens) == sorted(token for part in parts for token in 10 * part)
    assert all(len(set(tokens[i : i + 7])) == 1 for i in range(0, len(tokens), 7))
    assert all(n % 7 == 0 for n in lengths)


def busy(engine: _native.Engine) -> threading.Thread:
    """A thread that has the engine's turn, for some seconds on any machine."""
    started = threading.Event()

    def read() -> None:
        started.set()
        engine.read_rate(1 << 22, 60000)

    thread = threading.Thread(target=read)
    thread.start()
    started.wait()
    time.sleep(0.2)  # until it is there
    return thread


def test_a_step_that_waits_can_be_cancelled(engine: _native.Engine) -> None:
    """Catches a wait that does not look at the flag: cancelled by the time the other call ends is too late."""
    session = open_session(engine)
    session.append(prompt(256, 20, 1))
    session.begin(5)
    other = busy(engine)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(session.step)
        time.sleep(0.05)
        assert not step.done()
        session.cancel()
        assert step.result(timeout=300).finished == "cancelled"
    still_busy = other.is_alive()
    other.join()
    assert still_busy
    assert session.committed == 0
    fresh = open_session(engine)
    fresh.append(prompt(256, 20, 1))
    assert_same(generate(session, 5), generate(fresh, 5))


def test_reading_a_session_waits_for_no_other(engine: _native.Engine) -> None:
    """Catches a server whose every question waits for somebody's prompt."""
    session = open_session(engine)
    session.append([1, 2, 3])
    generate(session, 4)
    other = busy(engine)
    assert len(session.tokens) == 7 and session.committed == 6
    assert session.stats["rounds"] == 3 and session.logits().shape == (4, 256)
    session.append([4])
    still_busy = other.is_alive()
    other.join()
    assert still_busy


def test_a_loop_keeps_nobody_out(engine: _native.Engine) -> None:
    """Catches an unfair lock, which whoever has just given it up takes again before a waiting thread is awake."""
    done = threading.Event()
    steps = 0

    def loop() -> None:
        nonlocal steps
        session = open_session(engine, context=1024)
        session.append(prompt(256, 20, 1))
        while not done.is_set():
            session.rewind(20)
            session.begin(900)
            while not done.is_set() and session.step().finished is None:
                steps += 1

    thread = threading.Thread(target=loop)
    thread.start()
    session = open_session(engine)
    session.append(prompt(256, 20, 2))
    while steps < 5:
        time.sleep(0.001)
    before = steps
    run = generate(session, 30)
    after = steps
    done.set()
    thread.join()
    assert len(run.tokens) == 30 and after - before < 30 * 100


# -- the Python API --------------------------------------------------------------------------------------


def test_a_server_of_threads() -> None:
    """Catches two requests that are given the same executor's last vacancy, and texts that differ under load."""
    engine = Engine.load(FIXTURE, device="cpu", threads=1, context=256)
    text = (FIXTURE / "text.txt").read_text(encoding="utf-8")
    prompts = [text[i : i + 40 + i] for i in range(THREADS)]

    def answer(i: int) -> str:
        session = engine.session()
        return session.generate(prompts[i], max_tokens=30, ignore_eos=True, temperature=0.7, seed=i).run().text

    alone = [answer(i) for i in range(THREADS)]
    for _ in range(3):
        assert together([lambda i=i: answer(i) for i in range(THREADS)]) == alone  # type: ignore[misc]


def test_threads_that_share_a_generation_take_every_event_once() -> None:
    """Catches an event that two threads take, or none: the queue was looked at and emptied in two steps."""
    engine = Engine.load(FIXTURE, device="cpu", threads=1, context=256)
    wanted = engine.session().generate(prompt_tokens=[5, 6, 7], max_tokens=120, ignore_eos=True).run().tokens
    generation = engine.session().generate(prompt_tokens=[5, 6, 7], max_tokens=120, ignore_eos=True)
    taken = together([lambda: [event.token for event in generation] for _ in range(4)])
    tokens = [token for part in taken for token in part if token is not None]
    assert sorted(tokens) == sorted(wanted)
    assert generation.result is not None and generation.result.tokens == wanted
