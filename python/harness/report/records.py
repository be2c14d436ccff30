"""Records of the scripts in bench/: each kind becomes tables, by what it holds and not by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.report.document import Cell, Table, number
from harness.report.fields import Fields, ResultError
from harness.report.origin import Origin, dated


@dataclass(frozen=True)
class Sheet:
    """A table and what it shows."""

    caption: str
    table: Table


@dataclass(frozen=True)
class Record:
    """What one script measured. Records of one `title` stand in one section."""

    origin: Origin
    title: str
    sheets: list[Sheet]


def read_record(top: Fields) -> Record | None:
    """The record in a file, None where it is of no kind that is known here. Raises ResultError for one that lacks what
    its kind has."""
    for kind in KINDS:
        if all(name in top for name in kind.fields):
            try:
                sheets = list(kind.read(top))
            except _Other:
                continue
            machine = ", ".join(filter(None, (top.maybe_text(n) for n in ("machine", "gpu", "engine"))))
            return Record(Origin(top.file, kind.script, *dated(top), machine=machine), kind.title, sheets)
    return None


class _Other(Exception):
    """The fields are there, and hold what another kind would."""


@dataclass(frozen=True)
class _Kind:
    script: str
    title: str
    fields: Sequence[str]
    read: Callable[[Fields], Iterator[Sheet]]


def _named(top: Fields) -> Iterator[tuple[str, Fields]]:
    """The objects inside an object, with their names."""
    for name in top.value:
        yield name, top.item(name)


def _grid(first: str, rows: dict[str, dict[str, str]]) -> Table:
    """Named rows of named figures; a figure that a row lacks is empty."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    cells = [[Cell(name), *(number(row.get(c, "")) for c in columns)] for name, row in rows.items()]
    return Table((first, *columns), cells)


def _figures(values: Fields, digits: int = 2) -> dict[str, str]:
    return {name: f"{values.number(name):.{digits}f}" for name in values.value}


# -- drafting ------------------------------------------------------------------------------------------------------


def _interval(cell: Fields) -> str:
    return f"{cell.number('median', 0):.2f} ({cell.number('low', 0):.2f}–{cell.number('high', 0):.2f})"


def _pairs(top: Fields) -> Iterator[Sheet]:
    """bench/drafting_pairs.py."""
    cells = dict(_named(top.item("cells")))
    if not all("plain_tokens_per_second" in cell for cell in cells.values()):
        raise _Other
    for clock in ("clock", "processor time"):
        rows = {}
        for name, cell in cells.items():
            if clock not in cell:
                continue
            ratios = cell.item(clock)
            rows[name] = {"plain, tokens/s": f"{cell.number('plain_tokens_per_second', 0):.0f}"} | {
                ("auto / best fixed" if choice == "auto_against_best_fixed" else choice): _interval(found)
                for choice, found in _named(ratios)
            }
        if rows:
            caption = f"Tokens per second over plain decoding, by the {clock}: median of pairs, 95 % interval."
            yield Sheet(caption, _grid("text", rows))
    lengths = {name: _figures(cell.item("tokens_a_round")) for name, cell in cells.items()}
    yield Sheet("Tokens emitted a round.", _grid("text", lengths))


def _instructions(top: Fields) -> Iterator[Sheet]:
    """bench/drafting_instructions.py."""
    rows = {}
    for name, cell in _named(top.item("cells")):
        choices = dict(_named(cell))
        if not all("instructions" in choice for choice in choices.values()):
            raise _Other
        rows[name] = {
            choice: f"{found.number('instructions', 0) / 1e6:.1f} ({found.number('rounds', 0):.0f} rounds)"
            for choice, found in choices.items()
        }
    caption = f"Instructions, in millions, for {top.number('tokens', 1):.0f} tokens"
    yield Sheet(f"{caption}, {top.maybe_text('isa') or 'instruction set not recorded'}.", _grid("text", rows))


# -- the demo model ------------------------------------------------------------------------------------------------


def _demo(top: Fields) -> Iterator[Sheet]:
    """bench/demo_model.py."""
    rows = {
        name: {nodes: f"{found.number('tokens_a_round', 1):.2f}" for nodes, found in _named(cell)}
        for name, cell in _named(top.item("tokens_a_round"))
    }
    yield Sheet("Tokens emitted a round, by draft nodes.", _grid("text", rows))
    bits = {name: _figures(cell, 3) for name, cell in _named(top.item("bits_per_byte"))}
    yield Sheet("Bits per byte of held-out text; below_xz: by which share less than xz.", _grid("text", bits))


