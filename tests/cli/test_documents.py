"""The documents a newcomer reads first: their links, their example, their commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import environment

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plans/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Catches a link to a file that was renamed or never written."""
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_readme_example_runs(folder: Path) -> None:
    """Catches the three lines of the README drifting away from the API."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) == 3
    code = example.replace('"path/to/model"', repr(str(folder)))
    assert code != example
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        env=environment(PYTHONIOENCODING="utf-8"),
        check=False,
    )
    assert done.returncode == 0 and done.stderr == b"" and len(done.stdout) > 0, done.stderr


def test_readme_begins_with_what_this_is_and_two_commands() -> None:
    """Catches a README whose commands are gone or cannot be executed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "speculative-decoding engine" in text.splitlines()[0]
    block = re.search(r"```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    commands = [line.split()[0] for line in block[1].splitlines()]
    assert commands == ["scripts/demo", "scripts/test"]
    assert all((ROOT / command).stat().st_mode & 0o111 for command in commands)


def test_structure_has_fifty_lines() -> None:
    """Catches a map that grows into a manual."""
    assert len((ROOT / "docs" / "structure.md").read_text(encoding="utf-8").splitlines()) <= 50
