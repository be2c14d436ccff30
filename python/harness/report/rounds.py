"""Reading a trace: one JSON object a line, checked before anything is drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = {0: "root", 1: "table", 2: "path", 3: "table and path"}


class TraceError(Exception):
    """A line that is no round; the message names file, line and field."""


@dataclass(frozen=True)
class Round:
    """One verify. Lists hold one entry a node, in pop order, node 0 the root; the first `nodes` after it were
    verified. `path`: rows accepted, root first; `emitted`: the target's token after each of them."""

    number: int
    position: int
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    sources: list[int]
    probabilities: list[float]
    nodes: int
    path: list[int]
    emitted: list[int]
    seconds: dict[str, float]
    text: list[str]  # of each node; its token id where the model has no text
    emitted_text: list[str]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def read_trace(path: Path) -> list[Round]:
    """The rounds of a trace. Raises OSError, and TraceError for a file without any or a line that is not one."""
    rounds = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace: it is not valid UTF-8 at byte {error.start}") from None
    if not text:
        raise TraceError(f"{path} is empty; expected a trace, one JSON object a line")
    lines = text.removesuffix("\n").split("\n")  # texts may hold other line ends
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where} is not JSON: {error}") from None
        except RecursionError:
            raise TraceError(f"{where} is no round: it is nested too deeply") from None
        if not isinstance(value, dict):
            raise TraceError(f"{where} is no object")
        try:
            rounds.append(_round(value))
        except KeyError as error:
            raise TraceError(f"{where} is no round: it has no {error}") from None
        except ValueError as error:
            raise TraceError(f"{where} is no round: {error}") from None
    return rounds


def _round(v: dict[str, Any]) -> Round:
    lists = {name: _integers(v, name) for name in ("tokens", "parents", "depths", "sources", "path", "emitted")}
    count, emitted = len(lists["tokens"]), len(lists["emitted"])
    probabilities = [_number(p, "a probability") for p in _list(v, "probabilities")]
    for name in ("parents", "depths", "sources"):
        if len(lists[name]) != count:
            raise ValueError(f"{name} has {len(lists[name])} entries, tokens {count}")
    if len(probabilities) != count or count < 1:
        raise ValueError(f"{len(probabilities)} probabilities of {count} nodes")
    if any(not 0 <= p < i for i, p in enumerate(lists["parents"]) if i > 0):
        raise ValueError("a node's parent does not come before it")
    if any(s not in SOURCES for s in lists["sources"]):
        raise ValueError(f"sources are {lists['sources']}; expected 0 to {max(SOURCES)}")
    nodes = _integer(v["nodes"], "nodes")
    if not 0 <= nodes < count or any(not 0 <= row <= nodes for row in lists["path"]):
        raise ValueError(f"{nodes} nodes verified of {count - 1}, path {lists['path']}")
    if not isinstance(v["seconds"], dict):
        raise ValueError("seconds is no object")
    return Round(
        number=_integer(v["round"], "round"),
        position=_integer(v["position"], "position"),
        probabilities=probabilities,
        nodes=nodes,
        seconds={str(k): _number(s, f"seconds.{k}") for k, s in v["seconds"].items()},
        text=_texts(v, "text", lists["tokens"], count),
        emitted_text=_texts(v, "emitted_text", lists["emitted"], emitted),
        **lists,
    )


def _list(v: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(v[name], list):
        raise ValueError(f"{name} is no list")
    return list(v[name])


def _integer(x: Any, name: str) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or abs(x) >= 2**31:
        raise ValueError(f"{name} is {x!r:.40}; expected an integer of 32 bits")
    return x


def _integers(v: dict[str, Any], name: str) -> list[int]:
    return [_integer(x, f"an entry of {name}") for x in _list(v, name)]


def _number(x: Any, name: str) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x < 1e9:
        raise ValueError(f"{name} is {x!r:.40}; expected a number from 0 on")
    return float(x)


def _texts(v: dict[str, Any], name: str, instead: list[int], count: int) -> list[str]:
    """Of `count` tokens; their ids where the trace has no text."""
    if name not in v:
        return [str(token) for token in instead]
    texts = [str(text) for text in _list(v, name)]
    if len(texts) != count:
        raise ValueError(f"{name} has {len(texts)} entries for {count} tokens")
    return texts
