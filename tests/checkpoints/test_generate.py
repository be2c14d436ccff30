"""The Python API on a real (tiny) checkpoint: events, stops, cancellation, continuation, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import CONFIG, weights, write_folder

from kdtree_engine import Engine, EngineError, NgramDrafter, PlantedDrafter, Session, _native, kdtr
from kdtree_engine.sampling import token_logprobs
from kdtree_engine.session import Generation

FIXTURE = Path(__file__).parents[1] / "data" / "hf_fixture"
TEXT = (FIXTURE / "text.txt").read_text(encoding="utf-8")
GREEDY: list[int] = kdtr.read(FIXTURE / "expected.kdtr")["greedy"].tolist()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(FIXTURE, device="cpu")


def with_eos(tmp_path: Path, eos: Any) -> Engine:
    path = tmp_path / "model"
    shutil.copytree(FIXTURE, path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return Engine.load(path, device="cpu")


def refused(session: Session, *says: str, code: str = "invalid_argument", **arguments: Any) -> None:
    before = session.tokens
    with pytest.raises(EngineError) as caught:
        session.generate(**arguments)
    message = str(caught.value)
    assert all(word in message for word in says) and "\n" not in message, message
    assert caught.value.code == code
    assert session.tokens == before, "a refused generation must leave the session as it was"


def planted(engine: Engine, tokens: list[int]) -> PlantedDrafter:
    return PlantedDrafter(tokens, engine.vocab_size, 3, break_probability=0.05)


# -- events and results ----------------------------------------------------------------------------------


def test_events_carry_every_token_and_the_whole_text(engine: Engine) -> None:
    session = engine.session()
    events = list(session.generate(TEXT, max_tokens=len(GREEDY), ignore_eos=True))
    result = session.result
    assert result is not None and [e.token for e in events] == result.tokens == GREEDY
    assert "".join(e.text for e in events) == result.text == engine.decode(GREEDY)
    assert session.tokens == result.prompt_tokens + result.tokens
    assert result.stats["target_forwards"] == result.stats["rounds"] + 1
    assert sum(result.stats["accepted_lengths"]) == len(GREEDY) - 1
    assert result.logprobs is None and result.error is None


@pytest.mark.parametrize("eos", [GREEDY[6], [5, GREEDY[6]]])
def test_a_stop_token_is_a_token_but_not_text(tmp_path: Path, eos: Any) -> None:
    """From generation_config.json; the id in config.json stops as well."""
    engine = with_eos(tmp_path, eos)
    assert engine.eos_token_ids == {1, *np.atleast_1d(eos).tolist()}
    length = GREEDY.index(GREEDY[6]) + 1
    result = engine.session().generate(TEXT, max_tokens=30).run()
    assert result.stop_reason == "stop" and result.tokens == GREEDY[:length]
    assert result.text == engine.decode(GREEDY[: length - 1])
    result = engine.session().generate(TEXT, max_tokens=length + 2, ignore_eos=True).run()
    assert result.stop_reason == "length" and result.tokens == GREEDY[: length + 2]


def test_log_probabilities_are_those_of_the_logits(engine: Engine) -> None:
    session = engine.session()
    tokens = engine.encode(TEXT)
    plain = engine.session().score(tokens + GREEDY[:-1])[len(tokens) - 1 :].astype(np.float64)
    reference = plain - np.log(np.exp(plain).sum(-1, keepdims=True))
    generation = session.generate(
        TEXT, max_tokens=len(GREEDY), ignore_eos=True, logprobs=5, drafter=planted(engine, tokens + GREEDY)
    )
    events = list(generation)
    assert session.result is not None and session.result.stats["accepted"] > 0
    for row, token, event in zip(reference, GREEDY, events, strict=True):
        assert event.logprobs is not None and event.logprobs.top[0][0] == token
        assert abs(event.logprobs.logprob - row[token]) < 1e-12
        assert [i for i, _ in event.logprobs.top] == np.argsort(-row, kind="stable")[:5].tolist()
        assert all(abs(p - row[i]) < 1e-12 for i, p in event.logprobs.top)
    assert session.result.logprobs == [e.logprobs for e in events]


def test_ties_among_log_probabilities_go_to_the_lower_id() -> None:
    logits = np.array([1, 3, 2, 3, 2, 2, -np.inf], np.float32)
    assert [i for i, _ in token_logprobs(logits, 0, 4).top] == [1, 3, 2, 4]
    assert [i for i, _ in token_logprobs(logits, 0, 99).top] == [1, 3, 2, 4, 5, 0, 6]
    assert token_logprobs(logits, 0, 0).top == []
    many = np.random.default_rng(0).integers(0, 4, 1000).astype(np.float32)
    best = sorted(range(1000), key=lambda i: (-many[i], i))[:600]
    assert [i for i, _ in token_logprobs(many, 0, 600).top] == best


# -- stop texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_a_stop_text_leaves_the_session_where_plain_decoding_stops(engine: Engine, sampled: bool) -> None:
    """A round emits tokens behind the one that completes a stop text: they must be taken back, and what
    follows in the session must not see them (tokens, cache, counts)."""
    how: dict[str, Any] = {"temperature": 1.0, "seed": 7} if sampled else {}
    free = engine.session().generate(TEXT, max_tokens=24, ignore_eos=True, **how).run()
    text = free.text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    outcomes = []
    for budget in (0, 4, 31, 64):
        session = engine.session()
        drafts = planted(engine, free.prompt_tokens + free.tokens)
        result = session.generate(
            TEXT, max_tokens=24, ignore_eos=True, stop=["never", stop], drafter=drafts, budget=budget, **how
        ).run()
        assert result.stop_reason == "stop" and stop not in result.text and text.startswith(result.text + stop)
        assert session.tokens == result.prompt_tokens + result.tokens
        assert sum(result.stats["accepted_lengths"]) == len(result.tokens) - 1
        assert result.stats["accepted"] == len(result.tokens) - 1 - result.stats["rounds"]
        assert (result.stats["accepted"] > 0) == (budget > 0)
        more = session.generate(" and then", max_tokens=8, ignore_eos=True, **how).run()
        cache = [session.native.cache(layer).tobytes() for layer in range(3)]
        outcomes.append((result.tokens, result.text, more.prompt_tokens, more.tokens, cache))
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_text_that_may_become_a_stop_text_is_held_back_and_comes_in_the_end(engine: Engine) -> None:
    whole = engine.decode(GREEDY[:20])
    stop = whole[-2:] + "never"
    events = list(engine.session().generate(TEXT, max_tokens=20, ignore_eos=True, stop=stop))
    assert "".join(e.text for e in events) == whole
    shown = engine.decode(GREEDY[:19])
    assert not shown.endswith(whole[-2:]), "the case is not the one meant"
    assert events[-1].text.endswith(whole[-2:])


# -- the end of a generation by other means --------------------------------------------------------------


def test_the_context_is_the_limit_of_prompt_and_answer(engine: Engine) -> None:
    tokens = engine.encode(TEXT)
    session = engine.session(context=len(tokens) + 5)
    result = session.generate(TEXT, max_tokens=30, ignore_eos=True).run()
    assert result.stop_reason == "context" and result.tokens == GREEDY[:5]
    refused(session, "no room", code="out_of_memory")
    session.rewind(len(tokens) - 10)
    refused(session, "no room", code="out_of_memory", prompt_tokens=tokens[:15])
    assert session.generate(prompt_tokens=tokens[-10:], max_tokens=2, ignore_eos=True).run().tokens == GREEDY[:2]


def interrupted(session: Session, generation: Generation) -> None:
    """The state that any interruption must leave: all accounted for, and the session as good as new."""
    engine, result = session.engine, session.result
    assert result is not None and result is generation.result and result.stop_reason == "cancelled"
    assert session.tokens == result.prompt_tokens + result.tokens
    assert result.tokens == GREEDY[: len(result.tokens)]
    assert result.text == engine.decode(result.tokens)
    assert list(generation) == []
    left = len(GREEDY) - len(result.tokens)
    assert session.generate(max_tokens=left, ignore_eos=True).run().tokens == GREEDY[-left:]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_between_steps(engine: Engine, after: int) -> None:
    session = engine.session()
    generation = session.generate(TEXT, max_tokens=30, ignore_eos=True)
    for _ in range(after):
        next(generation)
    session.cancel()
    assert len(list(generation)) <= 1
    interrupted(session, generation)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_leaving_the_loop_early_and_going_on(engine: Engine, after: int) -> None:
    session = engine.session()
    generation = session.generate(TEXT, max_tokens=30, ignore_eos=True)
    for _ in range(after):
        next(generation)
    generation.close()
    interrupted(session, generation)


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_ctrl_c_around_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch, when: str, step: int) -> None:
    """Python raises KeyboardInterrupt when the native call returns: its result is lost, its tokens are
    not."""
    session = engine.session()
    native, calls = session.native, iter(range(100))

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def step(self) -> Any:
            if next(calls) == step:
                if when == "behind":
                    native.step()
                raise KeyboardInterrupt
            return native.step()

    session.native = Interrupted()  # type: ignore[assignment]
    tokens = engine.encode(TEXT)
    generation = session.generate(TEXT, max_tokens=30, ignore_eos=True, drafter=planted(engine, tokens + GREEDY))
    with pytest.raises(KeyboardInterrupt):
        for _ in generation:
            pass
    session.native = native
    interrupted(session, generation)


def test_a_real_signal(engine: Engine) -> None:
    """The loop is interruptible at any moment."""
    session = engine.session()
    generation = session.generate(TEXT, max_tokens=100_000, ignore_eos=True)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            session.rewind(0)
            generation = session.generate(TEXT, max_tokens=20, ignore_eos=True)
            generation.run()
    timer.join()
    result = engine.session().generate(TEXT, max_tokens=5, ignore_eos=True).run()
    assert result.tokens == GREEDY[:5]


def test_nan_on_the_way_is_an_error_of_this_generation_alone(tmp_path: Path) -> None:
    """Never an argmax over NaN; the engine and the session live on."""
    arrays = weights(CONFIG)  # of all tokens, only 7 has something in component 0, and there the first MLP overflows
    arrays["model.embed_tokens.weight"][:, 0] = np.arange(CONFIG["vocab_size"]) == 7
    arrays["model.layers.0.self_attn.o_proj.weight"][0] = 0
    for part in ("gate", "up"):
        arrays[f"model.layers.0.mlp.{part}_proj.weight"][0] = 1e25 * (np.arange(CONFIG["hidden_size"]) == 0)
    engine = Engine.load(write_folder(tmp_path, arrays=arrays), device="cpu")
    session = engine.session()
    generation = session.generate(prompt_tokens=[3, 4, 7], max_tokens=5)
    with pytest.raises(EngineError, match="NaN") as caught:
        next(generation)
    assert caught.value.code == "not_finite"
    assert session.result is not None and session.result.stop_reason == "error"
    assert session.result.error == str(caught.value) and session.result.tokens == []
    assert list(generation) == []
    session.rewind(2)
    good = session.generate(prompt_tokens=[5], max_tokens=5, ignore_eos=True).run()
    fresh = engine.session().generate(prompt_tokens=[3, 4, 5], max_tokens=5, ignore_eos=True).run()
    assert good.tokens == fresh.tokens


# -- continuing ------------------------------------------------------------------------------------------


def test_turns_are_one_timeline(engine: Engine) -> None:
    """A second turn sees the first one's tokens, and no opening token of its own in the middle."""
    session = engine.session()
    first = session.generate("Call me", max_tokens=4, ignore_eos=True).run()
    second = session.generate(" Ishmael.", max_tokens=4, ignore_eos=True).run()
    prompt = engine.encode("Call me") + first.tokens + engine.encode(" Ishmael.", start=False)
    assert second.prompt_tokens == prompt and prompt.count(0) == 1
    assert engine.session().generate(prompt_tokens=prompt, max_tokens=4, ignore_eos=True).run().tokens == second.tokens


