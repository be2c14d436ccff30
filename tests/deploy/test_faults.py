"""Deploys that go wrong. After each the previous release works, the lock is free, and a plain deploy mends it."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import loopback
import mini
import pytest
from box import Box
from proxy import Proxy


def survived(box: Box, old: int) -> None:
    """The release from before is in use and works; then a plain deploy brings the new one."""
    assert box.current() == old
    box.recovers()


def lines_with(text: str, words: str) -> list[str]:
    return [line for line in text.splitlines() if words in line]


# ---------------------------------------------------------------------------------------------- connection


@pytest.mark.parametrize("gate", ["build", "golden", "matrix"])
def test_connection_cut_in_a_stage(box: Box, gate: str) -> None:
    """Catches a stage that goes on without anybody, a lock that stays, and a release that is half there."""
    old = box.answer
    box.new_answer()
    box.hold(gate)
    process = box.start()
    box.reached(gate, process)
    assert box.server.cut() > 0
    done = box.finish(process)
    assert done.code == 255 and f"(stage {gate})" in done.err
    assert done.record["code"] == 255 and done.record["attempts"] == 1
    box.release(gate)
    survived(box, old)


def test_a_cut_connection_is_taken_up_again(box: Box) -> None:
    """Catches a deploy that gives up at the first cut though more tries were allowed, and one that begins anew:
    the sources were there already."""
    answer = box.new_answer()
    box.hold("build")
    process = box.start("--retries", "3")
    box.reached("build", process)
    box.server.cut()
    box.reached("build", process)
    box.server.cut()
    box.release("build")
    done = box.finish(process)
    assert done.code == 0, done.err
    assert done.record["attempts"] == 3 and done.sent() == []
    assert box.current() == answer
    box.answer = answer


def test_connection_cut_anywhere(box: Box, tmp_path: Path) -> None:
    """Catches a byte of the conversation after which a cut leaves no usable release: key exchange, request,
    every part of the transfer, every later stage, the last events."""
    big = box.source / "tests" / "data.txt"
    big.parent.mkdir(exist_ok=True)

    def change() -> None:  # enough that most of the conversation is the transfer, and a release to build
        big.write_text(random.Random(box.answer).randbytes(150_000).hex())
        box.new_answer()

    old = box.answer
    with Proxy(box.server.port) as proxy:
        config = tmp_path / "config"
        config.write_text(re.sub(r"Port \d+", f"Port {proxy.port}", box.server.config.read_text()))
        change()
        done = box.deploy("--ssh-config", str(config))
        assert done.code == 0
        old = box.answer = box.current()
        total, failures = proxy.passed, 0
        points = [0, 1000, 4000, total // 4, total // 2, *(total - k for k in (12000, 6000, 3000, 1500, 500))]
        for point in points:
            change()
            proxy.cut_after(point)
            done = box.deploy("--ssh-config", str(config))
            assert done.code in (0, 255), done.err
            failures += done.code == 255
            now = box.current()
            assert now in (old, mini.answer_of(box.source))
            assert now == old or (box.root / "current/release.json").exists()
            old = box.answer = now
        assert failures >= 7
    big.unlink()
    box.recovers()


def test_no_answer_at_all(box: Box, tmp_path: Path) -> None:
    """Catches a refused connection that is not tried again, and one that is tried for ever."""
    config = tmp_path / "config"
    config.write_text(re.sub(r"Port \d+", f"Port {loopback.free_port()}", box.server.config.read_text()))
    done = box.deploy("--ssh-config", str(config), "--retries", "1")
    assert done.code == 255 and "Connection refused" in done.err
    assert done.record["attempts"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted(box: Box, number: int) -> None:
    """Catches an end that leaves a build running on the other side, or its lock."""
    old = box.answer
    box.new_answer()
    box.hold("build")
    process = box.start()
    box.reached("build", process)
    process.send_signal(number)
    done = box.finish(process, timeout=30)
    assert done.code == 128 + number and done.record["code"] == 130
    assert box.server.process is not None
    assert list(loopback.descendants(box.server.process.pid)) == []
    box.release("build")
    survived(box, old)


def test_two_deploys_at_once(box: Box) -> None:
    """Catches two deploys that write to one folder: the second must be told who is there, and break nothing."""
    answer = box.new_answer()
    box.hold("build")
    first = box.start()
    box.reached("build", first)
    second = box.deploy("--retries", "2")
    assert second.code == 75 and second.record["attempts"] == 1
    assert "another deploy" in second.err and "process" in second.err
    box.release("build")
    assert box.finish(first).code == 0
    assert box.current() == answer
    box.answer = answer


# ---------------------------------------------------------------------------------------------- identity


def test_wrong_host_key(box: Box, tmp_path: Path) -> None:
    """Catches a deploy to whoever answers: another key is refused at once, with its fingerprint, whatever is
    said about new hosts."""
    impostor = loopback.Sshd(tmp_path / "impostor", keys=box.server.folder).start()
    try:
        config = tmp_path / "config"
        config.write_text(re.sub(r"Port \d+", f"Port {impostor.port}", box.server.config.read_text()))
        for options in ((), ("--accept-new-host-key",)):
            done = box.deploy("--ssh-config", str(config), "--retries", "3", *options)
            assert done.code == 255 and done.record["attempts"] == 1, done.err
            assert "HOST IDENTIFICATION HAS CHANGED" in done.err and "SHA256:" in done.record["error"]
    finally:
        impostor.stop()


def test_unknown_host_key(box: Box, tmp_path: Path) -> None:
    """Catches a first connection that trusts without being told to."""
    known = tmp_path / "known_hosts"
    config = tmp_path / "config"
    config.write_text(
        re.sub(r"(?m)UserKnownHostsFile .*$", f"UserKnownHostsFile {known}", box.server.config.read_text())
    )
    done = box.deploy("--ssh-config", str(config), "--retries", "3")
    assert done.code == 255 and done.record["attempts"] == 1 and "Host key verification failed" in done.err
    assert not known.exists()
    done = box.deploy("--ssh-config", str(config), "--accept-new-host-key")
    assert done.code == 0 and known.exists()


def test_refused_key(box: Box, tmp_path: Path) -> None:
    """Catches a refused login that is tried again, which locks people out."""
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    config = tmp_path / "config"
    config.write_text(re.sub(r"(?m)IdentityFile .*$", f"IdentityFile {other}", box.server.config.read_text()))
    done = box.deploy("--ssh-config", str(config), "--retries", "3")
    assert done.code == 255 and done.record["attempts"] == 1 and "Permission denied" in done.err


# ---------------------------------------------------------------------------------------------- the other side


def another(box: Box, folder: Path, programs: dict[str, str | Path], system: bool) -> loopback.Sshd:
    """A server of the same box, with other programs first in PATH (or alone there)."""
    tools = folder / "tools"
    tools.mkdir()
    for name, program in programs.items():
        if isinstance(program, Path):
            (tools / name).symlink_to(program)
        else:
            (tools / name).write_text(program)
            (tools / name).chmod(0o755)
    return loopback.Sshd(folder / "sshd", path=f"{tools}:/usr/bin:/bin" if system else str(tools)).start()


def fake_python(version: str) -> str:
    """A python3 of another version, in all that asks it in the language."""
    numbers = (*map(int, version.split(".")), "final", 0)
    prelude = f"import sys; sys.version_info = {numbers!r}; sys.version = '{version} (default) [GCC 8.3.0]'"
    return f'#!/bin/bash\nexec {loopback.base_python()} -I -c "{prelude}; exec(sys.argv[1])" "$3"\n'


def test_no_rsync_there(box: Box, tmp_path: Path) -> None:
    """Catches a traceback, or a wait for ever, where rsync is missing on the other side."""
    server = another(box, tmp_path, {"python3": loopback.base_python()}, system=False)
    try:
        done = box.deploy(server=server)
        assert done.code == 1 and "apt-get install rsync" in done.record["error"]
    finally:
        server.stop()
    box.recovers()


def test_old_rsync_there(box: Box, tmp_path: Path) -> None:
    """Catches an rsync that gives its arguments to a shell there."""
    old = "#!/bin/sh\necho 'rsync  version 3.1.3  protocol version 31'\n"
    server = another(box, tmp_path, {"python3": loopback.base_python(), "rsync": old}, system=False)
    try:
        done = box.deploy(server=server)
        assert done.code == 1 and "3.1.3" in done.record["error"] and "3.2.4 or later" in done.record["error"]
    finally:
        server.stop()
    box.recovers()


def test_python_there_is_too_old(box: Box, tmp_path: Path) -> None:
    """Catches a syntax error of ours as the answer to an old Python, and a newer one beside it that is not
    found."""
    old = box.answer
    box.new_answer()
    rsync = Path(str(shutil.which("rsync")))
    for version, words in (("3.6.9", "python3 there is Python 3.6.9"), ("3.9.2", "python3 is Python 3.9.2")):
        folder = tmp_path / version
        folder.mkdir()
        server = another(box, folder, {"python3": fake_python(version), "rsync": rsync}, system=False)
        try:
            done = box.deploy(server=server)
            assert done.code == 1 and words in done.record["error"], done.err
            assert "Traceback" not in done.err
        finally:
            server.stop()
    assert box.current() == old
    newer = f"python3.{sys.version_info.minor}"
    folder = tmp_path / "both"
    folder.mkdir()
    server = another(box, folder, {"python3": fake_python("3.9.2"), newer: loopback.base_python()}, system=True)
    try:
        done = box.deploy(server=server)
        assert done.code == 0, done.err
    finally:
        server.stop()
    box.recovers()


def test_no_python_there(box: Box, tmp_path: Path) -> None:
    """Catches an interpreter that is missing and looks like a failed connection."""
    done = box.deploy("--python", "/opt/there/is/no/python3", "--retries", "2")
    assert done.code == 127 and done.record["attempts"] == 1 and "--python" in done.record["error"]


def test_a_login_shell_that_talks(box: Box) -> None:
    """Catches a .bashrc that prints, which breaks rsync, and is nobody's guess."""
    rc = box.server.home / ".bashrc"
    rc.write_text("echo Welcome to the box\n")
    try:
        done = box.deploy("--retries", "2")
        if done.code == 0:
            pytest.skip("the login shell here reads no .bashrc")
        assert done.record["attempts"] == 1 and "does the login shell there print something" in done.record["error"]
        assert "Welcome to the box" in done.err
    finally:
        rc.unlink()
    box.recovers()


