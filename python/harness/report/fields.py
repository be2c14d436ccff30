"""Reading JSON that others wrote: every value is checked, and a fault names file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

MAX_BYTES = 64 << 20


class ResultError(Exception):
    """A file that is no result; one sentence with its name and the field."""


class Fields:
    """An object of a JSON file and where it stands. What is not there and has no default raises ResultError."""

    def __init__(self, value: Any, file: Path, where: str = "") -> None:
        self.file, self.where = file, where
        if not isinstance(value, dict):
            raise ResultError(f"{file}: {where or 'the whole'} is {_kind(value)}; an object was expected")
        self.value: dict[str, Any] = value

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def _at(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def wrong(self, name: str, expected: str) -> NoReturn:
        """Raises ResultError."""
        if name not in self.value:
            raise ResultError(f"{self.file}: {self._at(name)} is missing; {expected} was expected")
        raise ResultError(f"{self.file}: {self._at(name)} is {_kind(self.value[name])}; {expected} was expected")

    def number(self, name: str, low: float = -math.inf) -> float:
        """A finite number, at least `low`."""
        v = self.value.get(name)
        if isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v):
            self.wrong(name, "a number")
        if v < low:
            raise ResultError(f"{self.file}: {self._at(name)} is {v:g}; at least {low:g} was expected")
        return float(v)

    def maybe_number(self, name: str) -> float | None:
        """None where it is null or not there."""
        return self.number(name) if name in self else None

    def text(self, name: str) -> str:
        v = self.value.get(name)
        if not isinstance(v, str):
            self.wrong(name, "a text")
        return v

    def maybe_text(self, name: str) -> str | None:
        return self.text(name) if name in self else None

    def item(self, name: str) -> Fields:
        """An object inside this one."""
        if name not in self:
            self.wrong(name, "an object")
        return Fields(self.value[name], self.file, self._at(name))

    def maybe_item(self, name: str) -> Fields | None:
        return self.item(name) if name in self else None

    def items(self, name: str) -> Iterator[Fields]:
        """The objects of a list."""
        v = self.value.get(name)
        if not isinstance(v, list):
            self.wrong(name, "a list")
        for i, entry in enumerate(v):
            yield Fields(entry, self.file, f"{self._at(name)}[{i}]")

    def numbers(self, name: str) -> list[float]:
        """A list of finite numbers."""
        v = self.value.get(name)
        if not isinstance(v, list):
            self.wrong(name, "a list of numbers")
        return [Fields({"n": n}, self.file, f"{self._at(name)}[{i}]").number("n") for i, n in enumerate(v)]


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "the text " + ascii(value if len(value) <= 40 else value[:40] + "…")
    return "a list" if isinstance(value, list) else "an object"


def read_text(file: Path) -> str:
    """Raises ResultError, and OSError where the file cannot be read."""
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ResultError(f"{file}: {size} bytes; results have at most {MAX_BYTES}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ResultError(f"{file}: not UTF-8 at byte {error.start}") from None


def parse(text: str, file: Path, where: str = "") -> Any:
    """A JSON value; ResultError for anything else."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ResultError(f"{file}: {where or 'it'} is nested too deeply to be a result") from None
    except ValueError as error:
        raise ResultError(f"{file}: {where or 'it'} is not JSON: {error}") from None
