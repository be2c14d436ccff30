"""The one error of this package that a user sees: a sentence that names the thing and what was expected."""

from __future__ import annotations

__all__ = ["TrainError"]


class TrainError(Exception):
    """Ends a command with its text and exit code 1."""
