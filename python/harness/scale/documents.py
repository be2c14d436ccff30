"""Keeps the documents equal to the program: tables and figures between markers are written by it, text is by hand.

<!-- table NAME [widths=1,8,64] [systems=pro6000x8,h200x8] -->   the table follows, up to   <!-- end -->
<!--=KEY-->2.3 ms<!--/-->                                        a figure of `figures` inside a sentence
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.scale import hardware, tables
from harness.scale.context import Context
from harness.scale.figures import FIGURES
from harness.scale.values import ScaleError

DOCUMENTS = ("scale_up_k2.6.md", "cluster_scaling.md")
_TABLE = re.compile(r"(<!-- table (?P<name>\S+)(?P<options>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!--=(?P<key>[^>]*?)-->).*?(<!--/-->)", re.DOTALL)
_MARKER = re.compile(r"<!--(?: table |=| end |/)")


def updated(text: str) -> str:
    """The document with every table and figure as the program says. Raises ScaleError on a marker that has no partner,
    an unknown table, option or figure."""
    opened = len(re.findall(r"<!-- table ", text)), len(re.findall(r"<!--=", text))
    if opened != (len(_TABLE.findall(text)), len(_FIGURE.findall(text))):
        raise ScaleError("a table or figure marker has no end")
    if len(_MARKER.findall(text)) != 2 * sum(opened):
        raise ScaleError("an end marker has no table or figure before it")
    return _FIGURE.sub(_figure, _TABLE.sub(_table, text))


def _table(match: re.Match[str]) -> str:
    options = dict(option.partition("=")[::2] for option in match["options"].split())
    table = tables.build(match["name"], _context(options))
    return f"{match[1]}{table.markdown()}\n{match[4]}"


def _context(options: dict[str, str]) -> Context:
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name == "widths":
            changes["widths"] = tuple(int(width) for width in value.split(","))
        elif name == "systems":
            changes["systems"] = tuple(hardware.resolve(system) for system in value.split(","))
        else:
            raise ScaleError(f"no table option {name!r}; there are widths and systems")
    return replace(Context(), **changes)


def _figure(match: re.Match[str]) -> str:
    if match["key"] not in FIGURES:
        raise ScaleError(f"no figure {match['key']!r} in harness.scale.figures")
    return f"{match[1]}{FIGURES[match['key']]()}{match[3]}"


def paths(folder: Path) -> list[Path]:
    """The documents in FOLDER. Raises ScaleError that names one that is not there."""
    found = [folder / name for name in DOCUMENTS]
    for path in found:
        if not path.is_file():
            raise ScaleError(f"{path}: no such document; run this where docs/ is, or give --docs DIR")
    return found


def stale(folder: Path) -> list[Path]:
    """Documents whose tables or figures are not what the program says."""
    return [path for path in paths(folder) if (text := path.read_text(encoding="utf-8")) != updated(text)]


def write(folder: Path) -> list[Path]:
    """Bring the documents up to date; those that changed."""
    changed = stale(folder)
    for path in changed:
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return changed
