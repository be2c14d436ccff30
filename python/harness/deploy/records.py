"""What people read: prefixed lines while it runs, one table at the end, and the files of a report."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from harness.deploy.plan import Plan
    from harness.deploy.session import Outcome

_printing = threading.Lock()
MAX_SHOWN = 1000  # characters of a line on the screen
MAX_LOG = 64 << 20  # characters of log.txt: the other side does not fill this disk


def visible(text: str) -> str:
    """Control characters as escapes: no remote output drives this terminal, or forges lines of a log."""
    return "".join(c if c == "\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Log:
    """Lines of one host: on stderr with its name, and in the report's log.txt with the time."""

    def __init__(self, name: str, path: Path, screen: TextIO | None = None) -> None:
        self.name = name
        self._screen = screen or sys.stderr
        self._file = open(path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._began = time.monotonic()
        self._left = MAX_LOG

    def say(self, text: str, stage: str | None = None) -> None:
        """One line."""
        text = visible(text)
        head = f"[{self.name} {stage}]" if stage else f"[{self.name}]"
        shown = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
        with _printing:
            print(head, shown, file=self._screen, flush=True)
            if self._file.closed:
                return
            self._left -= len(text) + 40
            try:
                if self._left < 0:
                    raise OSError(errno.EFBIG, "it is too long")
                print(f"{time.monotonic() - self._began:8.2f}", head, text, file=self._file, flush=True)
            except OSError as error:  # a full disk here is no reason to leave the other side alone
                print(head, f"log.txt ends here: {error.strerror}", file=self._screen, flush=True)
                with contextlib.suppress(OSError):
                    self._file.close()

    def close(self) -> None:
        """No further lines reach the file."""
        with _printing:
            self._file.close()


def matrix_summary(path: Path) -> str:
    """`16 passed, 8 not run` of a matrix.json that came from elsewhere."""
    try:
        value = json.loads(path.read_bytes())
        counts = {key: int(value[key]) for key in ("passed", "failed", "not_run")}
    except (OSError, ValueError, KeyError, TypeError):
        return "-"
    parts = [f"{counts['passed']} passed"]
    parts += [f"{counts[key]} {key.replace('_', ' ')}" for key in ("failed", "not_run") if counts[key]]
    return ", ".join(parts)


def write_record(plan: Plan, outcome: Outcome) -> None:
    """deploy.json of the report."""
    record: dict[str, Any] = {
        "host": plan.target.name,
        "date": plan.options.date,
        "digest": plan.digest,
        "commit": plan.source.commit,
        "dirty": plan.source.dirty,
        "files": len(plan.source.files),
        "source_bytes": plan.source.size,
        "bench": plan.options.bench,
        "tests": plan.options.tests,
        "phases": list(plan.options.phases),
        **dataclasses.asdict(outcome),
    }
    temporary = plan.report / "deploy.json.new"
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(plan.report / "deploy.json")


COLUMNS = ("host", "release", "sent", "build", "install", "golden", "matrix", "tests", "bench", "current", "exit")


def table(plans: list[Plan], outcomes: list[Outcome]) -> list[str]:
    """One row a host."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for plan, outcome in zip(plans, outcomes, strict=True):

        def seconds(name: str, there: str = "-", outcome: Outcome = outcome) -> str:
            step = outcome.step(name)
            if step is None:
                return there
            return f"{step.seconds:.1f} s" if step.code == 0 else f"FAILED ({step.code})"

        before = "was there" if outcome.step("source") and outcome.step("release") else "-"
        sent = outcome.sent
        rows.append(
            (
                outcome.name,
                outcome.digest,
                f"{len(sent.names)} files" if sent else "-",
                seconds("build", before),
                seconds("install", before),
                seconds("golden"),
                matrix_summary(plan.report / "matrix.json"),
                seconds("tests"),
                seconds("bench"),
                {None: "-", plan.digest: "this"}.get(outcome.current, str(outcome.current)),
                str(outcome.code),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
