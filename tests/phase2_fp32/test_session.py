"""Sessions and executors refuse what they cannot do with one sentence, and stay usable."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from models import SPECS, build, config, prompt
from runs import assert_same, generate, open_session

from kdtree_engine import _native


@pytest.fixture(scope="module")
def engine() -> _native.Engine:
    return build(SPECS["k2"], threads=1)


def refused(call: Callable[[], object], code: str, *words: str) -> None:
    with pytest.raises(_native.Error) as caught:
        call()
    assert caught.value.code == code  # type: ignore[attr-defined]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_tokens=0), ["max_tokens", "0"]),
        (dict(max_tokens=-5), ["max_tokens", "-5"]),
        (dict(max_tokens=4, temperature=-1.0), ["temperature", "-1"]),
        (dict(max_tokens=4, temperature=float("nan")), ["temperature", "nan"]),
        (dict(max_tokens=4, top_k=-1), ["top_k", "-1"]),
        (dict(max_tokens=4, top_p=0.0), ["top_p", "0"]),
        (dict(max_tokens=4, top_p=1.5), ["top_p", "1.5"]),
        (dict(max_tokens=4, min_p=-0.1), ["min_p", "-0.1"]),
        (dict(max_tokens=4, budget=65), ["budget", "65", "64"]),
        (dict(max_tokens=4, budget=-2), ["budget", "-2"]),
        (dict(max_tokens=4, stop_tokens=list(range(100, 165))), ["65 stop tokens", "64"]),
        (dict(max_tokens=4, stop_tokens=[100] * 1_000_000), ["1000000 stop tokens", "64"]),  # written past their array
    ],
)
def test_bad_parameters_are_refused(engine: _native.Engine, options: dict[str, Any], words: list[str]) -> None:
    session = open_session(engine)
    session.append([1, 2, 3])
    refused(lambda: session.begin(**options), "invalid_argument", *words)
    assert len(generate(session, 3).tokens) == 3


def test_tokens_outside_the_vocabulary_are_refused_whole(engine: _native.Engine) -> None:
    """Catches a half-appended prompt."""
    session = open_session(engine)
    refused(lambda: session.append([1, 2, 256]), "invalid_argument", "token 2", "256")
    refused(lambda: session.append([-1]), "invalid_argument", "-1")
    assert session.tokens == []
    refused(lambda: session.begin(3), "invalid_argument", "empty")
    refused(session.step, "invalid_argument", "begin")


def test_prompt_that_fills_the_context_is_refused(engine: _native.Engine) -> None:
    session = open_session(engine, context=16)
    refused(lambda: session.append([1] * 16), "out_of_memory", "16")
    session.append([1] * 15)
    run = generate(session, 10)
    assert run.finished == "context" and len(run.tokens) == 1
    refused(lambda: session.begin(3), "out_of_memory", "16")


def test_sessions_are_limited_and_pages_come_back(engine: _native.Engine) -> None:
    """Catches leaked pages and slots: the pool is exactly large enough for what it promises."""
    executor = _native.Executor(engine, 128, 2, 0)
    for _ in range(5):
        sessions = [_native.Session(executor) for _ in range(2)]
        refused(lambda: _native.Session(executor), "out_of_memory", "2 sessions")
        for session in sessions:
            session.append(prompt(256, 100, 1))
            generate(session, 28)
        del session, sessions


def test_two_sessions_do_not_see_each_other(engine: _native.Engine) -> None:
    """Catches a page or scratch row used for the wrong sequence: interleaved steps equal separate ones."""
    def alone(seed: int) -> object:
        session = open_session(engine)
        session.append(prompt(256, 50 + seed, seed))
        return generate(session, 20)

    executor = _native.Executor(engine, 256, 2, 16)
    sessions = [_native.Session(executor) for _ in range(2)]
    for seed, session in enumerate(sessions):
        session.append(prompt(256, 50 + seed, seed))
        session.begin(20)
    tokens: list[list[int]] = [[], []]
    unfinished = {0, 1}
    while unfinished:
        for i in sorted(unfinished):
            result = sessions[i].step()
            tokens[i] += result.tokens
            if result.finished:
                unfinished.discard(i)
    assert [tokens[i] == alone(i).tokens for i in range(2)] == [True, True]  # type: ignore[attr-defined]


def test_cancel_from_another_thread_leaves_the_session_usable(engine: _native.Engine) -> None:
    """Catches a cancelled step that commits, and a flag that outlives its generation."""
    session = open_session(engine, prefill_rows=512)
    session.append(prompt(256, 500, 9))
    session.begin(5)
    timer = threading.Timer(0.002, session.cancel)
    timer.start()
    finished = None
    while finished is None:
        finished = session.step().finished
    timer.join()
    assert finished in ("cancelled", "length")
    session.rewind(500)
    fresh = open_session(engine)
    fresh.append(prompt(256, 500, 9))
    assert_same(generate(session, 5), generate(fresh, 5))


def test_context_beyond_the_model_or_the_memory_is_refused() -> None:
    engine = build(SPECS["k2"])
    refused(lambda: _native.Executor(engine, 1025, 1, 0), "invalid_argument", "1025", "1024")
    refused(lambda: _native.Executor(engine, 64, 0, 0), "invalid_argument", "sessions")


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    """Catches a loader that leaves a weight uninitialised or binds the wrong one."""
    builder = _native.EngineBuilder(config())
    weight = np.zeros((256, 64), np.float32)
    refused(lambda: builder.add("model.embed.weight", weight), "bad_model", "model.embed.weight")
    narrow = weight[:, :63].copy()
    refused(lambda: builder.add("lm_head.weight", narrow), "bad_model", "lm_head.weight", "[256, 63]", "[256, 64]")
    refused(lambda: builder.add("lm_head.weight", weight.astype(np.int32)), "bad_model", "lm_head.weight", "i32")
    builder.add("lm_head.weight", weight)
    refused(lambda: builder.add("lm_head.weight", weight), "bad_model", "twice")
    refused(builder.finish, "bad_model", "missing", "model.embed_tokens.weight")
    words, scales = np.zeros((256, 8), np.int32), np.ones((256, 2), np.float32)
    refused(lambda: builder.add_w4a16("model.embed_tokens", words, scales), "unsupported", "model.embed_tokens")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(bad: float) -> None:
    builder = _native.EngineBuilder(config())
    weight = np.zeros((40, 64), np.float32)
    weight[39, 63] = bad
    refused(lambda: builder.add("model.layers.0.self_attn.q_a_proj.weight", weight), "not_finite", "q_a_proj")
    words, scales = np.zeros((32, 8), np.int32), np.full((32, 2), bad, np.float32)
    module = "model.layers.1.mlp.experts.0.up_proj"
    refused(lambda: builder.add_w4a16(module, words, scales), "not_finite", "experts.0.up_proj")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(hidden_size=0), ["hidden_size"]),
        (dict(qk_rope_head_dim=15), ["qk_rope_head_dim"]),
        (dict(num_experts_per_tok=9), ["num_experts_per_tok"]),
        (dict(n_group=3), ["n_group"]),
        (dict(rms_norm_eps=0.0), ["rms_norm_eps"]),
        (dict(rope_factor=0.0), ["rope_factor"]),
        (dict(rope_theta=float("nan")), ["rope_theta"]),
        (dict(vocab_size=1e18), ["vocab_size"]),
        (dict(kv_lora_rank=32.5), ["kv_lora_rank", "32.5"]),
    ],
)
def test_impossible_configs_are_named(change: dict[str, float], words: list[str]) -> None:
    refused(lambda: _native.EngineBuilder(config() | change), "bad_model", *words)


def test_missing_and_unknown_config_fields_are_named() -> None:
    """Catches a default where the checkpoint said nothing."""
    fields = config()
    for key in fields:
        less = {k: v for k, v in fields.items() if k != key}
        refused(lambda less=less: _native.EngineBuilder(less), "bad_model", f"config.{key} is missing")  # type: ignore[misc]
    refused(lambda: _native.EngineBuilder(fields | {"rope_scale": 1.0}), "bad_model", "rope_scale")


def test_nan_logits_end_the_generation_not_the_process() -> None:
    """A weight so large that the logits overflow to NaN: the request ends with an error, the engine stays usable."""
    fields = config(num_hidden_layers=1, first_k_dense_replace=1)
    rng = np.random.default_rng(0)
    builder = _native.EngineBuilder(fields)
    for name, shape, _ in builder.expected():
        array = rng.normal(0, 1, shape).astype(np.float32)
        if name == "model.layers.0.mlp.down_proj.weight":
            array[:] = 3e38
        builder.add(name, array)
    engine = builder.finish()
    session = open_session(engine)
    session.append([1, 2, 3])
    session.begin(5)
    result = session.step()
    assert result.finished == "error" and "NaN" in result.error and result.tokens == []
    assert session.tokens == [1, 2, 3]


def test_device_names() -> None:
    for bad in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"]:
        refused(lambda bad=bad: _native.EngineBuilder(config(), bad), "invalid_argument", "device")  # type: ignore[misc]
    refused(lambda: _native.EngineBuilder(config(), "cpu", -1), "invalid_argument", "threads")
    refused(lambda: _native.EngineBuilder(config(), "cpu", 0, "sse9"), "invalid_argument", "sse9")


def test_steps_release_the_interpreter(engine: _native.Engine) -> None:
    """Catches a step that holds the GIL: another Python thread must make progress during a long prompt."""
    session = open_session(engine, context=1024, prefill_rows=1000)
    session.append(prompt(256, 1000, 2))
    session.begin(1)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    session.step()
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(begin < t < end for t in ticks) >= 1