def test_build_fails_there(box: Box) -> None:
    """Catches a failed build that counts as a deploy, or that takes the previous release along."""
    old = box.answer
    box.new_answer()
    path = box.source / "cpp/two.c"
    text = path.read_text()
    path.write_text(text + "int broken(void) { return undeclared; }\n")
    done = box.deploy("--retries", "3")
    assert done.code == 1 and done.record["attempts"] == 1
    assert "the build failed with exit code 1" in done.record["error"] and "undeclared" in done.err
    assert [s["name"] for s in done.record["steps"] if s["code"]] == ["build"]
    assert not (box.root / "releases" / done.record["digest"]).exists()
    path.write_text(text)
    survived(box, old)


def test_a_failing_check_is_not_switched_to(box: Box) -> None:
    """Catches a release that fails its matrix and is in use all the same, and its results that are lost."""
    old = box.answer
    mini.set_answer(box.source, -1)
    done = box.deploy()
    assert done.code == 1 and done.record["error"] == "matrix failed with exit code 1"
    assert done.report is not None
    assert json.loads((done.report / "matrix.json").read_text())["failed"] == 1
    assert "FAILED (1)" not in done.out.splitlines()[0] and "1 failed" in done.out
    assert box.current() == old
    box.new_answer()
    survived(box, old)


