"""The script of the other side without a network, and an other side that lies."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import loopback
import mini
import pytest

from harness.deploy import hosts, source
from harness.deploy.plan import Options, Plan
from harness.deploy.remote import BOOT
from harness.deploy.remote.link import PREFIX
from harness.deploy.transport import FinalError, TransportError, explain_rsync, explain_ssh
from harness.deploy.values import RemotePath, SshHost

needs_rsync = pytest.mark.skipif(loopback.missing() is not None, reason=str(loopback.missing()))


class Script:
    """The script, its standard input and output in our hands: there is no ssh between."""

    def __init__(self, folder: Path, token: str = "t", silence: float = 60.0) -> None:
        tree = source.read(folder / "source")
        target = hosts.Target("box", SshHost.parse("box"), root=RemotePath.parse(str(folder / "a" / "root")))
        plan = Plan(target, tree, Options(date="2026-01-02T03-04-05Z", token=token, by="me"), folder)
        text = plan.script().decode().replace("SILENCE = 60.0", f"SILENCE = {silence}")
        assert f"SILENCE = {silence}" in text
        self.plan = plan
        self.gates = folder / "gates"
        self.gates.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [str(loopback.base_python()), "-I", "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "KDT_GATES": str(self.gates)},
            cwd=folder,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + json.dumps(plan.request()).encode() + b"\n")

    def say(self, message: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": message}).encode() + b"\n")

    def until(self, wanted: str, timeout: float = 60.0) -> dict[str, Any]:
        """The next event of this kind."""
        stream = self.process.stdout
        assert stream is not None
        deadline = time.monotonic() + timeout
        while select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = stream.readline().decode()
            assert line, f"it has ended before {wanted}"
            event = dict(json.loads(line.removeprefix(PREFIX)))
            if event["event"] == wanted:
                return event
        raise AssertionError(f"no {wanted} in {timeout} s")

    def send_source(self) -> None:
        """What rsync would do, then on."""
        there = self.plan.target.root.text + "/source/"
        subprocess.run(["cp", "-r", f"{self.plan.source.root}/.", there], check=True)
        self.say("synced")

    def at_gate(self, gate: str) -> int:
        """Runs until the build waits there; returns the build's process."""
        (self.gates / gate).touch()
        self.send_source()
        sign = self.gates / (gate + ".reached")
        deadline = time.monotonic() + 60
        while not sign.exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            self.say("ping")
            time.sleep(0.01)
        sign.unlink()
        return next(loopback.descendants(self.process.pid))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mini.write(tmp_path / "source")
    return tmp_path


def gone(pid: int) -> bool:
    """No such process, or it has ended and only waits to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@needs_rsync
def test_silence_ends_everything(folder: Path) -> None:
    """Catches a connection that is half open, as after a power cut on this side: the build there must end, and
    the lock with it, though nothing ever says so."""
    script = Script(folder, silence=2.0)
    script.until("ready")
    child = script.at_gate("build")
    assert script.process.wait(30) == 74
    assert gone(child)
    again = Script(folder, token="another")
    again.until("ready")
    again.end()


@needs_rsync
def test_pings_keep_it_alive(folder: Path) -> None:
    """Catches a long build that is ended because it is long."""
    script = Script(folder, silence=2.0)
    script.until("ready")
    for _ in range(8):
        time.sleep(0.5)
        script.say("ping")
    assert script.process.poll() is None
    script.end()


@needs_rsync
def test_a_deploy_replaces_its_own_former_connection(folder: Path) -> None:
    """Catches a second try that is locked out by the first one, whose connection is dead on our side only; and a
    stranger that may do the same."""
    first = Script(folder)
    first.until("ready")
    child = first.at_gate("build")
    stranger = Script(folder, token="another")
    failed = stranger.until("failed")
    assert failed["code"] == 75 and "another deploy" in failed["text"] and first.process.poll() is None
    stranger.end()
    second = Script(folder)
    second.until("ready")
    assert first.process.wait(10) == 74 and gone(child)
    second.end()


@needs_rsync
def test_an_orphaned_build_keeps_the_lock(folder: Path) -> None:
    """Catches a lock that is freed while a build still writes: the script there is killed outright, as by the
    kernel for want of memory, and what it had started lives on."""
    script = Script(folder)
    script.until("ready")
    child = script.at_gate("build")
    script.process.kill()
    script.process.wait()
    assert not gone(child)
    other = Script(folder, token="another")
    assert other.until("failed")["code"] == 75
    other.end()
    os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    last = Script(folder, token="another")
    last.until("ready")
    last.end()


def lying(
    folder: Path, events: list[dict[str, Any] | str], monkeypatch: pytest.MonkeyPatch
) -> subprocess.CompletedProcess[str]:
    """A deploy to a host whose script says these things."""
    programs = folder / "programs"
    programs.mkdir()
    said = "".join(e if isinstance(e, str) else PREFIX + json.dumps(e) + "\n" for e in events)
    (folder / "said").write_text(said)
    for name, body in (
        ("ssh", f"cat {folder}/said; cat > /dev/null"),
        ("rsync", f"echo 'rsync  version 3.4.3  protocol version 32'; echo \"$@\" >> {folder}/rsync-calls"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    argv = [sys.executable, "-m", "harness.deploy", "box", "--source", str(folder / "source"), "--retries", "0"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


READY: dict[str, Any] = {"event": "ready", "rsync": "rsync  version 3.4.3  protocol version 32"}
DONE: dict[str, Any] = {"event": "done", "code": 0, "current": "x"}


@pytest.mark.parametrize(
    "events",
    [
        [READY, {"event": "results", "files": {"../../.bashrc": 1}}],
        [READY, {"event": "results", "files": {"/etc/x.json": 1}}],
        [READY, {"event": "results", "files": {"deploy.json": 1}}],
        [READY, {"event": "results", "files": {"log.txt": 1}}],
        [READY, {"event": "results", "files": {"a.sh": 1}}],
        [READY, {"event": "results", "files": {"a\n.json": 1}}],
        [READY, {"event": "results", "files": {"-x.json": 1}}],
        [READY, {"event": "results", "files": {"a.json": 1 << 40}}],
        [READY, {"event": "results", "files": {"a.json": -1}}],
        [READY, {"event": "results", "files": {"a.json": True}}],
        [READY, {"event": "results", "files": {f"{i}.json": 1 for i in range(1000)}}],
        [READY, {"event": "results", "files": ["a.json"]}],
        [READY, {"event": "results", "files": {}}, {"event": "done", "code": 256}],
        [READY, {"event": "results", "files": {}}, {"event": "done", "code": "0"}],
        [READY, {"event": "results", "files": {}}, {"event": "done", "code": False}],
        [READY, {"event": "reboot"}],
        [READY, {"event": "done", "code": 0}],
        [{"event": "ready", "rsync": "evil"}],
        [{"event": "ready"}],
        ["x" * 3_000_000 + "\n", {"event": "exec"}],
        [PREFIX + "{", PREFIX + "[]\n", PREFIX + '{"event": 1}\n', {"event": "exec"}],
        [READY, {"event": "failed", "code": 0, "text": "all is well"}],
    ],
    ids=lambda events: str(events[-1])[:60],
)
def test_the_other_side_is_not_believed(
    events: list[dict[str, Any] | str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a box that is no longer ours and says what it likes: names of results that are paths or our own
    files, endless results, codes that are none, events that do not exist."""
    done = lying(folder, events, monkeypatch)
    assert done.returncode not in (0, 255), done.stderr
    assert "Traceback" not in done.stderr
    calls = (folder / "rsync-calls").read_text() if (folder / "rsync-calls").exists() else ""
    assert not (events[-1].get("event") == "results" and "/results/" in calls) if isinstance(events[-1], dict) else True


