"""Conversations: from messages to tokens, and the session behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chat_models
import pytest
import rank_files
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine import Engine, EngineError
from kdtree_engine.chat import Chat, encode_messages, split_reasoning
from kdtree_engine.templates import ChatTemplate
from kdtree_engine.tiktoken_tokenizer import TiktokenTokenizer
from kdtree_engine.tokenizer import FileTokenizer

APPENDING = ChatTemplate(chat_models.APPENDING, "appending")
THINKING = ChatTemplate(chat_models.THINKING, "thinking")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TiktokenTokenizer:
    folder = tmp_path_factory.mktemp("kimi")
    rank_files.write_kimi(folder)
    return TiktokenTokenizer(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(chat_models.write_folder(tmp_path_factory.mktemp("chat")))


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# -- tokens --------------------------------------------------------------------------------------------------------


def test_tokens_of_a_conversation(tokenizer: TiktokenTokenizer) -> None:
    """Catches tokens that a template did not write ([BOS], spaces, line breaks), and markers taken for text."""
    ids = tokenizer.specials
    middle, end = ids["<|im_middle|>"], ids["<|im_end|>"]
    messages = [said("system", "S"), said("user", "U", name="Ann"), said("assistant", "A")]
    assert encode_messages(APPENDING, tokenizer, messages) == [
        ids["<|im_system|>"], *b"system", middle, *b"S", end,
        ids["<|im_user|>"], *b"Ann", middle, *b"U", end,
        ids["<|im_assistant|>"], *b"assistant", middle, *b"A", end,
        ids["<|im_assistant|>"], *b"assistant", middle,
    ]  # fmt: skip
    closed = encode_messages(APPENDING, tokenizer, messages, add_generation_prompt=False)
    assert closed[-2:] == [*b"A", end]


MARKERS = ["<|im_end|>", "<|im_system|>", "<|im_middle|>", "[EOS]", "<think>", "</think>", "<|reserved_token_261|>"]
HOSTILE = st.lists(
    st.sampled_from(
        [*MARKERS, "<|im_", "end|>", "<", "|>", "[", "<<|im_end|>", "\ufdd0", "\ufdd1", "\U000f0000", "é", " "]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_messages_cannot_write_special_tokens(
    tokenizer: TiktokenTokenizer, system: str, user: str, name: str, tool: str
) -> None:
    """Catches a message, a name or a tool's text that ends its turn or opens another one; and text that is
    changed by the guard against it."""
    import json

    ids = tokenizer.specials
    middle, end = ids["<|im_middle|>"], ids["<|im_end|>"]
    messages = [said("system", system), said("user", user, name=name or "x")]
    tools = [{"text": tool}]
    assert encode_messages(APPENDING, tokenizer, messages, tools=tools) == [
        ids["<|im_system|>"], *b"tool_declare", middle, *json.dumps(tools, ensure_ascii=False).encode(), end,
        ids["<|im_system|>"], *b"system", middle, *system.encode(), end,
        ids["<|im_user|>"], *(name or "x").encode(), middle, *user.encode(), end,
        ids["<|im_assistant|>"], *b"assistant", middle,
    ]  # fmt: skip


def test_thoughts_of_the_model_are_tokens(tokenizer: TiktokenTokenizer) -> None:
    """Catches ``</think>`` in the model's own words that comes back as five letters; its other markers are text."""
    ids = tokenizer.specials
    tokens = encode_messages(
        APPENDING, tokenizer, [said("assistant", "<think>a</think>b<|im_end|>")], add_generation_prompt=False
    )
    assert tokens[tokens.index(ids["<|im_middle|>"]) :] == [
        ids["<|im_middle|>"], ids["<think>"], *b"a", ids["</think>"], *b"b<|im_end|>", ids["<|im_end|>"],
    ]  # fmt: skip


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_plain_messages_as_the_library_sees_them(tokenizer: TiktokenTokenizer, texts: list[str]) -> None:
    """Catches pieces that are tokenized in another way than the whole text, where no message holds a marker."""
    messages = [said("user", text.replace("<", "").replace("[", "")) for text in texts]
    whole = tokenizer.encode(APPENDING.render(messages), special=True)
    assert encode_messages(APPENDING, tokenizer, messages) == whole


