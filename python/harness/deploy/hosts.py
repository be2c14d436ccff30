"""Where to deploy: destinations from the command line, or aliases of a hosts file.

The file is TOML, by default ~/.config/kdtree/hosts.toml:

    [box1]
    host = "root@box1.example"   # [user@]host, the only key that is required
    port = 2222
    root = "~/kdtree-engine"     # the folder there
    python = "python3.12"
    arch = "120"                 # CUDA architectures
    cuda = "ON"                  # AUTO, ON or OFF
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.deploy.values import CudaArch, PythonName, Refused, RemotePath, SshHost, alias, whole

DEFAULT_FILE = Path("~/.config/kdtree/hosts.toml")
DEFAULT_ROOT = "~/kdtree-engine"
CUDA = ("AUTO", "ON", "OFF")
_KEYS = ("host", "port", "root", "python", "arch", "cuda")


@dataclass(frozen=True)
class Target:
    """One machine and what is fixed about it. `name` is what people read in prefixes, tables and report
    folders."""

    name: str
    host: SshHost
    port: int | None = None
    root: RemotePath = field(default_factory=lambda: RemotePath(DEFAULT_ROOT))
    python: PythonName | None = None
    arch: CudaArch | None = None
    cuda: str = "AUTO"

    def folder(self) -> str:
        """The name of its report folder; an IPv6 address is written with '_' there."""
        return self.name.replace("[", "").replace("]", "").replace(":", "_")


def load(path: Path) -> dict[str, Target]:
    """Every alias of a hosts file. Refused, naming the file and the alias, for anything that is not in its
    grammar; unknown keys too."""
    try:
        with open(path, "rb") as f:
            table = tomllib.load(f)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}") from None
    targets = {}
    for name, entry in table.items():
        try:
            if not isinstance(entry, dict):
                raise Refused("expected a table with a host")
            targets[alias(name)] = _target(name, entry)
        except Refused as error:
            raise Refused(f"{path}, [{ascii(name)[1:-1]}]: {error}") from None
    return targets


def _target(name: str, entry: Mapping[str, object]) -> Target:
    if unknown := [key for key in entry if key not in _KEYS]:
        raise Refused(f"unknown key {unknown[0]!a}; there are {', '.join(_KEYS)}")
    if "host" not in entry:
        raise Refused("host is missing")

    def text(key: str) -> str | None:
        value = entry.get(key)
        if value is not None and not isinstance(value, str):
            raise Refused(f"{key} must be a string")
        return value

    port = entry.get("port")
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise Refused("port must be a number")
    return Target(
        name=name,
        host=SshHost.parse(text("host") or ""),
        port=None if port is None else whole(str(port), "port", 1, 65535),
        root=RemotePath.parse(text("root") or DEFAULT_ROOT),
        python=None if (python := text("python")) is None else PythonName.parse(python),
        arch=None if (arch := text("arch")) is None else CudaArch.parse(arch),
        cuda=cuda(text("cuda") or "AUTO"),
    )


def cuda(text: str) -> str:
    """AUTO, ON or OFF, in any case."""
    if text.upper() not in CUDA:
        raise Refused(f"cuda {text!a} is refused: expected {', '.join(CUDA)}")
    return text.upper()


def resolve(words: list[str], known: Mapping[str, Target]) -> list[Target]:
    """Targets of command-line words: an alias where the hosts file has it, a destination otherwise."""
    return [known[word] if word in known else Target(word, SshHost.parse(word)) for word in words]


def duplicates(targets: list[Target]) -> str | None:
    """One sentence if two targets are the same folder of the same host, or share a report folder."""
    places: dict[tuple[object, ...], str] = {}
    for target in targets:
        for key in ((target.host, target.port, target.root), (target.folder(),)):
            if key in places:
                return f"{places[key]} and {target.name} are the same place: name each once"
            places[key] = target.name
    return None
