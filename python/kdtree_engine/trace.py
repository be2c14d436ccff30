"""Rounds as JSON lines: what `kdtree generate --trace FILE` writes (docs/drafting.md, Trace)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tokenizer import Tokenizer

__all__ = ["TraceWriter"]


class TraceWriter:
    """Writes one line per round, complete when `write` returns. Use it in a ``with``.

    Raises OSError where the file cannot be opened or written.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer | None = None) -> None:
        self._path = path
        self._file = path.open("w", encoding="utf-8")
        self._tokenizer = tokenizer
        self._rounds = 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._named():
            self._file.close()

    def write(self, trace: dict[str, Any]) -> None:
        """`trace`: as ``Session.generate(on_round=…)`` delivers it."""
        line: dict[str, Any] = {"round": self._rounds, **trace}
        if self._tokenizer is not None:
            line["text"] = [self._tokenizer.decode([token]) for token in trace["tokens"]]
            line["emitted_text"] = [self._tokenizer.decode([token]) for token in trace["emitted"]]
        with self._named():
            json.dump(_finite(line), self._file, ensure_ascii=False, separators=(",", ":"))
            self._file.write("\n")
            self._file.flush()
        self._rounds += 1

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An OSError of a write knows no file; this adds it."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


def _finite(value: Any) -> Any:
    """JSON knows no infinities: they become null."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