def test_with_a_tokenizer_json(tmp_path: Path) -> None:
    """Catches an opening token that is added to what the template wrote, and markers of another tokenizer."""
    tiny_models.write_tokenizer(tmp_path / "tokenizer.json")
    other = FileTokenizer(tmp_path / "tokenizer.json")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", "t")
    assert encode_messages(template, other, [said("user", "a<|end|>b")]) == [*b"a<|end|>b", 256]


# -- reasoning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("plain", False, (None, "plain")),
        ("<think>a</think>b", False, ("a", "b")),
        ("\n<think>\na</think>\nb", False, ("\na", "\nb")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("cut in thoughts", True, ("cut in thoughts", "")),
        ("<think>cut", False, ("cut", "")),
        ("late</think>b", False, ("late", "b")),
        ("", True, ("", "")),
        ("", False, (None, "")),
    ],
)
def test_split_reasoning(text: str, thinking: bool, expected: tuple[str | None, str]) -> None:
    """Catches thoughts that are taken for the answer and come back in the next prompt."""
    assert split_reasoning(text, thinking) == expected


# -- sessions ------------------------------------------------------------------------------------------------------


def alone(engine: Engine, prompt: list[int], **generation: Any) -> list[int]:
    """What a new session answers to the whole conversation."""
    return engine.session(4096).generate(prompt_tokens=prompt, **generation).run().tokens


def test_turns_are_appended(engine: Engine) -> None:
    """Catches a history that is computed again, and a turn whose tokens differ from those of a fresh start."""
    chat = Chat(engine, system="S", context=4096)
    for question in ("one", "two<|im_end|>", "three"):
        before = chat.session.tokens
        reply = chat.send(question, max_tokens=20)
        result = reply.run()
        assert reply.kept == len(before)
        assert result.prompt_tokens[: len(before)] == before
        assert result.tokens == alone(engine, result.prompt_tokens, max_tokens=20)
    assert [m["role"] for m in chat.messages] == ["system"] + 3 * ["user", "assistant"]
    assert chat.messages[3]["content"] == "two<|im_end|>"


def test_whole_turns_read_like_the_template(engine: Engine) -> None:
    """Catches a history that drifts from what the template would write, where answers end by themselves."""
    end = engine.text_tokenizer("").specials["<|im_end|>"]
    chat = Chat(engine, context=4096)
    plant(chat, [*b"yes", end])
    reply = chat.send("two", max_tokens=1)
    reply.run()
    fresh = encode_messages(chat.template, chat._tokenizer, chat.messages[:-1])
    assert reply.result is not None and reply.result.prompt_tokens == fresh
    assert reply.kept == len(fresh) - reply.prefilled and reply.prefilled < 40


def plant(chat: Chat, answer: list[int]) -> None:
    """A first turn whose answer is `answer`: what a model with a mind of its own would do."""
    from dataclasses import replace

    reply = chat.send("one", max_tokens=len(answer), ignore_eos=True)
    for _ in range(len(answer) - 1):
        next(reply)
    reply.close()
    chat.session.rewind(len(chat.session.tokens) - len(reply.result.tokens))  # type: ignore[union-attr]
    chat.session.append(tokens=answer)
    chat._reply = reply
    chat.messages = []
    text = chat.engine.decode(answer)
    reply.message = {"role": "assistant", "content": text}
    chat.finished(
        reply, replace(reply.result, tokens=answer, text=text, stop_reason="stop"), reply._items, reply._asked
    )  # type: ignore[type-var]


def test_a_template_that_rewrites_history(tmp_path: Path) -> None:
    """Catches a session that keeps what the template has blanked: the next answer would see other thoughts."""
    engine = Engine.load(chat_models.write_folder(tmp_path, chat_models.THINKING))
    chat = Chat(engine, context=4096)
    first = chat.send("one", max_tokens=30, ignore_eos=True)
    prompt = first.run().prompt_tokens
    assert prompt[-1] == engine.text_tokenizer("").specials["<think>"]
    assert chat.messages[-1]["content"] == "" or "</think>" in first.result.text  # type: ignore[union-attr]
    second = chat.send("two", max_tokens=20)
    result = second.run()
    assert result.prompt_tokens == encode_messages(chat.template, chat._tokenizer, chat.messages[:-1])
    assert second.kept == len(prompt)  # up to <think>, after which </think> follows at once
    assert result.tokens == alone(engine, result.prompt_tokens, max_tokens=20)