def test_a_source_that_changes_meanwhile(box: Box) -> None:
    """Catches a release under the name of other files: one changes between hashing and sending."""
    old = box.answer
    answer = box.new_answer()
    command = box.argv()
    code = (
        "import sys, harness.deploy.__main__ as m, harness.deploy.session as s\n"
        "send = s.rsync\n"
        f"path = {str(box.source / 'python/kdtree_engine/__init__.py')!r}\n"
        "def late(*a): open(path, 'a').write('# later\\n'); return send(*a)\n"
        "s.rsync = late\n"
        "sys.exit(m.main(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *command[3:]], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "not as announced" in done.stderr
    mini.set_answer(box.source, answer)
    survived(box, old)


# ---------------------------------------------------------------------------------------------- places


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_full(box: Box, small_disk: Path) -> None:
    """Catches a full disk that ends in a half release, in no sentence, or in a disk that stays full. It is full
    at the first byte, in the transfer, for the announced size of a release, and in the build or after it."""
    there = Box(box.server, box.source, small_disk / "a" / "kdtree")
    big = box.source / "tests" / "data.txt"
    big.parent.mkdir(exist_ok=True)
    there.answer = mini.answer_of(there.source)
    there.recovers()
    stages = []
    for left, more, believe in (
        (0, True, True),
        (400, True, True),
        (60, False, True),
        (8, False, False),
    ):
        there.new_answer()
        if more:
            big.write_text(random.Random(left).randbytes(600_000).hex())
        state = there.root / "current/release.json"
        if not believe:  # as if releases took no space: the disk is then full in the middle of one
            state.write_text(json.dumps(json.loads(state.read_text()) | {"bytes": 1}))
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - (left << 10)))
        done = there.deploy("--retries", "3")
        assert done.code not in (0, 255) and done.record["attempts"] == 1, done.err
        assert re.search("disk is full|No space left|are free", done.record["error"]), done.record
        stages.append(next((s["name"] for s in done.record["steps"] if s["code"]), "send"))
        assert there.current() == there.answer
        assert not (there.root / "releases" / done.record["digest"] / "release.json").exists()
        ballast.unlink()
        there.recovers()
    assert len(set(stages)) >= 3, stages
    big.unlink()
    box.recovers()


