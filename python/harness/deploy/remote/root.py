"""ROOT, the one folder on the other side: whose it is, its lock, and files that are whole or not there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import time
from typing import Any

from harness.deploy.remote.link import Failed

MARKER = ".kdtree-deploy"
MARKER_TEXT = "kdtree-deploy 1\n"
BUSY = 75  # exit code: another deploy holds the lock
RELEASE = re.compile(r"[0-9a-f]{16}")


def write_atomically(path: str, text: str) -> None:
    """The file is there whole or not at all, also after a power cut."""
    with open(path + ".new", "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".new", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: str) -> dict[str, Any] | None:
    """The object in a file, None where there is none."""
    try:
        with open(path) as f:
            value = json.load(f)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def real_folder(path: str) -> str:
    """Makes a folder. Refuses a link in its place: what is deleted in it must be ours."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if os.path.islink(path) or not os.path.isdir(path):
            raise Failed(1, f"{path} is not a folder") from None
    return path


def remove_tree(path: str) -> None:
    """Deletes a folder of ours. Links in it are removed, never followed."""
    shutil.rmtree(path)


def started(pid: object) -> str | None:
    """When a process was started, in the kernel's ticks: tells it from a later one with its number."""
    try:
        with open(f"/proc/{int(str(pid))}/stat") as f:
            return f.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError, ValueError):
        return None


class Root:
    """Ours by its marker, or new. Failed for a home, what holds one, another user's, and a stranger's folder."""

    def __init__(self, text: str) -> None:
        """text: absolute, or relative to the login folder."""
        path = os.path.realpath(os.path.join(os.getcwd(), text))
        homes = {os.path.realpath(os.path.expanduser("~")), os.path.realpath(os.getcwd())}
        if path.count("/") < 2 or any((home + "/").startswith(path + "/") for home in homes):
            raise Failed(1, f"{path} is no folder to deploy to: it is a home, or holds one")
        self.path = path
        self.lock_file = -1
        os.makedirs(path, exist_ok=True)
        if os.stat(path).st_uid != os.getuid():
            raise Failed(1, f"{path} belongs to another user")
        marker = self.at(MARKER)
        if os.path.islink(marker) or not os.path.isfile(marker):
            strangers = sorted(set(os.listdir(path)) - {MARKER + ".new"})
            if strangers:
                raise Failed(1, f"{path} holds {strangers[0]!r} but no {MARKER}: it is not ours to deploy to")
            write_atomically(marker, MARKER_TEXT)
        with open(marker) as f:
            if f.read(100) != MARKER_TEXT:
                raise Failed(1, f"{marker} is of another version")

    def at(self, *parts: str) -> str:
        """A path in ROOT."""
        return os.path.join(self.path, *parts)

    def lock(self, token: str, by: str) -> None:
        """Takes the lock. A holder with the same token is this deploy's own former connection: it is ended.
        Failed with BUSY where somebody else has it."""
        handle = os.open(self.at("lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        deadline = None
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = read_json(self.at("lock")) or {}
            if deadline is None:
                if holder.get("token") != token:
                    who = f"{holder.get('by', 'somebody')}, process {holder.get('pid', 'unknown')}"
                    since = holder.get("since", "some time")
                    raise Failed(BUSY, f"another deploy ({who}) holds {self.at('lock')} since {since}")
                if holder.get("start") and holder["start"] == started(holder.get("pid")):
                    os.kill(int(holder["pid"]), signal.SIGTERM)
                deadline = time.monotonic() + 20
            if time.monotonic() > deadline:
                raise Failed(BUSY, f"this deploy's former connection does not let go of {self.at('lock')}")
            time.sleep(0.1)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        state = {"token": token, "pid": os.getpid(), "start": started(os.getpid()), "since": since, "by": by}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(state).encode(), 0)
        self.lock_file = handle

    def current(self) -> str | None:
        """The digest that `current` points to, None where it points nowhere."""
        try:
            digest = os.path.basename(os.readlink(self.at("current")))
        except OSError:
            return None
        return digest if RELEASE.fullmatch(digest) else None

    def switch(self, digest: str) -> None:
        """Points `current` to a release, in one rename."""
        link = self.at("current.new")
        if os.path.lexists(link):
            os.unlink(link)
        os.symlink(os.path.join("releases", digest), link)
        os.replace(link, self.at("current"))

    def prune(self, digest: str, keep: int) -> int:
        """Keeps `keep` finished releases beside the current one and this one, and the build folders that they
        name. Only what has the name of a release is ever removed. Returns how many releases went."""
        current = self.current()
        fixed, others, removed = [], [], 0
        for name in os.listdir(self.at("releases")):
            path = self.at("releases", name)
            state = read_json(os.path.join(path, "release.json"))
            if name in (current, digest):
                fixed.append((state or {}, name))
            elif RELEASE.fullmatch(name) and state is not None:
                others.append((state, name))
            elif RELEASE.fullmatch(name) or name.startswith("removed-"):
                remove_tree(path)  # unfinished, or half removed
        others.sort(key=lambda entry: float(entry[0].get("finished") or 0), reverse=True)
        for _, name in others[keep:]:
            aside = self.at("releases", "removed-" + name)  # first out of sight whole, then deleted
            os.rename(self.at("releases", name), aside)
            remove_tree(aside)
            removed += 1
        for kind, key in (("build", "build"), ("build-env", "build_env"), ("packages", "packages_key")):
            used = {state.get(key) for state, _ in fixed + others[:keep]}
            folder = self.at(kind)
            if os.path.isdir(folder) and not os.path.islink(folder):
                for name in os.listdir(folder):
                    if RELEASE.fullmatch(name) and name not in used:
                        remove_tree(os.path.join(folder, name))
        return removed
