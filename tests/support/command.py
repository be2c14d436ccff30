"""The kdtree command as a child process, the way a user's shell runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARGV = [sys.executable, "-m", "kdtree_engine.cli"]


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "KDTREE_TRACEBACK")}
    return plain | changes


def kdtree(*arguments: str | Path, stdin: str | None = None, timeout: float = 120, **env: str) -> Run:
    """Runs one command to its end; stdin is empty unless given."""
    done = subprocess.run(
        [*ARGV, *map(str, arguments)],
        input=(stdin or "").encode(),
        capture_output=True,
        timeout=timeout,
        env=environment(**env),
        check=False,
    )
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())


def assert_refused(run: Run, *words: str, code: int = 1) -> None:
    """One sentence on stderr that holds `words`, the exit code, nothing on stdout, no traceback."""
    assert run.code == code, run
    lines = run.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), run.err
    assert "internal error" not in run.err, run.err
    for word in words:
        assert word in run.err, (word, run.err)
    assert run.out == "", run.out