def test_folders_that_are_not_ours(box: Box, tmp_path: Path) -> None:
    """Catches anything written or deleted in a stranger's folder, a home, or through a link."""
    stranger = tmp_path / "stranger"
    (stranger / "source").mkdir(parents=True)
    (stranger / "source" / "thesis.txt").write_text("years of work")
    home = box.server.home
    (home / "notes").touch()
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / ".kdtree-deploy").write_text("kdtree-deploy 1\n")
    (linked / "source").symlink_to(stranger / "source")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / ".kdtree-deploy").write_text("kdtree-deploy 2\n")
    for root, words in (
        (stranger, "not ours"),
        (home, "a home"),
        (home.parent, "a home"),
        (linked, "is not a folder"),
        (newer, "another version"),
    ):
        done = box.deploy("--root", str(root))
        assert done.code == 1 and words in done.record["error"], done.err
    assert (stranger / "source" / "thesis.txt").read_text() == "years of work"
    assert sorted(p.name for p in stranger.rglob("*")) == ["source", "thesis.txt"]
    assert (home / "notes").exists() and not (home / ".kdtree-deploy").exists()


def test_half_a_release_is_never_used(box: Box) -> None:
    """Catches an unfinished folder under the release's own name that counts as built, and unfinished ones of
    others that stay for ever."""
    box.new_answer()
    plan = box.deploy("--dry-run").out
    match = re.search(r"releases/([0-9a-f]{16})", plan)
    assert match is not None
    for name in (match[1], "0123456789abcdef", "removed-0123456789abcdef"):
        (box.root / "releases" / name / "venv").mkdir(parents=True)
    done = box.recovers()
    assert "built anew" in done.err
    names = {p.name for p in (box.root / "releases").iterdir()}
    assert match[1] in names and not any("0123456789abcdef" in name for name in names)
    assert time.time() - json.loads((box.root / "current/release.json").read_text())["finished"] < 600
