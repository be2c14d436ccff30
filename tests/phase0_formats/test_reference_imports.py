"""Who may import whom: the oracle shares no code with the product, and the product never sees the oracle."""

from __future__ import annotations

import ast
from pathlib import Path

import harness

PYTHON = Path(harness.__file__).parents[1]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_oracle_imports_numpy_alone():
    """An oracle that calls the engine agrees with its mistakes."""
    allowed = {"__future__", "collections", "dataclasses", "heapq", "math", "typing", "numpy"}
    for path in (PYTHON / "harness" / "reference").glob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] in allowed or name.startswith("harness.reference"), (
                f"{path.name}: {name}"
            )


def test_product_never_imports_the_harness():
    files = list((PYTHON / "kdtree_engine").rglob("*.py"))
    assert files
    for path in files:
        assert not any(name.split(".")[0] == "harness" for name in imported(path)), path