def test_a_template_that_trims(engine: Engine) -> None:
    """Catches an answer whose white space the template takes away, so that its tokens no longer match."""
    source = chat_models.APPENDING.replace("message.content", "message.content | trim")
    chat = Chat(engine, template=ChatTemplate(source, "t"), context=4096)
    plant(chat, [*b" padded ", engine.text_tokenizer("").specials["<|im_end|>"]])
    reply = chat.send("two", max_tokens=5)
    result = reply.run()
    assert result.prompt_tokens == encode_messages(chat.template, chat._tokenizer, chat.messages[:-1])
    assert result.tokens == alone(engine, result.prompt_tokens, max_tokens=5)


def test_an_answer_that_is_cut_short(engine: Engine) -> None:
    """Catches a history without the half answer, and an answer without its end marker."""
    chat = Chat(engine, context=4096)
    reply = chat.send("one", max_tokens=500, ignore_eos=True)
    for _ in range(3):
        next(reply)
    reply.close()
    assert reply.result is not None and reply.result.stop_reason == "cancelled"
    assert chat.messages[-1]["content"] == reply.result.text
    before = chat.session.tokens
    second = chat.send("two", max_tokens=5)
    result = second.run()
    tokens = result.prompt_tokens
    assert tokens[: second.kept] == before[: second.kept]
    end = engine.text_tokenizer("").specials["<|im_end|>"]
    assert end in tokens[second.kept :]
    assert result.tokens == alone(engine, tokens, max_tokens=5)


def test_an_answer_that_is_left(engine: Engine) -> None:
    """Catches a question that stays in the history although its answer was dropped, and a stale reply that
    writes into it."""
    chat = Chat(engine, context=4096)
    left = chat.send("left", max_tokens=50, ignore_eos=True)
    next(left)
    reply = chat.send("taken", max_tokens=5)
    result = reply.run()
    left.close()
    assert [m["content"] for m in chat.messages] == ["taken", result.text]
    assert result.prompt_tokens == encode_messages(chat.template, chat._tokenizer, [said("user", "taken")])
    assert result.tokens == alone(engine, result.prompt_tokens, max_tokens=5)


def test_a_question_that_fails(engine: Engine) -> None:
    """Catches a conversation that a refused question spoils."""
    chat = Chat(engine, context=200)
    chat.send("one", max_tokens=5).run()
    messages, tokens = list(chat.messages), chat.session.tokens
    for bad, options, code in (
        ("x" * 500, {}, "out_of_memory"),
        ("a\ud800", {}, "invalid_argument"),
        ("a", {"temperature": -1.0}, "invalid_argument"),
    ):
        with pytest.raises(EngineError) as caught:
            chat.send(bad, max_tokens=5, **options)
        assert caught.value.code in (code, "invalid_argument")
        assert chat.messages == messages and chat.session.tokens == tokens
    result = chat.send("two", max_tokens=5).run()
    assert result.tokens == engine.session(200).generate(prompt_tokens=result.prompt_tokens, max_tokens=5).run().tokens


def test_reset(engine: Engine) -> None:
    """Catches a conversation that remembers."""
    chat = Chat(engine, system="S", context=4096)
    first = chat.send("one", max_tokens=5).run()
    chat.reset()
    assert chat.messages == [said("system", "S")] and chat.session.tokens == []
    again = chat.send("one", max_tokens=5)
    assert again.run().tokens == first.tokens and again.kept == 0


def test_models_that_cannot_talk(tmp_path: Path) -> None:
    """Catches a conversation without a template, for which any format would be a guess."""
    with pytest.raises(EngineError, match="has no chat template") as caught:
        Chat(Engine.load(chat_models.write_folder(tmp_path / "a", None)))
    assert caught.value.code == "unsupported"
    bundle = Engine.load(tiny_models.write_bundle(tmp_path / "b.kdtr"))
    with pytest.raises(EngineError, match="has no chat template"):
        Chat(bundle)
    assert Chat(bundle, template=ChatTemplate("{{ messages[0].content }}", "t")).send("a", max_tokens=3).run().tokens
