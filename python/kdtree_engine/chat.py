"""Conversations on one session. ::

    chat = Chat(engine, system="Answer in one sentence.")
    for event in chat.send("Why is the sky blue?", max_tokens=64):
        print(event.text, end="", flush=True)
    chat.messages[-1]["content"]

The history lives in the session, so a turn computes only what is new. Where the template only ever appends,
that is the new question; where it rewrites what came before (reasoning of earlier turns is blanked by some),
the session is rewound to the first token that differs.

**Text from users cannot end its turn.** A ``<|im_end|>`` typed into a message stays text: before the template
runs, every marker of a special token in a message is made unrecognisable, and made text again after the special
tokens that the template wrote have been found.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

from .errors import EngineError, fail
from .session import Event, Generation, GenerationResult
from .templates import ChatTemplate, Message, load_template
from .tokenizer import Tokenizer, checked_text

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Chat", "Reply", "encode_messages", "split_reasoning"]

Item = int | str
"""A special token, or text between special tokens."""

_THINK, _THOUGHT = "<think>", "</think>"


class Chat:
    """A conversation. ``messages`` is its history: system, user and assistant messages by turns.

    `template` is the model's own unless given; `variables` go to it (``{"thinking": False}``). `context` is
    the session's, prompt and answers together. Raises EngineError: ``unsupported`` for a model without text
    or without a template.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        template: ChatTemplate | None = None,
        context: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self._tokenizer = engine.text_tokenizer("a conversation")
        if template is None and engine.path.is_dir():
            template = load_template(engine.path)
        if template is None:
            fail("unsupported", f"{engine.path} has no chat template; `kdtree chat --chat-template FILE` takes one")
        self.template = template
        self.variables = dict(variables or {})
        self._system = [] if system is None else [{"role": "system", "content": checked_text(system)}]
        self.session = engine.session(context)
        self.messages: list[dict[str, Any]] = list(self._system)
        self._known: _Known | None = _Known([], None)
        self._reply: Reply | None = None  # the one that may still add to the history

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._reply = None
        self.session.rewind(0)
        self.messages = list(self._system)
        self._known = _Known([], None)

    def send(self, text: str, **generation: Any) -> Reply:
        """Ask, and answer: an iterator of events as from ``Session.generate``, which `generation` goes to.

        When it has ended, ``messages`` holds question and answer, also of an answer that was cut short. An
        answer that failed leaves ``messages`` as they were. Raises EngineError where the template refuses,
        or where the conversation no longer fits the context.
        """
        question = {"role": "user", "content": checked_text(text)}
        asked = [*self.messages, question]
        rendered, items = _render(self.template, self._tokenizer, asked, self.variables)
        kept, new = self._plan(items)
        self._reply, known, self._known = None, self._known, None
        tail = self.session.tokens[kept:]
        if tail:
            self.session.rewind(kept)
        try:
            generated = self.session.generate(prompt_tokens=new, **generation)
        except EngineError:
            with contextlib.suppress(EngineError):  # a session that was full to the brim does not take them back
                if tail:
                    self.session.append(tokens=tail)
                self._known = known
            raise
        thinking = rendered.rstrip().endswith(_THINK)
        self._reply = Reply(self, generated, asked, items, thinking, kept, len(new))
        return self._reply

    def _plan(self, items: list[Item]) -> tuple[int, list[int]]:
        """How many of the session's tokens stand, and the tokens to add to them."""
        known, tokens = self._known, self.session.tokens
        if known is not None and (rest := known.rest(items)):
            return len(tokens), _encode(rest, self._tokenizer)
        whole = _encode(items, self._tokenizer)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, whole, strict=False)))
        kept = min(same, len(whole) - 1)  # the last one must be computed again for its logits
        return max(kept, 0), whole[max(kept, 0) :]

    def finished(self, reply: Reply, result: GenerationResult, items: list[Item], asked: list[dict[str, Any]]) -> None:
        """Called by a reply that has ended. One that was left in the middle, for another question or a reset,
        is no part of the history."""
        if self._reply is not reply or result.stop_reason == "error":
            return
        self._reply = None
        self.messages = [*asked, reply.message]
        if self._tokenizer.decode(result.tokens) != result.text:
            return  # behind the text are the tokens of a stop text
        visible = [name for name in self._tokenizer.specials if name not in _silent(self._tokenizer)]
        end = result.tokens[-1] if result.stop_reason == "stop" else None
        self._known = _Known(items + _split(result.text, self._tokenizer, visible), end)


@dataclass(frozen=True)
class _Known:
    """What the session's tokens say.

    Not always the tokens that the same text would get: an answer stays as the model gave it, token by token,
    markers included that have no text.
    """

    items: list[Item]
    end: int | None  # the token behind them that ended an answer

    def rest(self, items: list[Item]) -> list[Item]:
        """The end of `items` that is new; empty where they do not begin like this."""
        count = len(self.items)
        if items[:count] != self.items:
            return []
        if self.end is None:
            return items[count:]
        return items[count + 1 :] if items[count : count + 1] == [self.end] else []


