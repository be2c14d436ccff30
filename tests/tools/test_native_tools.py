"""The tools that need no Python: what is wrong with a command line is said in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a tool that is installed beside this Python, or in PATH."""
    program = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip(f"NOT RUN: {name} is not installed beside this Python")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)


VERIFY: list[tuple[list[str], list[str]]] = [
    (["x.kdtr", "--budget", "65"], ["--budget", "'65'", "0 to 64"]),
    (["x.kdtr", "--budget", "-1"], ["--budget", "'-1'", "0 to 64"]),
    (["x.kdtr", "--budget", "8x"], ["--budget", "'8x'", "integer"]),
    (["x.kdtr", "--budget"], ["--budget needs a value"]),
    (["x.kdtr", "--threads", "99999999999"], ["--threads", "'99999999999'", "0 to 1024"]),
    (["x.kdtr", "--precision", "f16"], ["--precision", "'f16'", "f32, bf16"]),
    (["x.kdtr", "--budgets", "3"], ["--budgets is not an option"]),
    (["x.kdtr", "y.kdtr"], ["x.kdtr and y.kdtr", "one FILE"]),
    (["--budget", "64"], ["FILE is missing"]),
]
LAWS: list[tuple[list[str], list[str]]] = [
    (["--budgets", "1,65"], ["--budgets", "'65'", "0 to 64"]),
    (["--budgets", "1,,4"], ["--budgets", "''", "0 to 64"]),
    (["--shape", "k3"], ["--shape", "'k3'", "tiny, moonlight, k2"]),
    (["--prompt", "0"], ["--prompt", "'0'", "1 to"]),
    (["--tokens", "2147483647"], ["--tokens", "'2147483647'", "1 to 1048576"]),  # the sum with the prompt overflowed
    (["--seed", "-1"], ["--seed", "'-1'"]),
    (["--layers", "two"], ["--layers", "'two'"]),
    (["--sessions", "65"], ["--sessions", "'65'", "0 to 64"]),
    (["--json"], ["--json needs a value"]),
    (["tiny"], ["tiny"]),
]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [("kdtree-verify", *case) for case in VERIFY] + [("kdtree-laws", *case) for case in LAWS],
)
def test_wrong_usage_is_named(name: str, arguments: list[str], words: list[str]) -> None:
    """Catches a usage printed in place of an answer: it does not say which of the options is wrong."""
    run = tool(name, *arguments)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith(f"{name}: ") and run.stderr.count("\n") == 1
    for word in words:
        assert word in run.stderr, run.stderr


@pytest.mark.parametrize("name", ["kdtree-verify", "kdtree-laws"])
def test_help_is_no_error(name: str) -> None:
    run = tool(name, "--help")
    assert run.returncode == 0 and run.stdout.startswith(f"usage: {name} ") and run.stderr == ""


def test_sessions_at_once_have_the_plain_bits() -> None:
    """Catches an engine that two threads corrupt, without an interpreter that lets only one of them run."""
    run = tool("kdtree-laws", "--tokens", "40", "--latents", "--budgets", "16", "--sessions", "6", "--threads", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 sessions at once, a thread each: 0 differ" in run.stdout