def test_sessions_do_not_see_each_other(engine: Engine) -> None:
    a, b = engine.session(), engine.session()
    one = a.generate(TEXT, max_tokens=12, ignore_eos=True)
    two = b.generate("Call me", max_tokens=12, ignore_eos=True)
    pairs = list(zip(one, two, strict=True))
    assert [x.token for x, _ in pairs] == GREEDY[:12]
    alone = engine.session().generate("Call me", max_tokens=12, ignore_eos=True).run()
    assert [y.token for _, y in pairs] == alone.tokens


def test_append_and_rewind(engine: Engine) -> None:
    session = engine.session()
    session.append(TEXT[:40])
    session.append(tokens=[5, 6])
    assert session.tokens == [*engine.encode(TEXT[:40]), 5, 6]
    session.rewind(len(session.tokens) - 2)
    session.append(TEXT[40:])
    joined = engine.encode(TEXT[:40]) + engine.encode(TEXT[40:], start=False)
    assert session.tokens == joined
    for bad in (-1, len(joined) + 1, 1.5):
        with pytest.raises(EngineError):
            session.rewind(bad)  # type: ignore[arg-type]
    assert session.tokens == joined


# -- drafters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["auto", "ngram", "planted", "none", None, NgramDrafter])
@pytest.mark.parametrize("budget", ["auto", 0, 7, 64])
def test_no_drafter_and_no_budget_changes_a_token(engine: Engine, drafter: Any, budget: Any) -> None:
    drafts = drafter(max_ngram=2) if drafter is NgramDrafter else drafter
    generation = engine.session().generate(TEXT, max_tokens=16, ignore_eos=True, drafter=drafts, budget=budget)
    result = generation.run()
    assert result.tokens == GREEDY[:16]
    if drafter in ("none", None) or budget == 0:
        assert result.stats["drafted"] == 0
    if drafter == "planted" and budget in (7, 64):
        assert result.stats["accepted"] > 0


