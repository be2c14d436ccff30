"""Traces of rounds, and the pictures that harness.report makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from draft_models import PATH, TABLE, Watched, build_pair, pair, watch
from models import prompt
from runs import open_session

from harness.report.rounds import TraceError, read_trace
from harness.report.tree import drawing, overview, page, rows_of
from kdtree_engine import _native
from kdtree_engine.trace import TraceWriter


@pytest.fixture(scope="module")
def seen() -> Watched:
    p = pair("plain")
    plain = open_session(p.engine)
    plain.append(prompt(p.vocab, 70, seed=11))
    plain.begin(60)
    while plain.step().finished is None:
        pass
    session = open_session(p.engine)
    session.append(prompt(p.vocab, 70, seed=11))
    planted = _native.PlantedDrafter(plain.tokens, p.vocab, 5, as_paths=True)
    return watch(session, 60, drafter=_native.CombinedDrafter([_native.DFlashDrafter(), planted]), budget=20)


def write(path: Path, rounds: list[dict[str, Any]]) -> Path:
    with TraceWriter(path) as writer:
        for r in rounds:
            writer.write(r)
    return path


def test_a_trace_tells_the_generation(seen: Watched) -> None:
    """Catches a trace of another tree than was verified: the tokens of the text follow from the rounds alone."""
    tokens = seen.session.tokens
    at = 70
    for r in seen.rounds:
        assert r["position"] == at and r["tokens"][0] == tokens[at]
        assert tokens[at + 1 : at + 1 + len(r["emitted"])] == r["emitted"]
        assert r["path"][0] == 0 and len(r["path"]) == len(r["emitted"]) and max(r["path"]) <= r["nodes"]
        for before, row, token in zip(r["path"], r["path"][1:], r["emitted"], strict=False):
            assert r["parents"][row] == before and r["tokens"][row] == token
            assert r["depths"][row] == r["depths"][before] + 1
        at += len(r["emitted"])
        assert r["asked"] == TABLE | PATH and r["calibrated"] is None and r["rate"] == 0
        probabilities = r["probabilities"]
        assert probabilities == sorted(probabilities, reverse=True) and probabilities[0] == 1
        assert all(s > 0 for s in r["sources"][1:]) and r["sources"][0] == 0
        assert set(r["seconds"]) == {"draft_table", "draft_paths", "build", "verify", "accept", "commit"}
        assert r["seconds"]["verify"] > 0 and r["seconds"]["draft_table"] > 0
    assert at == len(tokens) - 1 and len(seen.rounds) == seen.session.stats["rounds"]


def test_an_automatic_budget_tells_what_it_reckoned_with() -> None:
    p = pair("plain")
    session = open_session(build_pair(p.target, p.draft))  # an engine whose costs nobody knows yet
    session.append(prompt(p.vocab, 70, seed=11))
    rounds = watch(session, 12, drafter=_native.DFlashDrafter(), budget=-1).rounds
    assert rounds[0]["asked"] == 0 and rounds[0]["nodes"] == 0  # the plain round, of which the rest is measured
    assert all(r["rate"] > 0 and len(r["calibrated"]) == len(r["tokens"]) for r in rounds[1:])


def test_no_trace_without_asking() -> None:
    p = pair("plain")
    session = open_session(p.engine)
    session.append([1, 2, 3])
    session.begin(3)
    while session.step().finished is None:
        assert session.trace is None


def test_lines_come_back_as_rounds(seen: Watched, tmp_path: Path) -> None:
    """Catches a field that the writer and the reader call by different names, and values that JSON does not know."""
    path = write(tmp_path / "t.jsonl", [*seen.rounds, seen.rounds[0] | {"rate": float("inf")}])
    rounds = read_trace(path)
    assert json.loads(path.read_text().splitlines()[-1])["rate"] is None
    for i, (r, raw) in enumerate(zip(rounds, seen.rounds, strict=False)):
        assert r.number == i and r.tokens == raw["tokens"] and r.path == raw["path"] and r.nodes == raw["nodes"]
        assert r.text == [str(t) for t in raw["tokens"]]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is no object"),
        ("{}", "tokens"),
        ({"parents": [0]}, "parents"),
        ({"parents": [-1, 1]}, "parent"),
        ({"nodes": 2}, "2 nodes"),
        ({"path": [5]}, "path"),
        ({"probabilities": [1.0]}, "probabilities"),
        ({"probabilities": [1.0, float("nan")]}, "probability is nan"),
        ({"sources": [0, 7]}, "sources"),
        ({"emitted": [float("inf")]}, "emitted is inf"),
        ({"nodes": True}, "nodes is True"),
        ({"tokens": "12"}, "tokens is no list"),
        ({"seconds": [0.1]}, "seconds is no object"),
        ({"seconds": {"verify": "long"}}, "seconds.verify is 'long'"),
        ({"text": ["a"]}, "text has 1 entries for 2 tokens"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_that_is_no_round_is_named(tmp_path: Path, line: Any, word: str) -> None:
    """Catches a report that draws nonsense, or ends in a traceback."""
    good: dict[str, Any] = dict(
        round=0, position=3, tokens=[1, 2], parents=[-1, 0], depths=[0, 1], sources=[0, 1], probabilities=[1.0, 0.5],
        nodes=1, path=[0], emitted=[7], seconds={"verify": 0.1},
    )  # fmt: skip
    text = line if isinstance(line, str) else json.dumps(good | line)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + text + "\n")
    with pytest.raises(TraceError, match=word):
        read_trace(path)


def test_pictures(seen: Watched, tmp_path: Path) -> None:
    """Catches markup that browsers refuse (control characters of a token's text), a node that is not drawn, an accepted
    node that does not look accepted, and nodes that cover each other."""
    hostile = [chr(i % 32) + "<&\"'\u2028" for i in range(21)]
    rounds = read_trace(write(tmp_path / "t.jsonl", [r | {"text": hostile[: len(r["tokens"])]} for r in seen.rounds]))
    for r in rounds:
        svg = ElementTree.fromstring(drawing(r))
        boxes = svg.findall(".//{*}rect")
        assert len(boxes) == len(r.tokens)
        assert sum(b.get("fill") == "#bfe5c3" for b in boxes) == len(r.path)
        assert len({(b.get("x"), b.get("y")) for b in boxes}) == len(boxes)
        assert sum(b.get("stroke-dasharray") is not None for b in boxes) == len(r.tokens) - 1 - r.nodes
        height = rows_of(r)
        assert len({(h, d) for h, d in zip(height, r.depths, strict=True)}) == len(height)
    ElementTree.fromstring(overview(rounds))
    text = page(rounds, "a <trace>")
    assert "a &lt;trace&gt;" in text and text.count("<h2") == len(rounds)


def test_the_command(seen: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", seen.rounds)

    def report(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "harness.report", "tree", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = report(str(path))
    assert done.returncode == 0 and (tmp_path / "t.html").read_text().count("<h2") == len(seen.rounds), done.stderr
    done = report(str(path), "--rounds", "1-2", "--out", str(tmp_path / "few.html"))
    assert done.returncode == 0
    assert re.findall(r'id="round-(\d+)"', (tmp_path / "few.html").read_text()) == ["1", "2"]
    binary, empty, before = tmp_path / "binary", tmp_path / "empty.jsonl", path.read_bytes()
    binary.write_bytes(b"{\xff")
    empty.touch()
    for arguments, code, words in (
        ((str(tmp_path / "none.jsonl"),), 1, "none.jsonl"),
        ((str(path), "--rounds", "90-99"), 1, "--rounds is 90-99"),
        ((str(path), "--rounds", "few"), 2, "--rounds"),
        ((str(path), "--rounds", "2-1"), 2, "--rounds is '2-1'"),
        ((str(path), "--out", str(path)), 2, "is the trace itself"),
        ((str(tmp_path),), 1, "Is a directory"),
        ((str(binary),), 1, "not valid UTF-8 at byte 1"),
        ((str(empty),), 1, "empty.jsonl is empty"),
    ):
        failed = report(*arguments)
        assert failed.returncode == code and words in failed.stderr and "Traceback" not in failed.stderr
    assert path.read_bytes() == before
