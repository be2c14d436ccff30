"""SIGINT and SIGTERM: the first lets the step in progress finish, the second leaves at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

from kdtree_engine.cli import exits

_EXIT_CODE = {signal.SIGINT: exits.INTERRUPTED, signal.SIGTERM: exits.TERMINATED}


class Interruptible:
    """A context in which signals are under control.

    Without `cancel` the first signal raises `Interrupted` on the spot. With `cancel` (set while a session
    generates) it calls `cancel` and returns, so that the step in progress ends properly; a second signal
    exits the process at once.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None  # of the signal that arrived; None while none has
        self.cancel: Callable[[], object] | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruptible:
        for number in _EXIT_CODE:
            # A signal that the parent shell set to "ignore" (nohup, a background job) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.exit_code is not None
        self.exit_code = _EXIT_CODE[signal.Signals(number)]
        if again:
            os._exit(self.exit_code)
        if self.cancel is None:
            raise exits.Interrupted(self.exit_code)
        self.cancel()
