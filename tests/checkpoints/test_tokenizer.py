"""Tokenizers: round trips, special tokens in user text, incremental decoding, stop texts, end-of-text ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine import EngineError
from kdtree_engine.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    StopText,
    Tokenizer,
    generation_eos,
    load_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers")

FIXTURE = Path(__file__).parents[1] / "data" / "hf_fixture"
TEXT = (FIXTURE / "text.txt").read_text(encoding="utf-8")
BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def byte_level() -> FileTokenizer:
    return FileTokenizer(FIXTURE / "tokenizer.json")


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """The other family: a word-boundary mark, and bytes as tokens <0x..> for what the vocabulary lacks."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "C",
        "a",
        "l",
        "▁a",
        "e",
        "é",
        "白",
    ]
    model = tokenizers.models.BPE(
        vocab={p: i for i, p in enumerate(pieces)}, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    t = tokenizers.Tokenizer(model)
    d = tokenizers.decoders
    t.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    t.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    t.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("sp") / "tokenizer.json"
    t.save(str(path))
    return FileTokenizer(path)


def streamed(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in tokens), stream.finish()]


def test_round_trip(byte_level: FileTokenizer) -> None:
    tokens = byte_level.encode(TEXT)
    assert tokens[0] == BOS and len(tokens) > 256
    assert byte_level.decode(tokens) == TEXT
    assert byte_level.encode(TEXT, start=False) == tokens[1:]


def test_special_tokens_in_user_text_are_text(byte_level: FileTokenizer) -> None:
    """A prompt that contains an end-of-turn marker must not be able to end the turn."""
    text = "a<|end|>b<|begin|>"
    tokens = byte_level.encode(text)
    assert EOS not in tokens and tokens.count(BOS) == 1 and tokens[0] == BOS
    assert byte_level.decode(tokens) == text
    assert byte_level.encode(text, special=True).count(EOS) == 1
    assert byte_level.encode(text) == tokens, "the second use must not have changed the first"


def test_special_tokens_have_no_text_and_plain_added_ones_do(byte_level: FileTokenizer) -> None:
    """<think> is an added token but no special one: hidden, a model's reasoning runs into its answer."""
    think = byte_level.encode("<think>", start=False)
    assert len(think) == 1
    assert byte_level.decode([BOS, *think, EOS]) == "<think>"


def test_settings_of_a_training_run_do_not_cut_or_fill_a_prompt(tmp_path: Path) -> None:
    """tokenizer.json may carry truncation and padding; the library applies them silently."""
    loaded = json.loads((FIXTURE / "tokenizer.json").read_text(encoding="utf-8"))
    loaded["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    loaded["padding"] = {
        "strategy": {"Fixed": 1000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "<|end|>",
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(loaded), encoding="utf-8")
    for special in (False, True):
        assert FileTokenizer(path).encode(TEXT, special=special) == FileTokenizer(FIXTURE / "tokenizer.json").encode(
            TEXT, special=special
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=40))
def test_any_tokens_decode_like_the_library(tokens: list[int]) -> None:
    """A model may emit any id in any order: byte fragments, unused rows of the embedding, special tokens."""
    path = FIXTURE / "tokenizer.json"
    assert FileTokenizer(path).decode(tokens) == tokenizers.Tokenizer.from_file(str(path)).decode(tokens)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_bytes_and_byte_level_stream_every_text_without_replacement(text: str) -> None:
    """Every token of a character but the last must be held back: shown, it is U+FFFD."""
    for tokenizer in (ByteTokenizer(), FileTokenizer(FIXTURE / "tokenizer.json")):
        pieces = streamed(tokenizer, tokenizer.encode(text, start=False))
        assert "".join(pieces) == text and pieces[-1] == ""
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_incomplete_character_shows_only_at_the_end() -> None:
    whale = "🐋".encode()
    assert streamed(ByteTokenizer(), list(b"a" + whale[:3])) == ["a", "", "", "", "\ufffd"]
    assert streamed(ByteTokenizer(), list(whale[:2] + b"b")) == ["", "", "\ufffdb", ""]
    assert streamed(ByteTokenizer(), [ord("a"), 300, ord("b")]) == ["a", "\ufffd", "b", ""]


def test_wrong_bytes_are_not_held_back_forever(byte_level: FileTokenizer, sentencepiece_like: FileTokenizer) -> None:
    """A model that emits rubbish bytes must not look as if it had stopped."""
    stray = byte_level.encode("é", start=False)[-1:]
    assert streamed(byte_level, stray * 6) == ["\ufffd"] * 6 + [""]
    pieces = streamed(sentencepiece_like, [2 + 0xFF] * 12)
    assert pieces[:-1].count("") < 12


@pytest.mark.parametrize("text", ["Cal la é白 ale", "🐋 a🐋", "a", "", "白 白"])
def test_a_decoder_with_word_marks_and_byte_fallback_streams_exactly(
    sentencepiece_like: FileTokenizer, text: str
) -> None:
    """Token by token, such decoders lose the spaces between words and show parts of characters."""
    tokens = sentencepiece_like.encode(text)
    pieces = streamed(sentencepiece_like, tokens)
    assert "".join(pieces) == sentencepiece_like.decode(tokens) == text
    assert "\ufffd" not in "".join(pieces)


def test_a_text_that_is_no_unicode_is_refused(byte_level: FileTokenizer) -> None:
    """Command lines and files bring lone surrogates."""
    for tokenizer in (byte_level, ByteTokenizer()):
        with pytest.raises(EngineError, match="Unicode at character 1") as caught:
            tokenizer.encode("a\udc80")
        assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(EngineError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code == "bad_file"


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_eos_of_generation_config(tmp_path: Path) -> None:
    """Kimi K2's two files name different ids; with one of them alone, generation runs on past the turn."""
    assert generation_eos(tmp_path) == frozenset()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [163586, 5]}')
    assert generation_eos(tmp_path) == {163586, 5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(EngineError, match="generation_config"):
        generation_eos(tmp_path)


def pushed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher, out = StopText(stops), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, matcher.finish()], False


def test_stop_text_across_pieces() -> None:
    assert pushed(["END"], ["ab", "cE", "N", "D", "more"]) == (["ab", "c", "", ""], True)
    assert pushed(["END"], ["aE", "Nx", "END"]) == (["a", "ENx", ""], True)
    assert pushed(["END"], ["aE", "N"]) == (["a", "", "EN"], False)
    assert pushed(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)
    assert pushed([], ["a", "b"]) == (["a", "b", ""], False)
    assert pushed(["xyz", "c"], ["abcd"]) == (["ab"], True)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_text_does_not_depend_on_where_the_pieces_end(pieces: list[str], stops: list[str]) -> None:
    """Against the definition: of the stop text that is complete first, the longest counts, wherever pieces
    end."""
    out, stopped = pushed(stops, pieces)
    text = "".join(pieces)
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    assert stopped == bool(ends)
    end = ends[0] if ends else 0
    start = min((end - len(s) for s in stops if text[:end].endswith(s)), default=len(text))
    assert "".join(out) == text[:start]
