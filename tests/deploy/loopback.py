"""A real sshd on the loopback, with its own keys, configuration and environment; and cuts in its connections."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SSHD = next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if os.path.exists(p)), None)


def missing() -> str | None:
    """Why there can be no loopback deploy on this machine, None where there can."""
    if SSHD is None:
        return "there is no sshd; Debian and Ubuntu: apt-get install openssh-server"
    for program in ("ssh", "ssh-keygen", "rsync"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    return None


def base_python() -> Path:
    """The interpreter outside of any virtual environment: the 'system Python' of the other side."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in (version, "python3"):
        path = Path(sys.base_prefix) / "bin" / name
        if path.exists():
            return path
    return Path(sys.executable)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _die_with_parent() -> None:
    """Linux: no server outlives tests that are killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Sshd:
    """One server. `config`: the client's configuration, for ssh -F; its alias is `box`."""

    def __init__(self, folder: Path, path: str | None = None, keys: Path | None = None) -> None:
        """path: PATH of those who log in. keys: a folder of another Sshd, whose user key and port this one takes
        over with a host key of its own: an impostor."""
        folder.mkdir()
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        for name in ("host", "user"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
        user = keys or folder
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_")) or k.lower().endswith("_proxy")}
        environment = {
            **kept,
            "HOME": str(self.home),
            "PATH": path or f"{base_python().parent}:/usr/local/bin:/usr/bin:/bin",
            "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"),
            "KDT_GATES": str(self.gates),
            "LANG": "C.UTF-8",
        }
        self.gates.mkdir()
        quoted = " ".join(f'"{k}={v}"' for k, v in environment.items())
        (folder / "sshd_config").write_text(
            f"""ListenAddress 127.0.0.1
ListenAddress ::1
HostKey {folder}/host
AuthorizedKeysFile {user}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
SetEnv {quoted}
"""
        )
        self.known_hosts = folder / "known_hosts"
        self.config = folder / "ssh_config"
        self.write_client(self.port)

    @property
    def gates(self) -> Path:
        """Where the miniature package looks for gates: it waits while one of its name is there."""
        return self.folder / "gates"

    def write_client(self, port: int) -> None:
        """The client's configuration, to this server or to a proxy before it."""
        kind, key = (self.folder / "host.pub").read_text().split()[:2]
        self.known_hosts.write_text(f"box {kind} {key}\n")
        self.config.write_text(
            f"""Host box
    HostName 127.0.0.1
    HostKeyAlias box
    Port {port}
    User {getpass.getuser()}
    IdentityFile {self.folder}/user
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {self.known_hosts}
    GlobalKnownHostsFile /dev/null
"""
        )

    def start(self) -> Sshd:
        """Serves until `stop`."""
        assert SSHD is not None
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation wants it
        log = open(self.folder / "sshd.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config"), "-p", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        log.close()
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "sshd.log").read_text()) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """Ends the server and its connections."""
        if self.process is not None:
            self.cut()
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def cut(self) -> int:
        """Ends every connection at once, as an unplugged cable would. Returns how many there were."""
        assert self.process is not None
        count = 0
        for pid in descendants(self.process.pid):
            if Path(f"/proc/{pid}/comm").read_text().strip().startswith("sshd"):
                try:
                    os.kill(pid, signal.SIGKILL)
                    count += 1
                except ProcessLookupError:
                    pass
        return count


def descendants(pid: int) -> Iterator[int]:
    """Children, and theirs, of a process that we started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)
