"""Exit codes, and the exceptions that end a command with one sentence."""

from __future__ import annotations

OK = 0
FAILED = 1  # bad model, bad file, a run that failed, a difference found by verify
USAGE = 2  # the command line itself is wrong: unknown option, number out of range, options that contradict
NOTHING_TESTED = 2  # verify: no draft was accepted, so the comparison proves nothing
INTERRUPTED = 130  # SIGINT (128 + 2)
TERMINATED = 143  # SIGTERM (128 + 15)


class UsageProblem(Exception):
    """The command line is wrong. The message is one sentence that names the option."""


class Failure(Exception):
    """A command cannot go on. The message is one sentence that names the file, tensor or value."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived where nothing is worth keeping, for example while a model loads.

    A BaseException, like KeyboardInterrupt: no handler for errors may swallow it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
