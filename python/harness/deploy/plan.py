"""A deploy before it happens: every argv, the request, the report folder. `--dry-run` prints exactly this."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from harness.deploy.hosts import Target
from harness.deploy.remote import BOOT, MODULES
from harness.deploy.source import Source
from harness.deploy.values import LocalFile

# What ssh is told whatever the user's configuration says: no questions, no forwarding, no unknown host, and an
# end to connections that nobody answers on. All else (aliases, jump hosts, keys, agent, known_hosts) is the user's.
SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "ControlPersist=no",
    "LogLevel=INFO",
)
MAX_RESULT_FILES = 50
MAX_RESULT_BYTES = 64 << 20


@dataclass(frozen=True)
class Options:
    """What is the same for every host of one run."""

    bench: bool = False
    tests: bool = False
    phases: tuple[int, ...] = ()
    keep: int = 3
    retries: int = 4
    ssh_config: LocalFile | None = None
    accept_new: bool = False
    reports: Path = Path("reports")
    date: str = ""
    token: str = ""
    by: str = ""


@dataclass(frozen=True)
class Plan:
    """One host, one source tree, one set of options.

    `sockets`: a private folder with a short name for ssh's control socket: a path over about 100 bytes fails,
    and looks like a refused login.
    """

    target: Target
    source: Source
    options: Options
    sockets: Path
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        target = self.target
        python = None if target.python is None else target.python.text
        digest = self.source.digest(python=python, **self.environment())
        object.__setattr__(self, "digest", digest)

    @property
    def report(self) -> Path:
        """reports/HOST/DATE."""
        return self.options.reports / self.target.folder() / self.options.date

    def environment(self) -> dict[str, str]:
        """What the build depends on besides its files."""
        environment = {"KDTREE_CUDA": self.target.cuda}
        if self.target.arch is not None:
            environment["CUDAARCHS"] = self.target.arch.text
        return environment

    def _ssh(self, role: str) -> list[str]:
        argv = ["ssh"]
        if self.options.ssh_config is not None:
            argv += ["-F", self.options.ssh_config.text]
        checking = "accept-new" if self.options.accept_new else "yes"
        control = (f"ControlMaster={role}", f"ControlPath={self.sockets}/%C")
        for option in (*SSH_OPTIONS, f"StrictHostKeyChecking={checking}", *control):
            argv += ["-o", option]
        if self.target.port is not None:
            argv += ["-p", str(self.target.port)]
        return argv

    def ssh_argv(self) -> list[str]:
        """The connection: runs the script on the other side, and carries rsync too."""
        python = "python3" if self.target.python is None else self.target.python.text
        command = shlex.join([python, "-I", "-c", BOOT])
        return [*self._ssh("yes"), "-T", "--", self.target.host.for_ssh(), command]

    def _rsync(self) -> list[str]:
        # rsync splits --rsh at blanks itself; no element of it has one (values.LocalFile, SSH_OPTIONS).
        return ["rsync", "--rsh", " ".join(self._ssh("no")), "--timeout=120", "--no-motd", "--from0", "--files-from=-"]

    def push_argv(self) -> list[str]:
        """The source tree to ROOT/source. File names come on standard input.

        By checksum and without times: a file that has not changed keeps its time there, one that has gets the
        time of its transfer, so that ninja is right whoever deployed before, from whichever clone.
        """
        return [
            *self._rsync(),
            "--checksum",
            "--perms",
            "--chmod=D0755,Fu=rwX,Fgo=rX",
            "--partial-dir=.rsync-partial",
            "--delay-updates",
            "--compress",
            "--stats",
            "--no-human-readable",
            "--out-format=%i %n",
            "--",
            f"{self.source.root}/",
            self.target.host.for_rsync(self.target.root, "source/"),
        ]

    def push_names(self) -> bytes:
        """The files, for push_argv's standard input."""
        return b"".join(path.encode() + b"\0" for path in self.source.files)

    def fetch_argv(self) -> list[str]:
        """The results into the report folder: plain files of limited size, and only those asked for."""
        inside = f"releases/{self.digest}/results/{self.options.date}/"
        return [
            *self._rsync(),
            "--no-links",
            "--no-devices",
            "--no-specials",
            "--chmod=D0755,F0644",
            f"--max-size={MAX_RESULT_BYTES}",
            "--compress",
            "--",
            self.target.host.for_rsync(self.target.root, inside),
            f"{self.report}/",
        ]

    def script(self) -> bytes:
        """The first line of the connection: the modules that run there."""
        folder = resources.files("harness.deploy.remote")
        modules = [
            (f"harness.deploy.remote.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES
        ]
        return json.dumps(modules).encode() + b"\n"

    def request(self) -> dict[str, Any]:
        """The second line of the connection."""
        options, target = self.options, self.target
        return {
            "root": target.root.relative(),
            "digest": self.digest,
            "date": options.date,
            "token": options.token,
            "by": options.by,
            "keep": options.keep,
            "bench": options.bench,
            "tests": options.tests,
            "phases": list(options.phases),
            "python": None if target.python is None else target.python.text,
            "python_floor": list(self.source.python_floor),
            "build_requires": list(self.source.build_requires),
            "environment": self.environment(),
            "source_bytes": self.source.size,
            "manifest": self.source.manifest(),
        }

    def lines(self) -> list[str]:
        """For --dry-run."""
        left_out = self.source.left_out
        request = {k: v for k, v in self.request().items() if k not in ("manifest", "token")}
        return [
            f"host      {self.target.name}: {self.target.host.for_ssh()}, folder {self.target.root.text}",
            f"source    {self.source.root}: {len(self.source.files)} files, {self.source.size} bytes",
            f"left out  {len(left_out)} files" + (": " + ", ".join(map(ascii, left_out[:20])) if left_out else ""),
            f"release   {self.target.root.text}/releases/{self.digest}",
            f"reports   {self.report}",
            f"connect   {shlex.join(self.ssh_argv())}",
            f"send      {shlex.join(self.push_argv())}",
            f"fetch     {shlex.join(self.fetch_argv())}",
            f"request   {json.dumps(request, sort_keys=True)}",
        ]