def _experts(top: Fields) -> Iterator[Sheet]:
    """bench/distinct_experts.py."""
    rows = {name: _figures(cell.item("mean")) for name, cell in _named_objects(top) if "mean" in cell}
    rows |= {name: _figures(top.item(name)) for name in ("all", "independent")}
    yield Sheet("Distinct experts that so many rows of a tree choose, mean of layers.", _grid("text", rows))


def _named_objects(top: Fields) -> Iterator[tuple[str, Fields]]:
    for name, value in top.value.items():
        if isinstance(value, dict):
            yield name, top.item(name)


def _routing(top: Fields) -> Iterator[Sheet]:
    """bench/distinct_experts.py --curve."""
    points = top.value["points"]
    if not isinstance(points, list):
        top.wrong("points", "a list")
    row = {}
    for i, point in enumerate(points):
        if not isinstance(point, list) or len(point) != 2:
            raise ResultError(f"{top.file}: points[{i}] is no pair; rows and distinct experts were expected")
        pair = Fields({"rows": point[0], "experts": point[1]}, top.file, f"points[{i}]")
        row[f"{pair.number('rows', 1):.0f}"] = f"{pair.number('experts', 0):.2f}"
    caption = f"Distinct experts of {top.number('experts', 1):.0f}, {top.number('top_k', 1):.0f} a row"
    yield Sheet(f"{caption}, by rows ({top.text('source')}).", _grid("rows", {"experts": row}))


def _int4(top: Fields) -> Iterator[Sheet]:
    """bench/int4_accuracy.py."""
    rows = {}
    for r in top.items("rows"):
        if "weights" not in r:
            raise _Other
        error = r.maybe_number("relative_error")
        rows[r.text("weights")] = {
            "bits per byte": f"{r.number('bits_per_byte', 0):.5f}",
            "bits per token": f"{r.number('bits_per_token', 0):.5f}",
            "MB of weights": f"{r.number('weight_bytes', 0) / 1e6:.1f}",
            "relative error": "" if error is None else f"{error:.4f}",
        }
    text = top.maybe_item("text")
    yield Sheet((text.maybe_text("what") if text else None) or "Held-out text.", _grid("weights", rows))


# -- a GPU ---------------------------------------------------------------------------------------------------------


def _launches(top: Fields) -> Iterator[Sheet]:
    """Excerpts of kdtree-bench-cuda: times of single launches, and of smaller budgets beside them."""
    rows = {}
    for r in top.items("results"):
        if "us" not in r:
            raise _Other
        note = r.maybe_text("note")
        rows[r.text("name")] = {"µs": f"{r.number('us', 0):.2f}"} | ({"note": note} if note else {})
    yield Sheet(top.text("what") + ".", _grid("launch", rows))
    if (budgets := top.maybe_item("by_budget")) is not None:
        tables = {name: _figures(cell) for name, cell in _named_objects(budgets)}
        yield Sheet(f"µs by draft nodes: {budgets.maybe_text('note') or 'as above'}.", _grid("table", tables))


def _profile(top: Fields) -> Iterator[Sheet]:
    """Kernels of one step, from a profiler."""
    whole = top.number("sum_us", 0.0)
    rows = {}
    for k in top.items("kernels"):
        us = k.number("us", 0.0)
        share = {"share": f"{100 * us / whole:.1f} %"} if whole else {}
        rows[k.text("kernel")] = {"launches": f"{k.number('launches', 0):.0f}", "µs": f"{us:.1f}"} | share
    yield Sheet(top.text("what") + ".", _grid("kernel", rows))


KINDS = (
    _Kind("bench/drafting_pairs.py", "Drafting: pairs with plain decoding", ("cells", "commit", "tokens"), _pairs),
    _Kind("bench/drafting_instructions.py", "Drafting: instructions", ("cells", "tokens"), _instructions),
    _Kind("bench/demo_model.py", "The demo model", ("tokens_a_round", "bits_per_byte"), _demo),
    _Kind("bench/distinct_experts.py", "Distinct experts", ("independent", "all"), _experts),
    _Kind("bench/distinct_experts.py", "Distinct experts", ("points", "top_k"), _routing),
    _Kind("bench/int4_accuracy.py", "Accuracy of INT4", ("rows", "text"), _int4),
    _Kind("kdtree-bench-cuda", "CUDA: single launches", ("results", "what", "gpu"), _launches),
    _Kind("profile", "CUDA: kernels of a step", ("kernels", "what"), _profile),
)
