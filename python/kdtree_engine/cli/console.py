"""stdout for results, stderr for everything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from kdtree_engine.cli.exits import Failure

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Progress = Callable[[int, int], None]  # (done, total)


def prepare_streams() -> None:
    """Results are UTF-8 whatever the locale says: a model's text knows no locale.

    Where the caller closed stderr (`2>&-`) messages go nowhere. Raises Failure where stdout is closed.
    """
    # Python sets a stream to None whose descriptor is closed. The null device takes the free descriptor, which
    # else the first file opened would get.
    out, err = sys.stdout, sys.stderr
    if out is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # lives as long as the process
    if err is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # lives as long as the process
    if out is None:
        raise Failure("stdout is closed: the results have nowhere to go")
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")


def stdout() -> Console:
    """A console for tables on stdout. rich itself respects NO_COLOR and plain pipes."""
    return Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False)


def log(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


def error(message: str) -> None:
    """One sentence on stderr; line breaks in it (from a file's name, say) cannot forge further lines."""
    log("error: " + visible(message.strip(), keep_lines=False))


def visible(text: str, keep_lines: bool = True) -> str:
    """`text` with pictures for control characters: no model and no file name may drive the terminal."""

    def one(c: str) -> str:
        code = ord(c)
        if c in "\n\t" and keep_lines:
            return c
        if code < 0x20:
            return chr(0x2400 + code)
        if code == 0x7F:
            return "\u2421"
        if 0x80 <= code < 0xA0:
            return f"\\x{code:02x}"
        return c

    return "".join(map(one, text))


class TextStream:
    """Writes a model's text piece by piece. On a terminal control characters are shown, not obeyed."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._line_open = False

    def write(self, piece: str) -> None:
        if not piece:
            return
        sys.stdout.write(visible(piece) if self._terminal else piece)
        sys.stdout.flush()
        self._line_open = not piece.endswith("\n")

    def close(self) -> None:
        if self._line_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._line_open = False


def byte_progress(label: str) -> AbstractContextManager[Progress | None]:
    """A progress bar in bytes on stderr, with bytes per second and the time left; None (no calls at all) where
    stderr is no terminal."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return _bar(label, DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())


def token_progress(label: str) -> AbstractContextManager[Progress | None]:
    """A progress bar in tokens on stderr, gone when all are done; None where stderr is no terminal."""
    from rich.progress import MofNCompleteColumn

    return _bar(label, MofNCompleteColumn())


@contextmanager
def _bar(label: str, *columns: ProgressColumn) -> Iterator[Progress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
    )
    task = bars.add_task(visible(label, keep_lines=False), total=None)

    def update(done: int, total: int) -> None:
        bars.update(task, completed=done, total=total)
        if done >= total:
            bars.stop()  # what comes next may write to the same terminal

    with bars:
        yield update


def count_text(count: int, thing: str) -> str:
    """1, "token" -> '1 token'; 2, "token" -> '2 tokens'."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def byte_text(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
