"""The demo model that comes with the package: a small trained target in Kimi K2's shape and its DFlash drafter.

What it was trained on, and how well it does, says ``demo_model/MODEL.md``; ``python -m harness.train`` made it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .errors import fail

__all__ = ["DemoModel", "demo_model"]


class DemoModel(NamedTuple):
    """Two folders: a Hugging Face checkpoint, and the draft model for it."""

    target: Path
    draft: Path


def demo_model() -> DemoModel:
    """Where the demo model lies. Raises EngineError ``io`` where this installation left it out."""
    folder = Path(__file__).with_name("demo_model")
    found = DemoModel(folder / "target", folder / "draft")
    for part in found:
        if not (part / "config.json").exists():
            fail("io", f"the demo model is not installed: {part} has no config.json; give a MODEL")
    return found
