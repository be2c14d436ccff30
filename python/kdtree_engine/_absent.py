"""What to say where the native module cannot be imported."""

from __future__ import annotations

import platform
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def sentence(error: ImportError, folder: Path = Path(__file__).parent) -> str:
    """It was not built, was built for another Python, or does not load: which of them, and what helps."""
    here = f"{platform.python_implementation()} {platform.python_version()}"
    built = sorted(path.name for path in folder.glob("_native*") if path.suffix in (".so", ".pyd"))
    usable = {f"_native{suffix}" for suffix in EXTENSION_SUFFIXES}
    if found := next((name for name in built if name in usable), None):
        return f"kdtree_engine's native module {folder / found} does not load: {error}"
    if built:
        other = ", ".join(built)
        return f"kdtree_engine's native module was built for another Python ({other}); this is {here}: pip install ."
    return f"kdtree_engine's native module is not built in {folder}: pip install . builds it for this {here}"
