"""kdtree perplexity: the windows, the sums, and the command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import chat_models
import numpy as np
import pytest
import tiny_models
from command import assert_refused, kdtree
from hypothesis import given
from hypothesis import strategies as st

from kdtree_engine import Engine, EngineError
from kdtree_engine.perplexity import perplexity, perplexity_of_tokens, windows

TEXT = "It was the best of times, it was the worst of times: 最好的时代 — naïve?\n" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.write_folder(tmp_path_factory.mktemp("perplexity") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder)


@given(st.integers(2, 200), st.integers(1, 50), st.data())
def test_windows(count: int, window: int, data: st.DataObject) -> None:
    """Catches tokens that are scored twice or never, and answers given with less context than promised."""
    stride = data.draw(st.integers(1, window))
    made = list(windows(count, window, stride))
    scored = [token + 1 for w in made for token in range(w.first, w.end)]
    assert scored == list(range(1, count))
    for i, w in enumerate(made):
        assert 0 < w.end - w.begin <= window and w.begin <= w.first < w.end <= count - 1
        assert w.first + 1 - w.begin >= (window - stride + 1 if i else 1)


def by_hand(engine: Engine, tokens: list[int], begin: int, first: int, end: int) -> float:
    """Nats of the tokens behind `first` to `end` - 1, from the logits of one session that starts at `begin`."""
    logits = engine.session(4096).score(tokens[begin:end])[first - begin :].astype(np.float64)
    total = 0.0
    for row, token in zip(logits, tokens[first + 1 : end + 1], strict=True):
        total += np.log(np.exp(row - row.max()).sum()) + row.max() - row[token]
    return total


def test_one_window_is_a_plain_score(engine: Engine) -> None:
    """Catches logits that are held against the wrong token, and sums in the wrong base."""
    tokens = engine.encode(TEXT)
    result = perplexity(engine, TEXT, window=4000)
    nats = by_hand(engine, tokens, 0, 0, len(tokens) - 1)
    assert result.nats == pytest.approx(nats, rel=1e-12)
    assert (result.tokens, result.windows) == (len(tokens) - 1, 1)
    assert result.bytes == len(TEXT.encode()) - 1  # one token a byte, and the first is not scored
    assert result.bits_per_token == pytest.approx(nats / math.log(2) / result.tokens)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / result.bytes)
    assert result.perplexity == pytest.approx(math.exp(nats / result.tokens))


@pytest.mark.parametrize(("window", "stride"), [(100, 50), (100, 100), (70, 1), (65, 64), (64, 30)])
def test_windows_are_scored_like_sessions_of_their_own(engine: Engine, window: int, stride: int) -> None:
    """Catches context that leaks from one window into the next, and positions that go on counting."""
    tokens = engine.encode(TEXT)[:230]
    result = perplexity_of_tokens(engine, tokens, window, stride)
    made = list(windows(len(tokens), window, stride))
    nats = math.fsum(by_hand(engine, tokens, w.begin, w.first, w.end) for w in made)
    assert result.nats == pytest.approx(nats, rel=1e-12)
    assert result.windows == len(made) > 1 and result.bytes == 0 and math.isnan(result.bits_per_byte)


def test_progress_and_limit(engine: Engine) -> None:
    """Catches a bar that does not reach its end, and a limit that counts other tokens than it names."""
    seen: list[tuple[int, int]] = []
    result = perplexity(engine, TEXT, 100, 50, limit=150, progress=lambda *at: seen.append(at))
    assert seen[-1] == (149, 149) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    same = perplexity_of_tokens(engine, engine.encode(TEXT)[:150], 100, 50)
    assert (result.nats, result.tokens) == (same.nats, same.tokens)


def test_bytes_of_a_text_that_begins_with_half_a_character(engine: Engine) -> None:
    """Catches bytes that are counted in characters: the first token is a third of one."""
    assert perplexity(engine, "最x").bytes == 3
    folder_tokenizer_text = perplexity(engine, "xyz")
    assert folder_tokenizer_text.bytes == 2


def test_a_tokenizer_that_opens_texts(tmp_path: Path) -> None:
    """Catches an opening token that is scored itself, or that keeps the first word from being scored."""
    from tokenizers import Tokenizer, processors

    folder = tiny_models.write_folder(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    result = perplexity(Engine.load(folder), "abc")
    assert (result.tokens, result.bytes) == (3, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 10**6}, "window is 1000000; expected an integer from 1 to 99999"),
        ({"window": 10, "stride": 11}, "stride is 11; expected an integer from 1 to 10"),
        ({"stride": 0}, "stride is 0"),
        ({"limit": 1}, "limit is 1"),
        ({"text": "a"}, "has 1 token; at least 2"),
        ({"text": ""}, "has 0 tokens; at least 2"),
    ],
)
def test_refusals(engine: Engine, arguments: dict[str, object], message: str) -> None:
    """Catches numbers that give a score of something else."""
    with pytest.raises(EngineError, match=message) as caught:
        perplexity(engine, **{"text": TEXT, **arguments})  # type: ignore[arg-type]
    assert caught.value.code == "invalid_argument"


def test_no_distribution(tmp_path: Path) -> None:
    """Catches a sum that is NaN, reported as a score."""
    tensors = tiny_models.weights()
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    bundle = Engine.load(tiny_models.write_bundle(tmp_path / "b.kdtr", tensors=tensors))
    with pytest.raises(EngineError, match="token 1 of the text has the log-probability") as caught:
        perplexity(bundle, "abc")
    assert caught.value.code == "not_finite"


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command(folder: Path, engine: Engine, tmp_path: Path) -> None:
    """Catches options that do not arrive, and figures for people that are not those of the JSON."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    options = ("--text", file, "--window", "100", "--stride", "40", "--limit", "200")
    report = kdtree("perplexity", folder, *options, "--json").json
    expected = perplexity(engine, TEXT, 100, 40, 200)
    for key in ("tokens", "bytes", "windows", "nats", "bits_per_byte", "bits_per_token", "perplexity"):
        assert report[key] == getattr(expected, key), key
    run = kdtree("perplexity", folder, *options)
    assert run.code == 0 and run.err == ""
    assert float(re.findall(r"^bits per byte +(\S+)$", run.out, re.MULTILINE)[0]) == pytest.approx(
        expected.bits_per_byte, abs=1e-6
    )
    piped = kdtree("perplexity", folder, "--text", "-", *options[2:], "--json", stdin=TEXT)
    assert json.loads(piped.out)["nats"] == expected.nats