class Reply(Iterator[Event]):
    """The events of one answer.

    ``result`` and ``message`` (role, content and, where the model thinks aloud, reasoning_content) are set
    when it has ended. ``kept``: tokens of the history that the session still had; ``prefilled``: tokens that
    the question added to them.
    """

    def __init__(
        self,
        chat: Chat,
        generation: Generation,
        asked: list[dict[str, Any]],
        items: list[Item],
        thinking: bool,
        kept: int,
        prefilled: int,
    ) -> None:
        self._chat = chat
        self._generation = generation
        self._asked = asked
        self._items = items
        self._thinking = thinking
        self._ended = False
        self.kept = kept
        self.prefilled = prefilled
        self.result: GenerationResult | None = None
        self.message: dict[str, Any] = {}

    def __iter__(self) -> Reply:
        return self

    def __next__(self) -> Event:
        try:
            return next(self._generation)
        finally:
            self._take_result()

    def run(self) -> GenerationResult:
        """Run to the end; the result. Raises EngineError where a step fails."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """End the answer here, as ``cancelled`` if it was still running."""
        self._generation.close()
        self._take_result()

    def _take_result(self) -> None:
        result = self._generation.result
        if result is None or self._ended:
            return
        self._ended = True
        self.result = result
        reasoning, content = split_reasoning(result.text, self._thinking)
        self.message = {"role": "assistant", "content": content}
        if reasoning is not None:
            self.message["reasoning_content"] = reasoning
        self._chat.finished(self, result, self._items, self._asked)


def split_reasoning(text: str, thinking: bool) -> tuple[str | None, str]:
    """What a model thought and what it said: the text up to ``</think>`` and the text behind it.

    `thinking`: the prompt itself ended with ``<think>``, so the text begins inside the thoughts. None for the
    thoughts of a model that does not think aloud.
    """
    begun = thinking or text.lstrip().startswith(_THINK)
    thought, ended, said = text.partition(_THOUGHT)
    if not begun and not ended:
        return None, text
    if not thinking and begun:
        thought = thought.lstrip().removeprefix(_THINK)
    return thought, said


# -- from messages to tokens ---------------------------------------------------------------------------------------


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any
) -> list[int]:
    """Tokens of a conversation, with the opening of the next answer unless ``add_generation_prompt=False``.
    Special tokens come from the template alone; their markers in messages and tools are text."""
    _, items = _render(template, tokenizer, messages, variables)
    return _encode(items, tokenizer)


def _render(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[str, list[Item]]:
    """What the template makes of a conversation, as text and as items."""
    names = list(tokenizer.specials)
    # A model's own thoughts come as text, but were tokens: those markers count in its messages.
    silent = _silent(tokenizer)
    # In messages the markers get another first character, one that nothing else uses; afterwards it is put back.
    used = set(chain.from_iterable(_strings([*messages, variables])))
    free = (chr(c) for c in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0x10FFFE)) if chr(c) not in used)
    hide = {c: next(free) for c in sorted({name[0] for name in names})}
    given = [_hidden(m, _pattern(silent if m.get("role") == "assistant" else names), hide) for m in messages]
    extra = dict(variables)
    if extra.get("tools") is not None:
        extra["tools"] = _hidden(extra["tools"], _pattern(names), hide)
    text = template.render(given, **extra)
    unhide = {ord(mark): c for c, mark in hide.items()}
    parts = _split(text, tokenizer, names)
    return text, [part if isinstance(part, int) else part.translate(unhide) for part in parts]


def _pattern(names: Collection[str]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if names else None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def _hidden(value: Any, pattern: re.Pattern[str] | None, hide: Mapping[str, str]) -> Any:
    """`value` with another first character in every marker that a text of it holds, overlapping ones too."""
    if pattern is None:
        return value
    if isinstance(value, str):
        starts, at = set(), 0
        while (match := pattern.search(value, at)) is not None:
            starts.add(match.start())
            at = match.start() + 1
        return "".join(hide[c] if i in starts else c for i, c in enumerate(value)) if starts else value
    if isinstance(value, Mapping):
        return {key: _hidden(inner, pattern, hide) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(inner, pattern, hide) for inner in value]
    return value


def _silent(tokenizer: Tokenizer) -> list[str]:
    """Markers whose tokens have no text of their own."""
    return [name for name, token in tokenizer.specials.items() if not tokenizer.decode([token])]


def _split(text: str, tokenizer: Tokenizer, names: Collection[str]) -> list[Item]:
    """Special tokens, those called by one of `names`, and the text between them."""
    pattern = _pattern(names)
    items: list[Item] = []
    at = 0
    for match in pattern.finditer(text) if pattern is not None else ():
        if match.start() > at:
            items.append(text[at : match.start()])
        items.append(tokenizer.specials[match[0]])
        at = match.end()
    if at < len(text):
        items.append(text[at:])
    return items


def _encode(items: Sequence[Item], tokenizer: Tokenizer) -> list[int]:
    tokens: list[int] = []
    for item in items:
        tokens += [item] if isinstance(item, int) else tokenizer.encode(item, start=False)
    return tokens
