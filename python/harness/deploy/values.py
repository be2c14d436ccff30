"""What people type, as values that can neither become an option nor shell text.

Every value has one constructor, `parse`, which refuses what the grammar does not list. The grammars leave out
blanks, quotes, every character that a shell or ssh's own %-expansion reads, control characters, and a leading
dash. What is left is passed as one element of an argv list, after `--` where the program knows it; no text
ever goes through a local shell.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_COMPONENT = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+@-]*")
_PYTHON = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_.][A-Za-z0-9_.+-]*)*")
_ARCH = re.compile(r"[1-9][0-9]{1,2}[af]?(?:-real|-virtual)?")
_ALIAS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_LOCAL_FILE = re.compile(r"[A-Za-z0-9_./~+@%=:,-]+")


class Refused(ValueError):
    """A value outside its grammar. The message is one sentence that shows the value escaped."""


def _refuse(what: str, text: str, rule: str) -> Refused:
    shown = ascii(text if len(text) <= 80 else text[:77] + "...")
    return Refused(f"{what} {shown} is refused: {rule}")


@dataclass(frozen=True)
class SshHost:
    """`[user@]host`, host a name of ssh's configuration, a DNS name, an IPv4 address or an IPv6 address in
    brackets."""

    user: str | None
    host: str

    @classmethod
    def parse(cls, text: str) -> SshHost:
        """Refused for anything else: ports and ssh:// belong into the hosts file or ssh's own
        configuration."""
        rule = "expected [user@]host of letters, digits, '.', '_', '-', not beginning with '-', or [user@][IPv6]"
        user, at, host = text.rpartition("@")
        if (at and not _USER.fullmatch(user)) or len(text) > 255:
            raise _refuse("host", text, rule)
        if host.startswith("[") and host.endswith("]"):
            try:
                ipaddress.IPv6Address(host[1:-1])
            except ValueError:
                raise _refuse("host", text, rule) from None
            if "%" in host:
                raise _refuse("host", text, rule)
        elif not _HOST.fullmatch(host):
            raise _refuse("host", text, rule)
        return cls(user if at else None, host)

    def for_ssh(self) -> str:
        """The destination argument of ssh, which wants IPv6 addresses bare."""
        return (f"{self.user}@" if self.user else "") + self.host.strip("[]")

    def for_rsync(self, path: RemotePath, inside: str) -> str:
        """`[user@]host:path/inside`, which wants IPv6 addresses in brackets."""
        return (f"{self.user}@" if self.user else "") + f"{self.host}:{path.relative()}/{inside}"


@dataclass(frozen=True)
class RemotePath:
    """A folder on the other side: `/a/b` (two components at least) or `~/a`, normalised."""

    text: str

    @classmethod
    def parse(cls, text: str) -> RemotePath:
        """Refused for the file system's root, a home, '..', and names that a shell or a program would read
        otherwise."""
        rule = "expected ~/NAME or /NAME/NAME, of letters, digits, '.', '_', '-', '+', '@', without '.' and '..'"
        head, _, rest = text.partition("/")
        parts = rest.split("/")
        if len(text) > 200 or head not in ("", "~") or len(parts) < (1 if head else 2):
            raise _refuse("remote folder", text, rule)
        if any(part in (".", "..") or not _COMPONENT.fullmatch(part) for part in parts):
            raise _refuse("remote folder", text, rule)
        return cls(text)

    def relative(self) -> str:
        """As rsync and the remote script take it: a relative path is relative to the login folder, so that no
        shell has to expand '~'."""
        return self.text.removeprefix("~/")


@dataclass(frozen=True)
class PythonName:
    """An interpreter on the other side: a name to look for in PATH or an absolute path."""

    text: str

    @classmethod
    def parse(cls, text: str) -> PythonName:
        """Refused for relative paths, '..' and everything that a shell reads."""
        rule = "expected a name such as python3.12 or an absolute path, of letters, digits, '.', '_', '-', '+'"
        if len(text) > 200 or not _PYTHON.fullmatch(text) or ("/" in text and text[0] != "/"):
            raise _refuse("Python", text, rule)
        if any(part in (".", "..") for part in text.split("/")):
            raise _refuse("Python", text, rule)
        return cls(text)


@dataclass(frozen=True)
class CudaArch:
    """CUDA architectures as CMake writes them, separated by ';' (',' is taken too)."""

    text: str

    @classmethod
    def parse(cls, text: str) -> CudaArch:
        """Refused for what CMAKE_CUDA_ARCHITECTURES would not take."""
        parts = text.replace(",", ";").split(";")
        if text not in ("native", "all", "all-major") and not all(_ARCH.fullmatch(part) for part in parts):
            raise _refuse("architecture", text, "expected native, all, all-major, or a list such as 90;120a-real")
        return cls(";".join(parts))


@dataclass(frozen=True)
class LocalFile:
    """A file here whose name travels inside rsync's --rsh text, which rsync splits at blanks itself."""

    text: str

    @classmethod
    def parse(cls, text: str) -> LocalFile:
        """Refused for names that rsync would take apart."""
        if text.startswith("-") or not _LOCAL_FILE.fullmatch(text):
            raise _refuse("file", text, "its name must have no blanks, quotes or backslashes, and no leading '-'")
        return cls(text)


def alias(text: str) -> str:
    """A name in the hosts file, which also names a folder of reports."""
    if not _ALIAS.fullmatch(text):
        raise _refuse("alias", text, "expected letters, digits, '.', '_', '-', not beginning with '.' or '-'")
    return text


def whole(text: str, what: str, low: int, high: int) -> int:
    """A decimal number, bounds included."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or not low <= int(text) <= high:
        raise _refuse(what, text, f"expected a whole number from {low} to {high}")
    return int(text)


def phases(text: str) -> tuple[int, ...]:
    """`0,2`: distinct phases, ascending."""
    return tuple(sorted({whole(part, "phase", 0, 99) for part in text.split(",")}))
