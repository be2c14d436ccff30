"""Ctrl-C and SIGTERM in the middle of a command."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command import ARGV, environment

LONG = ("--prompt", "a", "--ignore-eos", "--context", "100000", "--max-tokens", "99000", "--drafter", "none")


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*ARGV, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_partial_text_stays(folder: Path, number: signal.Signals, code: int) -> None:
    """Catches text that is lost, a traceback, or a wrong exit code when generation is interrupted."""
    child = start("generate", folder, *LONG)
    assert child.stdout is not None
    first = child.stdout.read(20)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code
    assert len(first) == 20 and (first + out).endswith(b"\n")
    assert b"Traceback" not in err and b"stopped: cancelled" in err


@pytest.mark.parametrize("delay", [0.0, 0.4, 0.8, 1.2])
def test_json_says_cancelled_whenever_the_signal_comes(folder: Path, delay: float) -> None:
    """Catches a moment (loading, prompt, decoding) in which an interrupt leaves no whole JSON."""
    child = start("generate", folder, "--json", *LONG)
    wait_until_handled(child)
    time.sleep(delay)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    value = json.loads(out)
    assert value["stop_reason"] == "cancelled"
    assert value["stats"]["target_forwards"] == value["stats"]["rounds"] + 1 or value["tokens"] == []
    assert b"Traceback" not in err


def wait_until_handled(child: subprocess.Popen[bytes]) -> None:
    """Until the child has its own handler for SIGINT: before that the interpreter is still starting."""
    bit = 1 << (signal.SIGTERM - 1)  # the interpreter itself handles SIGINT only
    for _ in range(1000):
        status = Path(f"/proc/{child.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) & bit:
            return
        time.sleep(0.01)
    raise AssertionError("the child never handled SIGTERM")


def test_verify_is_interrupted(folder: Path) -> None:
    """Catches verify calling a cancelled run a difference."""
    child = start("verify", folder, *LONG)
    wait_until_handled(child)
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and out == b"" and err == b"cancelled\n"


def test_nothing_is_left_behind(folder: Path, tmp_path: Path) -> None:
    """Catches temporary files and child processes of an interrupted run."""
    before = sorted(p.name for p in folder.iterdir())
    child = subprocess.Popen(
        [*ARGV, "generate", str(folder), *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    assert child.stdout is not None
    child.stdout.read(5)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
    assert sorted(p.name for p in folder.iterdir()) == before
    sessions = [p for p in Path("/proc").iterdir() if p.name.isdigit() and session_of(p) == child.pid]
    assert sessions == []


def session_of(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return None  # it ended meanwhile
