"""This very repository, deployed to the loopback: built there, checked, measured, fetched."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import loopback
import pytest
from box import Box, Done

from harness.deploy import source

BEFORE_TESTS = ("connect", "send", "source", "release", "build", "install")
CHANGED = "cpp/ddtree/build.cpp"


def seconds(done: Done, *names: str) -> float:
    """What these stages took."""
    return float(sum(step["seconds"] for step in done.record["steps"] if step["name"] in names))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_deployed_twice_and_once_changed(server: loopback.Sshd, tmp_path: Path) -> None:
    """Catches a source list that does not build, a build that begins anew each time, a second deploy that does
    more than look, and results that do not come back. CPU only."""
    root = Path(__file__).parents[2]
    here = tmp_path / "source"
    for name in source.read(root).files:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, here / name)
    box = Box(server, here, tmp_path / "there" / "kdtree", options=["--cuda", "OFF"])

    first = box.deploy("--bench", "--phase", "1", timeout=1200)
    assert first.code == 0, first.err[-3000:]
    assert first.report is not None
    matrix = json.loads((first.report / "matrix.json").read_text())
    assert matrix["failed"] == 0 and matrix["passed"] >= 8
    assert {leg["decoder"] for leg in matrix["legs"] if leg["status"] == "PASS"} == {"plain", "ddtree"}
    assert len(json.loads((first.report / "bench.json").read_text())["benchmarks"]) > 0
    assert json.loads((first.report / "doctor.json").read_text())["native"]["path"].startswith(str(box.root))
    assert len(first.sent()) == len(source.read(here).files)

    began = time.monotonic()
    second = box.deploy(timeout=300)
    whole = time.monotonic() - began
    assert second.code == 0 and second.sent() == []
    before_tests = seconds(second, *BEFORE_TESTS)
    assert before_tests <= 5.0 and {"build", "install"}.isdisjoint(s["name"] for s in second.record["steps"])

    with open(here / CHANGED, "a") as f:
        f.write("\n// one changed file\n")
    third = box.deploy(timeout=600)
    assert third.code == 0 and third.sent() == [CHANGED]
    compiled = [line for line in third.err.splitlines() if "Building CXX object" in line]
    assert len(compiled) == 1 and "cpp/ddtree/" in compiled[0], compiled
    print(
        f"first: build {seconds(first, 'build'):.1f} s, install {seconds(first, 'install'):.1f} s, "
        f"before tests {seconds(first, *BEFORE_TESTS):.1f} s\n"
        f"unchanged: before tests {before_tests:.2f} s, whole {whole:.1f} s, "
        f"{second.record['sent']['bytes_sent']} bytes sent\n"
        f"one changed file: build {seconds(third, 'build'):.1f} s, install {seconds(third, 'install'):.1f} s, "
        f"before tests {seconds(third, *BEFORE_TESTS):.1f} s, {third.record['sent']['bytes_sent']} bytes sent"
    )
