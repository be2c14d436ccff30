"""What is sent: an allow list of names and suffixes, hashed file by file.

Nothing travels that is not listed here: no .git, no hidden file, no key, no build folder, no results. Symbolic
links are never followed and never sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.deploy.values import Refused

FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("cmake", "cpp", "python", "tests", "bench", "docs")  # tests read documents
# fmt: off
SUFFIXES = frozenset({
    ".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".cmake", ".py", ".pyi", ".typed", ".txt", ".toml", ".json", ".md",
    ".kdtr", ".npz", ".safetensors",
})
# fmt: on
SKIPPED_FOLDERS = frozenset({"__pycache__", "build", "dist", "results", "seeds", "corpus", "img"})
GENERATED = frozenset({"_native.pyi"})  # by a build by hand, beside its sources
MAX_FILES = 5_000
MAX_BYTES = 256 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
# A requirement as pip takes it on a command line: a name, perhaps extras and versions; no URL, no option.
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9._,-]+\])?(?:(?:[<>=!~]=?|===)[A-Za-z0-9.*+!_-]+,?)*"
)


@dataclass(frozen=True)
class SourceFile:
    """One file: SHA-256 of its bytes, and whether it may be executed."""

    sha256: str
    size: int
    executable: bool


@dataclass(frozen=True)
class Source:
    """A source tree as it was when it was read.

    `files`: by path, '/' between components, sorted. `left_out`: paths in the listed folders that the allow
    list does not take, generated files not counted. `commit`: of the git repository whose top `root` is, None where
    it is none; `dirty`: whether what is sent may differ from that commit (changed or untracked files).
    """

    root: Path
    files: dict[str, SourceFile]
    left_out: list[str] = field(default_factory=list)
    distribution: str = ""
    build_requires: tuple[str, ...] = ()
    commit: str | None = None
    dirty: bool | None = None
    python_floor: tuple[int, int] = (3, 11)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files.values())

    def manifest(self) -> dict[str, Any]:
        """{path: [sha256, executable]}: what the other side checks after the transfer."""
        return {path: [f.sha256, f.executable] for path, f in self.files.items()}

    def digest(self, **options: str | None) -> str:
        """16 hexadecimal digits that name a release: its files and whatever else its build depends on."""
        text = json.dumps({"files": self.manifest(), "options": options}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_root(start: Path) -> Path:
    """The nearest folder from `start` upwards that has a pyproject.toml and CMakeLists.txt."""
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "CMakeLists.txt").is_file():
            return folder
    raise Refused(f"{start} is in no source tree (pyproject.toml, CMakeLists.txt): use --source DIR")


def read(root: Path) -> Source:
    """Lists and hashes. Refused for a tree without pyproject.toml, with strange names, or too large."""
    files: dict[str, SourceFile] = {}
    left_out: list[str] = []
    for name in FILES:
        if (root / name).is_file() and not (root / name).is_symlink():
            files[name] = _hash(root / name)
    for name in FOLDERS:
        if not (root / name).is_symlink():
            _walk(root, name, files, left_out)
    total = sum(f.size for f in files.values())
    if len(files) > MAX_FILES or total > MAX_BYTES:
        raise Refused(f"{root}: {len(files)} files of {total} bytes; {MAX_FILES} files, {MAX_BYTES} bytes at most")
    distribution, requires, floor = _project(root)
    commit, dirty = _commit(root)
    return Source(root, dict(sorted(files.items())), sorted(left_out), distribution, requires, commit, dirty, floor)


def _commit(root: Path) -> tuple[str | None, bool | None]:
    """(None, None) where there is no git, no repository, or one that holds this tree as a folder of its own."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None, None
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return commit, None if commit is None or changes is None else bool(changes)


def _walk(root: Path, folder: str, files: dict[str, SourceFile], left_out: list[str]) -> None:
    try:
        entries = sorted(os.scandir(root / folder), key=lambda e: e.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = f"{folder}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if entry.name in SKIPPED_FOLDERS or entry.name.endswith(".egg-info"):
                continue
            if _NAME.fullmatch(entry.name):
                _walk(root, path, files, left_out)
            else:
                left_out.append(path + "/")
        elif entry.name in GENERATED or entry.name.endswith((".so", ".pyc")):
            continue
        elif (
            entry.is_file(follow_symlinks=False)
            and _NAME.fullmatch(entry.name)
            and os.path.splitext(entry.name)[1] in SUFFIXES
        ):
            files[path] = _hash(root / path)
        else:
            left_out.append(path)


def _hash(path: Path) -> SourceFile:
    try:
        with open(path, "rb") as f:
            mode = os.fstat(f.fileno()).st_mode
            data = f.read(MAX_BYTES + 1)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    return SourceFile(hashlib.sha256(data).hexdigest(), len(data), bool(mode & stat.S_IXUSR))


def _project(root: Path) -> tuple[str, tuple[str, ...], tuple[int, int]]:
    """Distribution, build requirements and lowest Python of pyproject.toml."""
    path = root / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        distribution = table["project"]["name"]
        requires = table["build-system"]["requires"]
        floor = re.fullmatch(r">=\s*(\d+)\.(\d+)", table["project"]["requires-python"])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise Refused(f"{path} cannot be read as a project: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(distribution, str) or not _NAME.fullmatch(distribution):
        raise Refused(f"{path}: project.name is {distribution!a}")
    if floor is None:
        raise Refused(f"{path}: requires-python must be '>=MAJOR.MINOR'")
    if not isinstance(requires, list):
        raise Refused(f"{path}: build-system.requires must be a list")
    for text in requires:
        if not isinstance(text, str) or not _REQUIREMENT.fullmatch(text.replace(" ", "")):
            raise Refused(f"{path}: build requirement {text!a} is not a name with versions")
    return distribution, tuple(t.replace(" ", "") for t in requires), (int(floor[1]), int(floor[2]))
