"""kdtree chat: conversations through pipes and on a terminal, with real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import chat_models
import pytest
import tiny_models
from command import ARGV, assert_refused, environment, kdtree

SHORT = ("--max-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.write_folder(tmp_path_factory.mktemp("chat") / "model")


def turns(model: Path, stdin: str, *options: str) -> list[dict[str, Any]]:
    run = kdtree("chat", model, "--json", *SHORT, *options, stdin=stdin)
    assert run.code == 0, run
    return [json.loads(line) for line in run.out.splitlines()]


# -- pipes ---------------------------------------------------------------------------------------------------------


def test_a_line_is_a_question(model: Path) -> None:
    """Catches a conversation that forgets, or computes again what it has."""
    first, second, third = turns(model, "one\ntwo\n\nthree")
    assert [t["turn"] for t in (first, second, third)] == [1, 2, 3]
    assert first["kept_tokens"] == 0
    for before, after in ((first, second), (second, third)):
        assert after["kept_tokens"] == before["kept_tokens"] + before["prefilled_tokens"] + len(before["tokens"])
    assert first["message"] == {"role": "assistant", "content": first["text"]}


def test_text_is_streamed_to_stdout_and_the_rest_to_stderr(model: Path) -> None:
    """Catches prompts, banners or statistics that end up in a pipe."""
    run = kdtree("chat", model, *SHORT, stdin="one\ntwo\n")
    texts = [t["text"] for t in turns(model, "one\ntwo\n")]
    assert run.code == 0
    assert run.out == "".join(text if text.endswith("\n") or not text else text + "\n" for text in texts)
    assert len(re.findall(r"^\[\d+ tokens, .* kept", run.err, re.MULTILINE)) == 2


def test_commands(model: Path) -> None:
    """Catches a command that is taken for a question, and a question that is taken for a command."""
    same, again, slash, *rest = turns(model, "one\n/reset\none\n//exit\n/nonsense\n/exit\nnever\n")
    assert same["tokens"] == again["tokens"] and again["kept_tokens"] == 0
    assert slash["turn"] == 3 and rest == []
    run = kdtree("chat", model, *SHORT, stdin="/nonsense \x1b[31m\n")
    assert run.code == 0 and run.out == "" and "/nonsense" in run.err and "\x1b" not in run.err


def test_system_message_template_and_thinking(model: Path, tmp_path: Path) -> None:
    """Catches options that do not reach the template."""
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages | map(attribute='content') | join('') }}{{ thinking }}{{ enable_thinking }}")
    for options, text in (
        ((), "one"),
        (("--system", "Sys"), "Sysone"),
        (("--thinking",), "oneTrueTrue"),
        (("--no-thinking",), "oneFalseFalse"),
    ):
        (turn,) = turns(model, "one\n", "--chat-template", str(template), *options)
        assert turn["prefilled_tokens"] == len(text)


def test_a_question_that_fails_does_not_end_the_conversation(model: Path) -> None:
    """Catches a program that dies, or reports success, when one question is refused."""
    child = subprocess.run(
        [*ARGV, "chat", str(model), "--context", "120", *SHORT, "--json"],
        input=b"one\n" + b"x" * 300 + b"\n\xff\xfe\ntwo\n",
        capture_output=True,
        env=environment(),
        check=False,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 1
    assert [t["stop_reason"] == "error" for t in lines] == [False, True, True, False]
    assert b"context holds 120" in child.stderr and b"not valid Unicode at character 0" in child.stderr
    assert lines[3]["kept_tokens"] > 0
    assert b"Traceback" not in child.stderr


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--chat-template", "/nowhere"), ("/nowhere", "No such file"), 1),
        (("--temperature", "-1"), ("--temperature",), 2),
        (("--budget", "x"), ("--budget",), 2),
    ],
)
def test_refusals(model: Path, arguments: tuple[str, ...], words: tuple[str, ...], code: int) -> None:
    """Catches options that are looked at after the model has been loaded, or with a traceback."""
    assert_refused(kdtree("chat", model, *arguments, stdin="one\n"), *words, code=code)


def test_models_without_a_template(tmp_path: Path) -> None:
    """Catches a guess at the format of a conversation."""
    assert_refused(kdtree("chat", chat_models.write_folder(tmp_path / "m", None)), "has no chat template")
    assert_refused(kdtree("chat", tiny_models.write_bundle(tmp_path / "b.kdtr")), "has no chat template")
    assert_refused(kdtree("chat"), "MODEL is missing", code=2)


def test_sigterm_leaves(model: Path) -> None:
    """Catches a process that only Ctrl-C knows how to treat."""
    child = subprocess.Popen(
        [
            *ARGV,
            "chat",
            str(model),
            "--ignore-eos",
            "--max-tokens",
            "90000",
            "--context",
            "99000",
            "--temperature",
            "2",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"one\n")
    child.stdin.flush()
    child.stdout.read(10)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 143 and b"Traceback" not in err


# -- a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A kdtree chat on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.controller, terminal = pty.openpty()
        self.child = subprocess.Popen(
            [*ARGV, "chat", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment(TERM="dumb", NO_COLOR="1"),
            start_new_session=True,
            preexec_fn=lambda: _own_terminal(terminal),
        )
        os.close(terminal)
        self.seen = b""

    def read(self, timeout: float) -> bytes:
        if not select.select([self.controller], [], [], timeout)[0]:
            return b""
        try:
            data = os.read(self.controller, 1 << 16)
        except OSError:  # Linux: the other end is closed
            return b""
        self.seen += data
        return data

    def until(self, pattern: bytes, timeout: float = 60) -> bytes:
        """Reads until `pattern` appears in what has not been looked at; what came up to its end."""
        end = time.monotonic() + timeout
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end and (self.read(1) or self.child.poll() is None), self.seen[-500:]
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def type(self, text: bytes) -> None:
        os.write(self.controller, text)

    def exit_code(self) -> int:
        end = time.monotonic() + 60
        while self.child.poll() is None and time.monotonic() < end:
            self.read(0.1)
        os.close(self.controller)
        return self.child.wait(1)


def _own_terminal(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # Ctrl-C typed there is a signal for this process


def test_a_conversation_on_a_terminal(model: Path) -> None:
    """Catches a prompt that does not come back, and an end of input that is no farewell."""
    terminal = Terminal(str(model), *SHORT)
    terminal.until(rb"/exit leaves")
    terminal.until(rb"> ")
    terminal.type(b"one\n")
    terminal.until(rb"\[\d+ tokens, ")
    terminal.until(rb"> ")
    terminal.type(b"\x04")
    assert terminal.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(model: Path) -> None:
    """Catches a Ctrl-C that kills the program, that is ignored, or after which the conversation is broken."""
    options = ("--ignore-eos", "--max-tokens", "90000", "--context", "99000", "--drafter", "none", "--temperature", "2")
    terminal = Terminal(str(model), *options)
    terminal.until(rb"> ")
    for question in (b"one\n", b"two\n"):
        terminal.type(question)
        terminal.until(rb"(?s)\n.{200}")
        terminal.type(b"\x03")
        stopped = terminal.until(rb"\[(\d+) tokens, [^\n]*; stopped\]")
        tokens = int(re.findall(rb"\[(\d+) tokens, ", stopped)[-1])
        assert 0 < tokens < 89_000
        terminal.until(rb"> ")
    # With nothing to stop, Ctrl-C clears the line. Not in the same moment in which the prompt or a letter appears:
    # readline looks for signals, then waits for a key, and what comes in between is noticed with the next key.
    for line in (b"half a ques", b""):
        terminal.type(line)
        time.sleep(0.5)
        terminal.type(b"\x03")
        terminal.until(rb"> ")
    terminal.type(b"/exit\n")
    assert terminal.exit_code() == 0
