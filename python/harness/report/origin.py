"""Where a result comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.report.fields import Fields, parse, read_text


@dataclass(frozen=True)
class Origin:
    """Where a result comes from. `machine` and `device` say what may be compared with what."""

    file: Path
    kind: str
    date: str = ""
    commit: str = ""
    machine: str = ""


def dated(top: Fields) -> tuple[str, str]:
    """Date and commit; a deploy beside the file knows the commit of what it installed."""
    commit = top.maybe_text("commit")
    beside = top.file.with_name("deploy.json")
    if commit is None and beside != top.file and beside.is_file():
        commit = Fields(parse(read_text(beside), beside), beside).maybe_text("commit")
    return (top.maybe_text("date") or _folder_date(top.file))[:10], commit or ""


def _folder_date(file: Path) -> str:
    """reports/HOST/DATE of a deploy."""
    name = file.parent.name
    return f"{name[:4]}-{name[4:6]}-{name[6:8]}" if name[:8].isdecimal() else name if name[:4].isdecimal() else ""
