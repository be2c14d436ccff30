"""A table that prints as Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.scale.values import Kind

Cell = str | int | float | None
Format = Literal["md", "csv", "json"]


@dataclass(frozen=True)
class Column:
    """digits: decimal places of its floats in Markdown."""

    name: str
    digits: int = 2


@dataclass(frozen=True)
class Table:
    """rows hold full numbers; only Markdown rounds. kind: where the table's figures come from, where that is one thing
    for all of them. None cells: does not apply."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    kind: Kind | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        assert len(set(names)) == len(names), f"{self.name}: two columns of one name in {names}"
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.name}: {len(row)} cells for {len(self.columns)} columns"

    def markdown(self) -> str:
        """Title as a bold line, the table, the notes below it."""
        lines = [f"**{self.title}**" + (f" ({self.kind})" if self.kind else ""), ""]
        lines.append("| " + " | ".join(column.name for column in self.columns) + " |")
        lines.append("|" + "---|" * len(self.columns))
        for row in self.rows:
            cells = [_text(cell, column.digits) for cell, column in zip(row, self.columns, strict=True)]
            lines.append("| " + " | ".join(cells) + " |")
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)

    def csv(self) -> str:
        """One header line, full numbers."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(column.name for column in self.columns)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows)
        return out.getvalue().rstrip("\n")

    def record(self) -> dict[str, object]:
        """For JSON: rows as objects."""
        names = [column.name for column in self.columns]
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows],
            "notes": list(self.notes),
        }


def _text(cell: Cell, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.{digits}f}"
    return cell.replace("|", "\\|")


def render(tables: Sequence[Table], form: Format) -> str:
    """All tables. CSV: separated by an empty line and a comment line with the name."""
    if form == "json":
        return json.dumps([table.record() for table in tables], indent=1)
    if form == "csv":
        return "\n\n".join(f"# {table.name}\n{table.csv()}" for table in tables)
    return "\n\n".join(table.markdown() for table in tables)
