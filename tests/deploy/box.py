"""The miniature package, the folder on the other side, and `python -m harness.deploy` between them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loopback
import mini


@dataclass
class Done:
    """A deploy that has ended."""

    code: int
    out: str
    err: str
    report: Path | None

    @property
    def record(self) -> dict[str, Any]:
        """Its deploy.json."""
        assert self.report is not None, self.err
        return dict(json.loads((self.report / "deploy.json").read_text()))

    def sent(self) -> list[str]:
        """Names of the files that rsync sent."""
        return list(self.record["sent"]["names"])


@dataclass
class Box:
    """The miniature package, a server, and the folder on the other side."""

    server: loopback.Sshd
    source: Path
    root: Path
    answer: int = 0
    options: list[str] = field(default_factory=list)

    def argv(self, *options: str, host: str = "box", server: loopback.Sshd | None = None) -> list[str]:
        config = (server or self.server).config
        fixed = ["--source", str(self.source), "--root", str(self.root), "--ssh-config", str(config)]
        return [sys.executable, "-m", "harness.deploy", host, *fixed, "--retries", "0", *self.options, *options]

    def start(self, *options: str, **where: Any) -> subprocess.Popen[str]:
        pipe, argv = subprocess.PIPE, self.argv(*options, **where)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def deploy(self, *options: str, timeout: float = 240, **where: Any) -> Done:
        return self.finish(self.start(*options, **where), timeout)

    def finish(self, process: subprocess.Popen[str], timeout: float = 240) -> Done:
        out, err = process.communicate(timeout=timeout)
        places = [line.split(": ", 1)[1] for line in err.splitlines() if line.startswith("box: /")]
        return Done(process.returncode, out, err, Path(places[-1]) if places else None)

    def new_answer(self) -> int:
        """Changes the package: the next deploy has a release to build."""
        next_answer = max(self.answer, mini.answer_of(self.source)) + 1
        mini.set_answer(self.source, next_answer)
        return next_answer

    def current(self) -> int:
        """What the release that is in use answers: it works."""
        python = self.root / "current/venv/bin/python"
        argv = [python, "-I", "-c", "import kdtree_engine; print(kdtree_engine.ANSWER)"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return int(done.stdout)

    def hold(self, gate: str) -> None:
        """The miniature waits at this gate."""
        (self.server.gates / gate).touch()

    def reached(self, gate: str, process: subprocess.Popen[str]) -> None:
        """Returns once it waits there."""
        sign = self.server.gates / (gate + ".reached")
        deadline = time.monotonic() + 60
        while not sign.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"gate {gate} was not reached"
            time.sleep(0.01)
        sign.unlink()

    def release(self, gate: str) -> None:
        """It goes on."""
        (self.server.gates / gate).unlink(missing_ok=True)

    def recovers(self) -> Done:
        """A plain deploy works now, and what it deployed is in use."""
        done = self.deploy()
        assert done.code == 0, done.err
        self.answer = mini.answer_of(self.source)
        assert self.current() == self.answer
        return done