def test_events_that_are_half_right_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback for an event whose fields are missing or of another type, and the test above passing
    because every lie fails alike: this one ends well."""
    events: list[dict[str, Any] | str] = [
        "Welcome\x07 to the box\n",
        READY,
        {"event": "begin"},
        {"event": "line"},
        {"event": "end", "seconds": "x", "notes": 3, "code": 0},
        {"event": "results", "files": {"matrix.json": 3}},
        DONE,
    ]
    done = lying(folder, events, monkeypatch)
    assert done.returncode == 0, done.stderr
    assert "[box connect] Welcome\\x07 to the box" in done.stderr


@pytest.mark.parametrize(
    "code, said, final",
    [
        (255, "ssh: connect to host x port 22: Connection timed out", False),
        (255, "client_loop: send disconnect: Broken pipe", False),
        (255, "Connection closed by 10.0.0.1 port 22", False),
        (255, "kex_exchange_identification: read: Connection reset by peer", False),
        (255, "Host key verification failed.", True),
        (255, "root@x: Permission denied (publickey).", True),
        (255, "ssh: Could not resolve hostname x: Name or service not known", True),
        (255, "command-line: line 0: Bad configuration option: x", True),
        (255, "Too many authentication failures", True),
        (74, "", False),
        (127, "bash: python3: command not found", True),
        (137, "Killed", True),
        (1, "Traceback", True),
        (0, "", True),
    ],
)
def test_only_transport_errors_are_worth_another_try(code: int, said: str, final: bool) -> None:
    """Catches retries of what cannot succeed, and a code 0 for a script that ended without a word."""
    error = explain_ssh(code, [said])
    assert isinstance(error, FinalError if final else TransportError)
    if isinstance(error, FinalError):
        assert error.code == (code or 1)


@pytest.mark.parametrize(
    "code, said, final",
    [
        (12, "rsync: connection unexpectedly closed (0 bytes received so far) [sender]", False),
        (30, "rsync: timeout in data send/receive", False),
        (255, "ssh: connect to host x port 22: Connection refused", False),
        (255, "Host key verification failed.", True),
        (12, 'rsync: write failed on "x": No space left on device (28)', True),
        (11, "rsync: mkdir failed", True),
        (23, "rsync: permission denied", True),
        (2, "protocol version mismatch -- is your shell clean?", True),
    ],
)
def test_rsync_errors_are_told_apart(code: int, said: str, final: bool) -> None:
    """Catches a full disk that is tried again, and a timeout that is not."""
    assert isinstance(explain_rsync(code, [said, "rsync error: x"]), FinalError if final else TransportError)
