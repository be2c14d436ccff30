"""How the developer's commands end: bad input, a full disk or a missing package is one sentence, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from harness.train.errors import TrainError
from kdtree_engine import EngineError


def guarded(main: Callable[[], int]) -> int:
    """Runs `main`; its exit code, or 1 after one sentence on stderr for an OSError, EngineError or TrainError."""
    try:
        return main()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
    except (EngineError, TrainError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1
