"""The checkout that this package runs from: what a record says of its own making. Needs nothing but Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def commit(root: Path = CHECKOUT) -> str | None:
    """Of the checkout `root`, by default the one that this package runs from; `-dirty` behind it where files differ.
    None where `root` is no checkout, as with a package that was installed."""
    if not (root / ".git").exists():
        return None
    try:
        argv = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(argv, capture_output=True, timeout=10, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
