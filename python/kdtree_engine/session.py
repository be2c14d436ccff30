"""Session: one timeline of tokens, and the loop that generates on it.

The loop is Python over the native ``step()``, one prompt chunk or one round at a time, so that Ctrl-C works
between steps and the session stays usable after it. Text is cut here: stop texts may lie across token
borders, and what a round emitted behind one is taken back, so that the session stands where plain decoding
would have stopped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from . import _native
from .errors import EngineError, fail
from .sampling import Sampling, TokenLogprobs, integer, token_logprobs
from .tokenizer import StopText, TextStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .engine import Engine

__all__ = ["Event", "Generation", "GenerationResult", "Session", "StopReason"]

StopReason = Literal["stop", "length", "context", "cancelled", "error"]

MAX_BUDGET = 64  # kMaxNodes of cpp/core/limits.h
MAX_LOGPROBS = 1024


@dataclass(frozen=True)
class Event:
    """One emitted token and the text that it made certain.

    ``text`` is empty while it might still change: half of a character, the beginning of a stop text.
    ``token`` is None in an event that only brings such text when the generation ends. ``logprobs`` is there
    when asked for.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation.

    ``prompt_tokens``: everything before the first new token, earlier turns of the session included.
    ``tokens``: the new ones, a stop token or the tokens of a stop text included. ``text``: of the new
    tokens, without stop token, special tokens and stop text; empty where the model has no tokenizer.
    ``stop_reason``: ``stop`` (a stop token or stop text), ``length`` (max_tokens), ``context`` (the session
    is full), ``cancelled`` or ``error``. ``stats``: target_forwards, rounds, accepted_lengths (tokens
    emitted per round), drafted, accepted, branching_rounds, seconds {prefill, draft, build, verify, accept,
    commit}, tokens_per_second (of the rounds: without the prompt and
    without an engine's one measurement behind an automatic budget). No figure has what a thread waited for others.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    stop_reason: StopReason
    stats: dict[str, Any]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class Session:
    """One timeline of tokens. Made by :meth:`Engine.session`.

    ``result`` is the last generation's GenerationResult, None before the first and while one runs.

    Calls from several threads are done one after another, each whole. It stays one timeline with one generation
    at a time: whatever else is asked of a session ends the one that runs there as ``cancelled``. For answers
    side by side, take a session each.
    """

    def __init__(self, engine: Engine, native: _native.Session, context: int) -> None:
        self.engine = engine
        self.native = native
        self._context = context
        self.calls = threading.RLock()  # held by whoever changes the session or takes events of its generation
        self._running: Generation | None = None
        self.result: GenerationResult | None = None

    @property
    def tokens(self) -> list[int]:
        """The timeline: prompts and generated tokens."""
        return self.native.tokens

    def append(self, text: str | None = None, *, tokens: Sequence[int] | None = None) -> list[int]:
        """Put text, or tokens, at the end of the timeline; returns the tokens. EngineError where they do
        not fit the vocabulary or leave no room in the context; the session is then what it was."""
        if (text is None) == (tokens is None):
            fail("invalid_argument", "give either text or tokens to append")
        if text is not None:
            tokenizer = self.engine.text_tokenizer("a text prompt")
            ids = tokenizer.encode(text, start=not self.native.tokens)
        else:
            ids = [integer(token, "a token id", 0, 2**31 - 1) for token in tokens or ()]
        self._refuse_placeholders(ids)
        with self.calls:
            self._abandon()
            self.native.append(ids)
        return ids

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` tokens."""
        kept = integer(length, "length", 0, 2**31 - 1)
        with self.calls:
            self._abandon()
            self.native.rewind(kept)

    def score(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append tokens and compute them at once; float32 logits [len(tokens), vocab] after each of them."""
        ids = [integer(token, "a token id", 0, 2**31 - 1) for token in tokens]
        self._refuse_placeholders(ids)
        with self.calls:
            self._abandon()
            return self.native.score(ids)

    def _refuse_placeholders(self, tokens: Sequence[int]) -> None:
        """A multimodal model replaces these tokens' embeddings by an image's; their own mean nothing."""
        placeholders = self.engine.config.placeholders
        found = next((token for token in tokens if token in placeholders), None)
        if found is not None:
            fail("unsupported", f"token {found} stands for an image or a video; this engine takes text only")

    def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_tokens: Sequence[int] | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        choice: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        drafter: str | _native.Drafter | None = "auto",
        budget: int | Literal["auto"] = "auto",
        on_prompt: Callable[[int, int], None] | None = None,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> Generation:
        """Append a prompt (text or tokens; neither goes on from where the session stands) and generate.

        Returns an iterator of events; nothing is computed before the first ``next``. Drafter and budget
        (draft nodes per round, 0 to 64) change the speed and never the output. Sampling: see
        ``sampling.Sampling``. `stop`: texts that end the generation; they are not part of the text.
        `logprobs`: that many of the most probable tokens behind each emitted one. `on_prompt` is called
        with (prompt tokens computed, in all), `on_round` with what each round did (docs/drafting.md, Trace).

        Raises EngineError for values out of range, an empty prompt and a prompt that leaves no room in the
        context; the session is then what it was.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, seed, choice)
        integer(max_tokens, "max_tokens", 1, 2**31 - 1)
        integer(logprobs, "logprobs", 0, MAX_LOGPROBS)
        nodes = -1 if budget == "auto" else integer(budget, "budget", 0, MAX_BUDGET)
        stops = [stop] if isinstance(stop, str) else list(stop)
        for text in stops:
            if not isinstance(text, str) or not text:
                fail("invalid_argument", f"stop is {text!r}; expected a text that is not empty")
        if stops:
            self.engine.text_tokenizer("a stop text")
        if prompt is not None and prompt_tokens is not None:
            fail("invalid_argument", "give either a prompt or prompt_tokens")

        with self.calls:
            self._abandon()
            before = len(self.native.tokens)
            try:
                if prompt is not None:
                    self.append(prompt)
                elif prompt_tokens is not None:
                    self.append(tokens=prompt_tokens)
                stop_tokens = [] if ignore_eos else sorted(self.engine.eos_token_ids)
                begin = {**asdict(sampling), "stop_tokens": stop_tokens}
                drafts = self._planted(max_tokens, begin) if drafter == "planted" else drafter
                drafts = self.engine.drafter(drafts) if isinstance(drafts, str) else drafts
                if drafts is not None and not isinstance(drafts, _native.Drafter):
                    fail("invalid_argument", f"drafter is {drafts!r}; expected a name, a drafter or None")
                self.native.begin(max_tokens, drafter=drafts, budget=nodes, keep_logits=logprobs > 0,
                                  trace=on_round is not None, **begin)
            except BaseException:
                self.native.rewind(before)
                raise
            self.result = None
            self._running = Generation(self, stops, stop_tokens, logprobs, on_prompt, on_round)
            return self._running

    def cancel(self) -> None:
        """End the running generation, from this thread or another: it finishes as ``cancelled``, at once where
        its step still waits for its turn. Waits for nothing itself."""
        self.native.cancel()

    def finished(self, generation: Generation) -> None:
        """Called by a generation when it has ended."""
        if self._running is generation:
            self._running = None
            self.result = generation.result

    def _abandon(self) -> None:
        if self._running is not None:
            self._running.close()

    def _planted(self, max_tokens: int, begin: dict[str, Any]) -> _native.Drafter:
        """Drafts planted from the plain run, which is decoded here first, in a session of its own."""
        plain = self.engine.session(self._context or None)
        plain.append(tokens=self.native.tokens)
        plain.native.begin(max_tokens, budget=0, **begin)
        while plain.native.step().finished is None:
            pass
        return _native.PlantedDrafter(plain.native.tokens, self.engine.vocab_size, begin["seed"])


@dataclass
class _Text:
    """From tokens to text that is certain, up to a stop text."""

    stream: TextStream | None
    stops: StopText
    parts: list[str] = field(default_factory=list)

    def push(self, token: int) -> tuple[str, bool]:
        return self._take(self.stream.push(token) if self.stream else "")

    def finish(self) -> str:
        piece, stopped = self._take(self.stream.finish() if self.stream else "")
        if not stopped:
            self.parts.append(rest := self.stops.finish())
            piece += rest
        return piece

    def _take(self, piece: str) -> tuple[str, bool]:
        piece, stopped = self.stops.push(piece)
        self.parts.append(piece)
        return piece, stopped


class Generation(Iterator[Event]):
    """The events of one generation. ``result`` is set when it has ended, however it ended.

    Where a step fails, the events before the failure still come; then EngineError is raised.
    KeyboardInterrupt ends the generation as ``cancelled`` and goes on to the caller. Leaving a loop early
    leaves the session usable: the next use of the session closes this one.
    """

    def __init__(
        self,
        session: Session,
        stops: list[str],
        stop_tokens: list[int],
        logprobs: int,
        on_prompt: Callable[[int, int], None] | None,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._session = session
        self._native = session.native
        self._stop_texts = stops
        self._stop_tokens = frozenset(stop_tokens)
        self._top = logprobs
        self._on_prompt = on_prompt
        self._on_round = on_round
        self._prompt = session.native.tokens
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text = self._new_text()
        self._events: deque[Event] = deque()
        self._failure: EngineError | None = None
        self._behind = 0  # tokens of the last round that a stop text took back
        self._rounds_tokens = 0
        self.result: GenerationResult | None = None

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Event:
        with self._session.calls:
            try:
                while not self._events:
                    if self._failure is not None:
                        failure, self._failure = self._failure, None
                        raise failure
                    if self.result is not None:
                        raise StopIteration
                    self._step()
                return self._events.popleft()
            except KeyboardInterrupt:
                self.close()
                raise

    def run(self) -> GenerationResult:
        """Run to the end; the result. Raises EngineError where a step fails."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """End the generation here, as ``cancelled`` if it was still running. Events not yet taken are
        dropped."""
        with self._session.calls:
            self._events.clear()
            if self.result is not None:
                return
            # An interrupt can fall between a step and its bookkeeping: the native timeline is the truth.
            self._tokens = self._native.tokens[len(self._prompt) :]
            self._logprobs = self._logprobs[: len(self._tokens)]
            self._text = self._new_text()
            for i, token in enumerate(self._tokens):
                if self._push(token)[1]:
                    self._cut(i + 1)
                    break
            self._text.finish()
            self._end("cancelled")

    def _new_text(self) -> _Text:
        tokenizer = self._session.engine.tokenizer
        return _Text(tokenizer.stream() if tokenizer else None, StopText(self._stop_texts))

    def _push(self, token: int) -> tuple[str, bool]:
        return ("", False) if token in self._stop_tokens else self._text.push(token)

    def _step(self) -> None:
        first = not self._tokens
        try:
            step = self._native.step()
        except EngineError as error:
            self._finish("error", error)
            return
        if first and self._on_prompt is not None:
            self._on_prompt(step.prompt_done, step.prompt_total)
        if self._on_round is not None and not first and (trace := self._native.trace) is not None:
            self._on_round(trace)

        emitted = step.tokens
        rows = self._native.logits(len(self._tokens)) if self._top and emitted else None
        for i, token in enumerate(emitted):
            piece, stopped = self._push(token)
            logprobs = None if rows is None else token_logprobs(rows[i], token, self._top)
            self._tokens.append(token)
            if logprobs is not None:
                self._logprobs.append(logprobs)
            self._rounds_tokens += not first
            self._events.append(Event(token, piece, logprobs))
            if stopped:
                self._cut(len(self._tokens), behind=len(emitted) - 1 - i)
                self._end("stop")
                return
        if step.finished == "error":
            failure = EngineError(step.error)
            failure.code = "not_finite"
            self._finish("error", failure)
        elif step.finished is not None:
            self._finish(step.finished)

    def _finish(self, reason: Any, failure: EngineError | None = None) -> None:
        """The native generation is over: let go of the text that was held back."""
        rest = self._text.finish()
        if rest and self._events:
            self._events[-1] = replace(self._events[-1], text=self._events[-1].text + rest)
        elif rest:
            self._events.append(Event(None, rest))
        self._failure = failure
        self._end(reason, None if failure is None else str(failure))

    def _cut(self, length: int, behind: int = 0) -> None:
        """Take back the tokens behind the one that completed a stop text."""
        del self._tokens[length:], self._logprobs[length:]
        self._behind = behind
        self._native.rewind(len(self._prompt) + length)

    def _end(self, reason: StopReason, error: str | None = None) -> None:
        stats: dict[str, Any] = self._native.stats
        if self._behind:  # behind a stop text: not emitted, so not counted
            stats["accepted_lengths"][-1] -= self._behind
            stats["accepted"] -= self._behind
        seconds = sum(stats["seconds"].values()) - stats["seconds"]["prefill"]
        stats["tokens_per_second"] = self._rounds_tokens / seconds if seconds > 0 else 0.0
        self.result = GenerationResult(
            prompt_tokens=self._prompt,
            tokens=self._tokens,
            text="".join(self._text.parts),
            stop_reason=reason,
            stats=stats,
            logprobs=self._logprobs if self._top else None,
            error=error,
        )
        self._session.finished(self)
