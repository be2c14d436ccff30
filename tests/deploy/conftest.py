"""One server and one box for all deploys of this folder; what a test breaks on the box it must also mend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import loopback
import mini
import pytest
from box import Box


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[loopback.Sshd]:
    """A running sshd."""
    if reason := loopback.missing():
        if os.environ.get("CI") and os.getuid() == 0:
            pytest.fail(reason)  # scripts/test installs it there
        pytest.skip(reason)
    with_keys = loopback.Sshd(tmp_path_factory.mktemp("server") / "sshd").start()
    yield with_keys
    with_keys.stop()


@pytest.fixture(scope="session")
def deployed(server: loopback.Sshd, tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A box with one finished release."""
    folder = tmp_path_factory.mktemp("box")
    box = Box(server, mini.write(folder / "source"), folder / "there" / "kdtree")
    box.recovers()
    return box


@pytest.fixture
def box(deployed: Box) -> Iterator[Box]:
    """The same box; afterwards no gate is left and its release works."""
    before = deployed.answer
    yield deployed
    for gate in deployed.server.gates.iterdir():
        gate.unlink()
    assert deployed.current() >= before


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ssh and rsync of this PATH only write down that they were called: a file that must stay empty."""
    calls = tmp_path / "calls"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("ssh", "rsync", "sh", "bash"):
        script = programs / name
        script.write_text(f'#!/bin/bash\necho "$0" "$@" >> {calls}\nexit 1\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    calls.touch()
    return calls