def test_replay_comes_from_a_bundle_that_recorded_drafts(engine: Engine, tmp_path: Path) -> None:
    refused(engine.session(), "draft.position", "replay", code="unsupported", prompt=TEXT, drafter="replay")
    config = {f"config.{k}": np.array(v, np.float64) for k, v in _fields(CONFIG).items()}
    prompt = [5, 9, 200, 31]
    kdtr.write(tmp_path / "a.kdtr", config | weights(CONFIG))
    plain = Engine.load(tmp_path / "a.kdtr", device="cpu")
    tokens = plain.session().generate(prompt_tokens=prompt, max_tokens=12, drafter="none").run().tokens
    tables = [_wide(planted(plain, prompt + tokens).propose(prompt + tokens[: i + 1])) for i in range(11)]
    drafts = {
        "draft.position": np.arange(len(prompt), len(prompt) + 11, dtype=np.int32),
        "draft.tokens": np.stack([t for t, _ in tables]),
        "draft.logp": np.stack([p for _, p in tables]),
    }
    kdtr.write(tmp_path / "b.kdtr", config | weights(CONFIG) | drafts)
    engine = Engine.load(tmp_path / "b.kdtr", device="cpu")
    result = engine.session().generate(prompt_tokens=prompt, max_tokens=12, drafter="replay", budget=16).run()
    assert result.tokens == tokens and result.stats["accepted"] > 0