def test_refusals_of_the_command(folder: Path, tmp_path: Path) -> None:
    """Catches a model that is loaded for a text that cannot be read, and tracebacks."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    small = tiny_models.write_bundle(
        tmp_path / "small.kdtr", config={**tiny_models.CONFIG, "vocab_size": 200, "eos_token_id": 1}
    )
    text = tmp_path / "text"
    text.write_text("some text")
    assert_refused(kdtree("perplexity", folder), "--text FILE is missing", code=2)
    assert_refused(kdtree("perplexity"), "--text FILE is missing", code=2)
    assert_refused(kdtree("perplexity", folder, "--text", tmp_path / "no"), "--text", "No such file")
    assert_refused(kdtree("perplexity", folder, "--text", binary), "--text", "not valid UTF-8 at byte 2")
    assert_refused(kdtree("perplexity", folder, "--text", "-"), "0 tokens; at least 2")
    assert_refused(kdtree("perplexity", folder, "--text", text, "--stride", "0"), "--stride", code=2)
    assert_refused(kdtree("perplexity", folder, "--text", text, "--window", "8", "--stride", "9"), "left out", code=2)
    assert_refused(kdtree("perplexity", small, "--text", text), "no text", "needs a tokenizer")
    assert_refused(kdtree("perplexity", tmp_path / "nothing", "--text", text), "does not exist")
