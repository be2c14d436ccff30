"""`kdtree chat`: a conversation on the terminal, or line by line through pipes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_engine.cli import console, exits, run
from kdtree_engine.cli.interrupt import Interruptible
from kdtree_engine.cli.options import RunOptions
from kdtree_engine.errors import EngineError

if TYPE_CHECKING:
    from kdtree_engine.chat import Chat, Reply

COMMANDS = "/reset forgets the conversation, /exit leaves, // begins a question with a slash"


def execute(
    options: RunOptions,
    system: str | None,
    chat_template: str | None,
    thinking: bool | None,
    interruption: Interruptible,
) -> int:
    """Runs the command. Exit code 1 where stdin is no terminal and an answer failed."""
    from kdtree_engine.chat import Chat
    from kdtree_engine.templates import ChatTemplate, read_template

    template = None
    if chat_template is not None:
        template = ChatTemplate(read_template(Path(chat_template)), chat_template)
    engine = run.load(options)
    # Templates know the switch by one of two names and ignore the other.
    switch = {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}
    chat = Chat(engine, system=system, template=template, context=options.context, variables=switch)
    person = sys.stdin is not None and sys.stdin.isatty()
    if person:
        console.log(f"{run.model_label(options)} on {engine.description}; {COMMANDS}")
    ask = _reader(person)
    failed = False
    turn = 0
    while True:
        try:
            line = ask()
            if line is None or line.strip() == "/exit":
                return exits.FAILED if failed and not person else exits.OK
            if line.startswith("/") and not line.startswith("//"):
                _command(chat, line.strip())
            elif line.strip():
                turn += 1
                _answer(chat, line.removeprefix("/") if line.startswith("//") else line, turn, options, interruption)
        except EngineError as error:
            failed = True
            console.error(str(error))
            if options.json:
                print(json.dumps({"turn": turn, "stop_reason": "error", "error": str(error)}), flush=True)
        except exits.Interrupted as stop:
            if stop.exit_code != exits.INTERRUPTED or not person:
                raise
            interruption.exit_code = None
            console.log("")  # the line that the terminal was at


def _reader(person: bool) -> Callable[[], str | None]:
    """A function that returns the next line without its end; None where there is none."""
    if sys.stdin is None:
        return lambda: None
    # Bytes that are no UTF-8 become lone surrogates, which the tokenizer refuses by name.
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    if not person:

        def from_pipe() -> str | None:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None

        return from_pipe

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # editing and history for input()

    def from_terminal() -> str | None:
        try:
            return input("> ")
        except EOFError:
            print(flush=True)
            return None

    return from_terminal


def _command(chat: Chat, line: str) -> None:
    if line == "/reset":
        chat.reset()
        console.log("the conversation is forgotten")
    else:
        console.log(f"{console.visible(line, keep_lines=False)} is not known: {COMMANDS}")


def _answer(chat: Chat, text: str, turn: int, options: RunOptions, interruption: Interruptible) -> None:
    """One question and its answer. Raises EngineError, and Interrupted for a signal that ends the program."""
    out = console.TextStream()
    with console.token_progress("prompt") as progress:
        reply = chat.send(
            text,
            drafter=run.resolved_drafter(chat.engine, options, []),
            budget=options.budget,
            on_prompt=progress,
            **run.sampling(options),
        )
        interruption.cancel = chat.session.native.cancel
        try:
            for event in reply:
                if not options.json:
                    out.write(event.text)
        finally:
            interruption.cancel = None
            out.close()
    if interruption.exit_code not in (None, exits.INTERRUPTED):
        raise exits.Interrupted(interruption.exit_code)
    interruption.exit_code = None
    if options.json:
        print(json.dumps(_report(reply, turn), ensure_ascii=False), flush=True)
    else:
        console.log(_summary(reply))


def _report(reply: Reply, turn: int) -> dict[str, Any]:
    assert reply.result is not None
    return {
        "turn": turn,
        "kept_tokens": reply.kept,
        "prefilled_tokens": reply.prefilled,
        "tokens": reply.result.tokens,
        "text": reply.result.text,
        "message": reply.message,
        "stop_reason": reply.result.stop_reason,
        "stats": reply.result.stats,
    }


def _summary(reply: Reply) -> str:
    result = reply.result
    assert result is not None
    lengths = result.stats["accepted_lengths"]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    ended = {"stop": "", "length": "; cut at --max-tokens", "context": "; the context is full: /reset"}
    return (
        f"[{len(result.tokens)} tokens, {result.stats['tokens_per_second']:.1f} tokens/s, {mean:.2f} a round; "
        f"prompt: {reply.prefilled} new, {reply.kept} kept{ended.get(result.stop_reason, '; stopped')}]"
    )