def _fields(config: dict[str, Any]) -> dict[str, float]:
    from kdtree_engine.config import parse_config

    return dict(parse_config(config).fields)


def _wide(table: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A draft table as long as the longest: the truth ends, and near its end tables are shorter."""
    token, logp = np.full((16, 8), 299, np.int32), np.full((16, 8), -50.0, np.float32)
    token += np.arange(-7, 1, dtype=np.int32)
    token[: len(table[0])], logp[: len(table[1])] = table
    return token, logp


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"choice": 2**32}, "choice"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"budget": 65}, "budget"),
        ({"budget": -1}, "budget"),
        ({"budget": "many"}, "budget"),
        ({"drafter": "oracle"}, "ngram"),
        ({"drafter": NgramDrafter}, "drafter"),
        ({"prompt": "both", "prompt_tokens": [1]}, "either"),
        ({"prompt": "\udc80"}, "Unicode"),
        ({"prompt": None, "prompt_tokens": [320]}, "320"),
        ({"prompt": None, "prompt_tokens": [-1]}, "-1"),
        ({"prompt": None, "prompt_tokens": ["a"]}, "token id"),
    ],
)
def test_values_out_of_range(engine: Engine, arguments: dict[str, Any], says: str) -> None:
    session = engine.session()
    refused(session, says, **{"prompt": "Call me", **arguments})
    session.append("Call me")
    refused(session, says, **{"prompt": " Ishmael", **arguments})
    session.generate(max_tokens=1).run()


def test_an_empty_prompt(engine: Engine) -> None:
    """The tokenizer opens a text with a token of its own, so that an empty text is a prompt; no token is
    none."""
    refused(engine.session(), "empty", prompt_tokens=[])
    refused(engine.session(), "empty")
    assert engine.session().generate("", max_tokens=1).run().prompt_tokens == [0]


def test_a_drafter_without_its_draft_model(engine: Engine) -> None:
    refused(engine.session(), "dflash", "draft model", code="invalid_argument", prompt="a", drafter="dflash")


def test_a_model_without_tokenizer_works_on_tokens(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "folder")
    config = {f"config.{k}": np.array(v, np.float64) for k, v in _fields(CONFIG | {"vocab_size": 200}).items()}
    kdtr.write(tmp_path / "small.kdtr", config | weights(CONFIG | {"vocab_size": 200}))
    for model in (path, tmp_path / "small.kdtr"):
        engine = Engine.load(model, device="cpu")
        result = engine.session().generate(prompt_tokens=[3, 4], max_tokens=4, ignore_eos=True).run()
        assert len(result.tokens) == 4 and result.text == ""
        refused(engine.session(), "tokenizer", code="unsupported", prompt="text")
        refused(engine.session(), "tokenizer", code="unsupported", prompt_tokens=[3], stop="x")
        with pytest.raises(EngineError, match="tokenizer"):
            engine.encode("text")


def test_a_bundle_with_room_for_bytes_speaks_bytes(tmp_path: Path) -> None:
    config = {f"config.{k}": np.array(v, np.float64) for k, v in _fields(CONFIG).items()}
    kdtr.write(tmp_path / "m.kdtr", config | weights(CONFIG))
    engine = Engine.load(tmp_path / "m.kdtr", device="cpu")
    assert engine.encode("é") == [0xC3, 0xA9]
    assert engine.session().generate("é", max_tokens=3).run().prompt_tokens == [0xC3, 0xA9]


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        ({"device": "tpu"}, "tpu", "invalid_argument"),
        ({"device": "cuda:x"}, "cuda", "invalid_argument"),
        ({"threads": -1}, "threads", "invalid_argument"),
        ({"threads": 1.5}, "threads", "invalid_argument"),
        ({"context": 0}, "context", "invalid_argument"),
        ({"context": 1025}, "1024", "invalid_argument"),
    ],
)
def test_loading_with_values_out_of_range(arguments: dict[str, Any], says: str, code: str) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        Engine.load(FIXTURE, **{"device": "cpu", **arguments})
    assert caught.value.code == code


def test_auto_takes_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with CUDA on a machine without a device must not fail, and other errors must not be hidden."""
    made: list[str] = []

    def builder(config: Any, device: str, threads: int, **_: Any) -> Any:
        made.append(device)
        error = EngineError("no such luck")
        error.code = "unsupported" if device == "cuda" else "internal"
        raise error

    monkeypatch.setattr(_native, "build_info", lambda: {"cuda": True})
    monkeypatch.setattr(_native, "EngineBuilder", builder)
    with pytest.raises(EngineError) as caught:
        Engine.load(FIXTURE)
    assert made == ["cuda", "cpu"] and caught.value.code == "internal"


def test_threads_change_no_bit(engine: Engine) -> None:
    one = Engine.load(FIXTURE, device="cpu", threads=1)
    tokens = engine.encode(TEXT)[:100]
    assert one.session().score(tokens).tobytes() == engine.session().score(tokens).tobytes()
