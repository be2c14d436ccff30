"""ssh and rsync as child processes: streamed, watched, ended with us, and their failures told apart.

Only failures of the transport are worth another try. A refused key, an unknown host, a full disk or a script
that failed would fail again.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from harness.deploy.remote.link import LOST, PREFIX

Say = Callable[[str], None]

PING_SECONDS = 10.0
MAX_LINE = 1 << 20  # of an event; longer ones are no events of ours
RSYNC_TRANSPORT = {10, 12, 20, 30, 35, 255}
RSYNC_MEANING = {
    1: "its options were refused",
    2: "the two sides do not understand each other: does the login shell there print something?",
    11: "files could not be written",
    23: "some files were not transferred",
    24: "files vanished while they were sent",
}
# What ssh says where another try would say the same.
_FINAL = re.compile(
    "host key verification failed|remote host identification has changed|permission denied|"
    "could not resolve hostname|bad configuration option|bad owner or permissions|terminating, \\d+ bad|"
    "can't open user config file|no such identity|no supported authentication|too many authentication failures|"
    "unable to negotiate|hostname contains invalid characters",
    re.IGNORECASE,
)


class TransportError(Exception):
    """The connection failed or ended; another try may help."""


class FinalError(Exception):
    """Another try would end the same way. `code`: the exit code of the deploy."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Cancelled(Exception):
    """The user wants to stop."""


def _spawn(argv: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},  # we read what they say
            start_new_session=True,  # Ctrl-C is ours to handle: the other side must be told first
        )
    except OSError as error:
        raise FinalError(127, f"{argv[0]} cannot be run here: {error.strerror}") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a child that may not want to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Connection:
    """One ssh process that runs the script on the other side; rsync goes through it as well."""

    def __init__(self, argv: list[str], script: bytes, request: dict[str, Any], say: Say) -> None:
        self.process = _spawn(argv)
        self.errors: deque[str] = deque(maxlen=50)
        self.ended = threading.Event()
        self._say = say
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue(10_000)
        self._writing = threading.Lock()
        assert self.process.stdout is not None and self.process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self.process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        first = script + json.dumps(request).encode() + b"\n"
        threading.Thread(target=self._talk, args=(first,), daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        prefix = PREFIX.encode()
        while line := stream.readline(MAX_LINE):
            if line.startswith(prefix):
                try:
                    event = json.loads(line[len(prefix) :])
                except ValueError:
                    event = None
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    self._events.put(event)
                    continue
            self._say(line.decode("utf-8", "replace").rstrip("\r\n"))  # what a login shell prints, say
        self.ended.set()
        self._events.put(None)

    def _read_errors(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE):
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            self.errors.append(text)
            self._say(text)

    def _write(self, data: bytes) -> None:
        stream = self.process.stdin
        assert stream is not None
        try:
            with self._writing:
                stream.write(data)
                stream.flush()
        except (OSError, ValueError):  # it has ended, which _read sees too
            pass

    def _talk(self, first: bytes) -> None:
        self._write(first)  # more than a pipe holds: it waits until ssh is connected
        while not self.ended.wait(PING_SECONDS):
            self.send("ping")

    def send(self, message: str) -> None:
        """One message to the script there; lost where the connection is."""
        self._write(json.dumps({"do": message}).encode() + b"\n")

    def event(self, cancel: threading.Event) -> dict[str, Any]:
        """The next event. TransportError or FinalError where the connection has ended instead."""
        while True:
            if cancel.is_set():
                raise Cancelled
            try:
                event = self._events.get(timeout=0.2)
            except queue.Empty:
                continue
            if event is None:
                raise self.failure()
            return event

    def failure(self) -> Exception:
        """What the end of the connection means."""
        code = self.process.wait()
        for thread in self._threads:
            thread.join(2)
        return explain_ssh(code, list(self.errors))

    def close(self, cancel: bool = False) -> None:
        """Ends the connection. The script there ends what it started."""
        stream = self.process.stdin
        assert stream is not None
        if self._writing.acquire(timeout=2):  # otherwise nobody reads at the other end
            try:
                if cancel:
                    stream.write(b'{"do": "cancel"}\n')
                stream.close()
            except (OSError, ValueError):
                pass
            self._writing.release()
        deadline = time.monotonic() + (10 if cancel else 3)
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        _end(self.process)
        for thread in self._threads:
            thread.join(2)


def explain_ssh(code: int, errors: list[str]) -> Exception:
    """TransportError or FinalError for ssh's exit code and what it said."""
    said = next((line for line in reversed(errors) if line.strip()), "no message")
    if code == 255:
        for line in errors:
            if _FINAL.search(line):
                prints = [e for e in errors if "SHA256:" in e]
                return FinalError(255, "ssh: " + " ".join([line.strip(" @"), *prints]))
        return TransportError(f"ssh: {said.removeprefix('ssh: ')}")
    if code == LOST:
        return TransportError("the script on the other side lost the connection")
    if code == 127:
        return FinalError(127, f"there is no such Python on the other side ({said}); name one with --python")
    return FinalError(code if code > 0 else 1, f"the script on the other side ended with exit code {code}: {said}")


@dataclass(frozen=True)
class Transfer:
    """What rsync did: names of files that were sent or fetched, and bytes on the wire."""

    names: list[str]
    bytes_sent: int


def rsync(argv: list[str], names: bytes, connection: Connection, cancel: threading.Event, say: Say) -> Transfer:
    """Runs rsync to its end. TransportError or FinalError where it fails, or the connection does meanwhile."""
    process = _spawn(argv)
    lines: deque[str] = deque(maxlen=10_000)
    errors: deque[str] = deque(maxlen=200)

    def read(stream: IO[bytes], into: deque[str], aloud: bool) -> None:
        while line := stream.readline(MAX_LINE):
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            into.append(text)
            if aloud:
                say(text)

    def write(stream: IO[bytes]) -> None:
        try:
            stream.write(names)
            stream.close()
        except OSError:  # it has ended; its exit code says why
            pass

    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    threads = [
        threading.Thread(target=read, args=(process.stdout, lines, False), daemon=True),
        threading.Thread(target=read, args=(process.stderr, errors, True), daemon=True),
        threading.Thread(target=write, args=(process.stdin,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        while True:
            try:
                code = process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                if cancel.is_set():
                    raise Cancelled from None
                if connection.ended.is_set():
                    raise connection.failure() from None
    finally:
        _end(process)
        for thread in threads:
            thread.join(2)
    if code != 0:
        raise explain_rsync(code, list(errors))
    sent = [line.split(" ", 1)[1] for line in lines if re.match(r"[<>]f\S* .", line)]
    total = next((line for line in lines if line.startswith("Total bytes sent: ")), "0")
    return Transfer(sent, int(re.sub(r"\D", "", total) or 0))


def explain_rsync(code: int, errors: list[str]) -> Exception:
    """TransportError or FinalError for rsync's exit code and what it said."""
    full = next((line for line in errors if "No space left on device" in line), None)
    if full is not None:
        return FinalError(11, f"rsync: the disk is full: {full.strip()}")
    said = next((line for line in errors if line.strip() and not line.startswith("rsync error:")), "no message")
    if code in RSYNC_TRANSPORT:
        if (final := explain_ssh(255, errors)) and isinstance(final, FinalError):
            return final
        return TransportError(f"rsync: {said} (exit code {code})")
    return FinalError(
        code if code > 0 else 1, f"rsync: {RSYNC_MEANING.get(code, 'it failed')} (exit code {code}): {said}"
    )
