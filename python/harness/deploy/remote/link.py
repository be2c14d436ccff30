"""The connection, seen from the other side: events out, messages in, children that end with it.

Standard input: one JSON object a line, first the request, then {"do": ...} messages, among them a "ping" every
few seconds. Standard output: one event a line, PREFIX and JSON. When the connection ends, or falls silent,
whatever was started is ended, and with the last of it the lock is free again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

PREFIX = "@kdtree-deploy "
LOST = 74  # exit code of the script where the connection was lost
SILENCE = 60.0  # seconds without a message after which the connection counts as lost


class Failed(Exception):
    """The deploy ends here: exit code and one sentence."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Lost(Exception):
    """The other side is gone, or wants to stop."""


class Link:
    """Messages are read by a thread of their own, so that the end of the connection is seen at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.changed = threading.Condition()
        self.heard = time.monotonic()
        self.lost: str | None = None  # why, once it is
        self.child: subprocess.Popen[bytes] | None = None
        self._writing = threading.Lock()

    def start(self) -> None:
        """Reads and watches from now on."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self.heard = time.monotonic()
            try:
                message = str(json.loads(line.decode())["do"])
            except (ValueError, KeyError, TypeError):
                return self.lose("a message that is no message")
            if message == "cancel":
                return self.lose("cancelled")
            if message != "ping":
                with self.changed:
                    self.messages.append(message)
                    self.changed.notify()
        self.lose("the connection has ended")

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            if time.monotonic() - self.heard > SILENCE:
                return self.lose(f"nothing was heard for {SILENCE:.0f} s")

    def lose(self, why: str) -> None:
        """Whatever runs is ended; the next `emit`, `run` or `wait` raises Lost."""
        with self.changed:
            self.lost = self.lost or why
            child = self.child
            self.changed.notify()
        if child is not None:
            end(child)

    def check(self) -> None:
        """Lost, if it is."""
        if self.lost:
            raise Lost(self.lost)

    def wait(self, wanted: str) -> None:
        """Returns when this message comes."""
        with self.changed:
            while not self.lost and not self.messages:
                self.changed.wait()
            self.check()
            message = self.messages.pop(0)
        if message != wanted:
            raise Failed(70, f"expected the message {wanted!r}, got {message!r}")

    def emit(self, event: str, **fields: Any) -> None:
        """Sends one event."""
        self.check()
        try:
            with self._writing:
                sys.stdout.write(PREFIX + json.dumps({"event": event, **fields}) + "\n")
                sys.stdout.flush()
        except OSError as error:
            self.lose("the connection has ended")
            raise Lost(str(error)) from None

    def run(
        self, argv: list[str], cwd: str, environment: dict[str, str], lock: int, quiet: bool = False
    ) -> tuple[int, list[str]]:
        """Runs a command, its output as events. Returns its exit code (128 + N for signal N) and its output
        lines, the first 2,000.

        `lock`: the lock's file, which the child inherits: whoever outlives this script keeps the lock.
        """
        lines: list[str] = []
        os.set_inheritable(lock, True)
        try:
            with self.changed:
                self.check()
                child = self.child = subprocess.Popen(
                    argv,
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        except OSError as error:
            raise Failed(127, f"{argv[0]} cannot be run: {error.strerror}") from None
        assert child.stdout is not None
        try:
            while True:
                line = child.stdout.readline(4096)
                if not line:
                    break
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if len(lines) < 2000:
                    lines.append(text)
                if not quiet:
                    self.emit("line", text=text)
            code = child.wait()
        finally:
            if child.poll() is None:
                end(child)
                child.wait()
            child.stdout.close()
            with self.changed:
                self.child = None
        self.check()
        return (code if code >= 0 else 128 - code), lines


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child and all of its process group: asks first, five seconds later does not."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + patience
        try:
            os.killpg(child.pid, number)
            while time.monotonic() < deadline:
                child.poll()
                os.killpg(child.pid, 0)
                time.sleep(0.02)
        except (ProcessLookupError, PermissionError):
            return


class Stage:
    """A named part of the work: its beginning, its end and how long it took, as events."""

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self.name = name
        self.code = 0
        self.notes: list[str] = []
        self.began = 0.0

    def note(self, text: str) -> None:
        """Something that people should read beside the stage's name."""
        self.notes.append(text)

    def __enter__(self) -> Stage:
        self.began = time.monotonic()
        self.link.emit("begin", stage=self.name)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            seconds = round(time.monotonic() - self.began, 2)
            self.link.emit("end", stage=self.name, seconds=seconds, code=self.code, notes=self.notes)
        elif isinstance(error, OSError):
            raise Failed(1, f"{self.name}: {error}{disk_note()}") from None


def disk_note(folder: str = ".") -> str:
    """Part of a sentence where a disk is full, else nothing."""
    notes = []
    for place in (folder, tempfile.gettempdir()):
        try:
            free = shutil.disk_usage(place).free
        except OSError:
            continue
        if free < 8 << 20:
            notes.append(f"; the disk is full: {free >> 10} KiB free at {place}")
    return "".join(notes)
