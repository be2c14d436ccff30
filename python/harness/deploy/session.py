"""A deploy to one host: connect, send, watch the other side work, fetch; again where the transport failed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.deploy.plan import MAX_RESULT_BYTES, MAX_RESULT_FILES, Plan
from harness.deploy.records import Log
from harness.deploy.transport import Cancelled, Connection, FinalError, Transfer, TransportError, rsync

MIN_RSYNC = (3, 2, 4)  # the first that protects arguments by itself
SAFE_RSYNC = (3, 4, 3)
INTERRUPTED = 130
_RESULT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,80}\.(?:json|xml|txt)")
_OWN = {"deploy.json", "log.txt"}  # written here, never fetched


@dataclass
class Step:
    """A stage as it ended: on the other side, or one of ours (connect, send, fetch)."""

    name: str
    seconds: float
    code: int
    notes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What became of one host. `code`: 0, the failing remote command's, or one of ours (docs/deploy.md)."""

    name: str
    digest: str
    code: int = 1
    error: str | None = None
    attempts: int = 0
    sent: Transfer | None = None
    current: str | None = None
    system: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def step(self, name: str) -> Step | None:
        """The last stage of this name, None where it did not end."""
        return next((s for s in reversed(self.steps) if s.name == name), None)


def rsync_version(text: str) -> tuple[int, ...] | None:
    """(3, 2, 7) of rsync's first line, None where it is no rsync's."""
    match = re.match(r"rsync\s+version\s+v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else None


def rsync_objection(text: str, where: str) -> str | None:
    """Why an rsync will not do, None where it will."""
    version = rsync_version(text)
    if version is None or version < MIN_RSYNC:
        wanted = ".".join(map(str, MIN_RSYNC))
        return f"rsync {where} is {text[:60]!a}; {wanted} or later is needed"
    return None


class Session:
    """One host's deploy. `run` never raises: every end is an Outcome."""

    def __init__(self, plan: Plan, log: Log, cancel: threading.Event) -> None:
        self.plan = plan
        self.log = log
        self.cancel = cancel
        self.outcome = Outcome(plan.target.name, plan.digest)
        self._stage = "connect"

    def run(self) -> Outcome:
        """Tries until it is done, final, or out of tries."""
        outcome = self.outcome
        retries = self.plan.options.retries
        for attempt in range(retries + 1):
            outcome.attempts = attempt + 1
            outcome.steps.clear()
            outcome.error = None
            try:
                self._attempt()
                break
            except TransportError as error:
                outcome.code, outcome.error = 255, f"{error} (stage {self._stage})"
                if attempt == retries:
                    break
                pause = min(2**attempt, 30)
                self.log.say(f"{outcome.error}; try {attempt + 2} of {retries + 1} in {pause} s")
                if self.cancel.wait(pause):
                    outcome.code, outcome.error = INTERRUPTED, "interrupted"
                    break
            except FinalError as error:
                outcome.code, outcome.error = error.code, str(error)
                break
            except Cancelled:
                outcome.code, outcome.error = INTERRUPTED, f"interrupted in stage {self._stage}"
                break
            except OSError as error:
                outcome.code, outcome.error = 1, f"{error} (stage {self._stage})"
                break
        if outcome.error:
            self.log.say(f"error: {outcome.error}")
        return outcome

    def _attempt(self) -> None:
        plan = self.plan
        self._enter("connect")
        connection = Connection(plan.ssh_argv(), plan.script(), plan.request(), self._line)
        cancelled = True
        try:
            with self._own("connect"):
                ready = self._until(connection, "ready")
                self._check_other_side(ready)
            with self._own("send") as step:
                sent = rsync(plan.push_argv(), plan.push_names(), connection, self.cancel, self._line)
                self.outcome.sent = sent
                step.notes.append(f"{len(sent.names)} of {len(plan.source.files)} files, {sent.bytes_sent} bytes")
                if len(sent.names) <= 5:
                    step.notes += sent.names
            connection.send("synced")
            results = self._until(connection, "results")
            with self._own("fetch") as step:
                names = self._result_names(results.get("files"))
                rsync(plan.fetch_argv(), names, connection, self.cancel, self._line)
                step.notes.append(str(plan.report))
            connection.send("fetched")
            done = self._until(connection, "done")
            code, current = done.get("code"), done.get("current")
            if type(code) is not int or not 0 <= code <= 255:
                raise FinalError(70, "the other side's exit code is none")
            self.outcome.code = code
            self.outcome.current = current if isinstance(current, str) else None
            if code:
                bad = next((s.name for s in self.outcome.steps if s.code), "a check")
                self.outcome.error = f"{bad} failed with exit code {code}"
            cancelled = False
        finally:
            connection.close(cancel=cancelled)

    def _until(self, connection: Connection, wanted: str) -> dict[str, Any]:
        """Shows events until this one comes."""
        while True:
            event = connection.event(self.cancel)
            kind = event["event"]
            if kind == wanted:
                return event
            if kind == "line":
                self._line(str(event.get("text")))
            elif kind == "begin":
                self._enter(str(event.get("stage")))
            elif kind == "end":
                self._leave(event)
            elif kind == "failed":
                code = event.get("code")
                code = code if isinstance(code, int) and 0 < code <= 255 else 1
                self.outcome.steps.append(Step(self._stage, 0.0, code))
                raise FinalError(code, f"{self._stage}: {event.get('text')}")
            else:
                raise FinalError(70, f"expected {wanted}, the other side says {kind!a}")

    def _check_other_side(self, ready: dict[str, Any]) -> None:
        self.outcome.system = {
            key: str(ready.get(key))[:200] for key in ("root", "python", "system", "rsync", "current")
        }
        theirs = str(ready.get("rsync"))
        if objection := rsync_objection(theirs, "there"):
            raise FinalError(1, objection)
        version = rsync_version(theirs)
        if version is not None and version < SAFE_RSYNC:
            self.log.say(f"note: rsync there is {'.'.join(map(str, version))}; before 3.4.3 only with your "
                         "distribution's security fixes")  # fmt: skip

    def _result_names(self, files: object) -> bytes:
        """What to fetch: names of ours, few and small. The other side is not trusted with more."""
        if not isinstance(files, dict) or len(files) > MAX_RESULT_FILES:
            raise FinalError(70, "the other side's list of results is none, or too long")
        total = 0
        for name, size in files.items():
            if type(size) is not int or size < 0 or not _RESULT.fullmatch(name) or name in _OWN:
                raise FinalError(70, f"the other side names a result {ascii(name)[:100]}")
            total += size
        if total > MAX_RESULT_BYTES:
            raise FinalError(70, f"the results have {total} bytes, more than {MAX_RESULT_BYTES}")
        return b"".join(name.encode() + b"\0" for name in files)

    # ------------------------------------------------------------------------------------------ showing

    def _line(self, text: str) -> None:
        self.log.say(text, self._stage)

    def _enter(self, stage: str) -> None:
        self._stage = stage
        self.log.say(f"== {stage}")

    def _leave(self, event: dict[str, Any]) -> None:
        notes = event.get("notes")
        code, seconds = event.get("code"), event.get("seconds")
        step = Step(
            str(event.get("stage")),
            float(seconds) if isinstance(seconds, int | float) else 0.0,
            code if isinstance(code, int) else 1,
            [str(note) for note in notes] if isinstance(notes, list) else [],
        )
        self._finish(step)

    def _finish(self, step: Step) -> None:
        self.outcome.steps.append(step)
        result = "ok" if step.code == 0 else f"FAILED ({step.code})"
        self.log.say("; ".join([f"{step.name} {result}, {step.seconds:.1f} s", *step.notes]))

    def _own(self, name: str) -> _Own:
        return _Own(self._enter if name != "connect" else lambda _: None, self._finish, Step(name, 0.0, 0))


class _Own:
    """A stage of this side, timed; it ends only where nothing was raised."""

    def __init__(self, enter: Callable[[str], None], finish: Callable[[Step], None], step: Step) -> None:
        self.enter, self.finish, self.step = enter, finish, step

    def __enter__(self) -> Step:
        self.began = time.monotonic()
        self.enter(self.step.name)
        return self.step

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.step.seconds = round(time.monotonic() - self.began, 2)
            self.finish(self.step)
