"""kdtree bench: formats, what it refuses, and the roofline that no figure may break."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from command import assert_refused, kdtree

from kdtree_engine.benchmark import COLD, TOLERANCE, Footprint, Roofline, Runner, Workload
from kdtree_engine.engine import Engine
from kdtree_engine.errors import EngineError

SMALL = ("-p", "8", "-n", "6", "-r", "2")


def test_formats_hold_the_same_tests(bundle: Path) -> None:
    """Catches a format that cannot be parsed, drops a test or a field, or mixes up rows."""
    names = ["pp8 @ d12", "tg6 @ d12", "tg6 @ d12", "tg6 @ d12"]
    many = (*SMALL, "--budget", "4,auto")
    table = kdtree("bench", bundle, *many)
    assert table.code == 0 and table.err == "", table
    rows = [line.strip("| ").split("|") for line in table.out.splitlines() if line.startswith("| tiny")]
    assert [row[6].strip() for row in rows] == names
    assert [row[5].strip() for row in rows] == ["plain", "plain", "ngram, 4", "ngram, auto"]
    assert {line.count("|") for line in table.out.splitlines() if line.startswith("|")} == {12}
    whole = kdtree("bench", bundle, *many, "-o", "json").json
    lines = [json.loads(line) for line in kdtree("bench", bundle, *many, "-o", "jsonl").out.splitlines()]
    cells = list(csv.DictReader(io.StringIO(kdtree("bench", bundle, *many, "-o", "csv").out)))
    for found in (whole["results"], lines, cells):
        assert [row["test"] for row in found] == names
        assert [str(row["budget"]) for row in found] == ["0", "0", "4", "auto"]
    assert whole["schema"] == lines[0]["schema"] == cells[0]["schema"] == "kdtree-bench/1"
    assert set(whole["results"][0]) < set(lines[0])
    for row in whole["results"]:
        assert len(row["seconds"]) == 2 and row["tokens_per_second"]["mean"] > 0
        assert row["cache"] in ("in cache", "unknown") and row["percent_of_read"] is None  # a tiny model
    prompt, plain, tree = whole["results"][:3]
    assert prompt["accepted_length"] is None and plain["accepted_length"] == 1.0 and plain["forwards"] == 6
    assert sum(tree["accepted_lengths"]) == 6 and plain["bytes_are"] == "exact"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-p", "0", "-n", "0"), ("--n-prompt", "nothing")),
        (("-p", "five"), ("--n-prompt", "'five'")),
        (("-n", "-1"), ("--n-gen",)),
        (("-d", "1,,2"), ("--n-depth",)),
        (("-r", "0"), ("--repetitions",)),
        (("--budget", "4,65"), ("--budget", "65")),
        (("--drafter", "magic"), ("--drafter", "magic")),
        (("-o", "xml"), ("--format", "xml")),
    ],
)
def test_bad_options(bundle: Path, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Catches a wrong option that is not told before a model is loaded."""
    assert_refused(kdtree("bench", bundle, *options), *words, code=2)


def test_refused_before_anything_is_printed(bundle: Path, tmp_path: Path) -> None:
    """Catches a table that begins and then fails: too long for the model, no model, an empty prompt."""
    assert_refused(kdtree("bench", bundle, "-p", "200000"), "pp200000", "positions")
    assert_refused(kdtree("bench", tmp_path / "none.kdtr"), "none.kdtr")
    assert_refused(kdtree("bench", bundle, "--prompt-file", "-", stdin=""), "--prompt-file")
    assert_refused(kdtree("bench", bundle, *SMALL, "--drafter", "replay"), "no recorded drafts")


def roofline(rates: list[float], cache: int) -> Roofline:
    """Measures these rates, one after another, then the last one."""
    left = list(rates)
    return Roofline(lambda size, passes: left.pop(0) if len(left) > 1 else left[0], cache, 1 << 20)


def test_an_impossible_rate_is_an_error() -> None:
    """Catches a clock or a count of bytes that is wrong: no working set far beyond the cache is read faster than the
    memory gives."""
    line = roofline([50e9], cache=1000)
    seen = line.measure()
    large = 1000.0 * 1000
    assert line.check("tg128", large, 50e9, seen) == 50e9
    with pytest.raises(EngineError, match=r"tg128: 60\.0 GB/s is more than this device reads \(50\.0 GB/s"):
        line.check("tg128", large, 60e9, seen)
    assert line.limit(large, seen) == pytest.approx(50e9 * (1 + TOLERANCE) * 1.001)


def test_a_busy_yardstick_is_measured_again() -> None:
    """Catches a machine that was busy while the memory was measured and idle afterwards: that is no error."""
    line = roofline([20e9, 50e9], cache=1000)
    assert line.check("tg128", 1e6, 48e9, line.measure()) == 50e9


def test_in_cache_is_no_error_and_no_figure_of_the_memory() -> None:
    """Catches a working set that fits the cache and is judged by the memory."""
    line = roofline([50e9], cache=1000)
    assert line.state(COLD * 1000) == "in cache" and line.state(COLD * 1000 + 1) == "cold"
    assert line.check("tg8", 1000, 500e9, line.measure()) == 50e9
    assert roofline([1.0], cache=0).state(1e12) == "unknown"


def test_the_runner_stops_at_an_impossible_result(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a runner that does not ask the roofline: at 1 byte/s every test is too fast."""
    runner = Runner(Engine.load(bundle, device="cpu"), repetitions=1)
    monkeypatch.setattr(runner, "roofline", roofline([1.0], cache=1))
    with pytest.raises(EngineError, match="more than this device reads"):
        list(runner.run([Workload("tg", 4)]))


def test_bytes_of_a_forward(bundle: Path) -> None:
    """Catches matrices that are left out of the count, or read twice: against the shapes of the model."""
    engine = Engine.load(bundle, device="cpu")
    f = Footprint.of(engine)
    whole = f.dense + f.head + f.embed_row * engine.vocab_size + f.experts * f.expert
    assert 0 <= engine.weight_bytes - whole < 0.05 * whole  # layouts pad rows; nothing else is on the device
    assert f.position == 3 * (32 + 16) * 4 and (f.experts, f.top_k, f.moe_layers) == (8, 3, 2)
    assert f.expert == 2 * 3 * 64 * 32 * 4
    assert f.least(1, 10) == f.dense + f.head + f.embed_row + 3 * f.expert + 10 * f.position
    assert f.exact(1) and not f.exact(2)


def test_other_tokens_than_plain_are_an_error(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark that would praise trees that emit something else."""
    runner = Runner(Engine.load(bundle, device="cpu"), repetitions=1)
    plain = Workload("tg", 4, 3)
    tokens = next(runner.run([plain])).tokens
    assert len(tokens) == 5  # the first one comes with what lies before
    runner._plain[(3, 4)] = [t + 1 for t in tokens]
    with pytest.raises(EngineError, match="other tokens than plain"):
        list(runner.run([Workload("tg", 4, 3, "ngram", 4)]))


def test_planted_drafts_are_accepted(bundle: Path) -> None:
    """Catches planted drafts that are planted at other positions: they would rarely be right."""
    runner = Runner(Engine.load(bundle, device="cpu"), repetitions=1)
    trees = list(runner.run([Workload("tg", 24, 5), Workload("tg", 24, 5, "planted", 16)]))[1]
    assert trees.record()["accepted_length"] > 1.5
