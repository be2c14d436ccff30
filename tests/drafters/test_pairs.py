"""bench/drafting_pairs.py: its statistics, and that a small run works. No test here looks at a time."""

from __future__ import annotations

import importlib
import json
import lzma
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kdtree_engine import Engine, demo_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("drafting_pairs")


def test_the_median_and_its_interval(bench: ModuleType) -> None:
    """Catches a mean in the median's place, an interval of the values instead of their median, and one that moves."""
    ratios = [1.0, 1.1, 1.2, 1.3, 50.0]
    found = bench.interval(ratios)
    assert found == bench.interval(ratios) and found["median"] == 1.2 and found["pairs"] == 5
    assert 1.0 <= found["low"] < 1.2 < found["high"] <= 50.0
    assert bench.interval([2.0] * 9) == {"median": 2.0, "low": 2.0, "high": 2.0, "pairs": 9}
    # Of 101 evenly spread values the median's 95 % interval is that of the order statistics: ranks 41 to 61
    # (binomial, exact); of all values it would be 2.5 to 97.5.
    found = bench.interval(list(range(101)))
    assert found["median"] == 50
    assert found["low"] == pytest.approx(40, abs=2) and found["high"] == pytest.approx(60, abs=2)


def test_the_bootstrap_covers(bench: ModuleType) -> None:
    """Catches percentiles of the wrong level: 95 of 100 intervals should hold the true median."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        found = bench.interval(rng.lognormal(0.0, 0.3, 30).tolist(), resamples=400)
        held += found["low"] <= 1.0 <= found["high"]
    assert 0.90 < held / 400 < 0.985


def test_the_best_fixed_choice(bench: ModuleType) -> None:
    """Catches an `auto` that is compared with itself, with a mean, or with a drafted run where plain decoding wins."""
    slow = {choice: [0.5, 0.6, 0.7] for choice in bench.FIXED}
    assert bench.best_fixed(slow | {"auto": [0.9, 1.0, 1.1]}) | {"pairs": 0} == {
        "best": "plain", **bench.interval([0.9, 1.0, 1.1]), "pairs": 0,
    }  # fmt: skip
    found = bench.best_fixed(slow | {"tree 8": [1.0, 2.0, 4.0], "auto": [2.0, 3.0, 2.0], "auto + ngram": [9.0] * 3})
    assert found["best"] == "tree 8" and found["median"] == 1.5


def test_a_chain_is_a_chain(bench: ModuleType) -> None:
    """Catches a "chain" that is a tree of as many nodes."""
    folders = demo_model()
    engine = Engine.load(folders.target, device="cpu", threads=1, draft_model=folders.draft)
    rounds: list[dict] = []
    text = engine.encode("def add(a, b):\n    return a + b\n")
    engine.session().generate(
        prompt_tokens=text, max_tokens=12, ignore_eos=True, on_round=rounds.append, **bench.options(engine, "chain")
    ).run()
    assert rounds and all(r["parents"] == list(range(-1, len(r["parents"]) - 1)) for r in rounds)
    assert {r["nodes"] for r in rounds} == {engine.native.draft_config["block_rows"] - 1}


def test_a_small_run(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a record that lacks a choice, a kind or what makes a figure comparable."""
    stream = np.random.default_rng(0).integers(10, 3000, 400).astype("<u2")
    (tmp_path / "heldout.code.bin.xz").write_bytes(lzma.compress(stream.tobytes()))
    path = tmp_path / "record.json"
    bench.main(["--corpus", str(tmp_path), "--json", str(path), "--pairs", "1", "--prompts", "1", "--tokens", "6",
                "--kinds", "code", "random", "--temperature", "0", "--temperature", "0.7"])  # fmt: skip
    record = json.loads(path.read_text())
    assert list(record["cells"]) == ["code, greedy", "random tokens", "code, temperature 0.7"]
    assert {"command", "machine", "engine", "date", "commit", "load_average"} <= set(record)
    assert str(tmp_path) not in record["command"].split("--json")[0] and len(record["load_average"]) == 4
    for cell in record["cells"].values():
        for clock in bench.CLOCKS:
            assert all(cell[clock][choice]["pairs"] == 1 for choice in bench.CHOICES)
    out = capsys.readouterr().out
    assert out.count("| code, greedy |") == 2 and all(choice in out for choice in bench.CHOICES)


def test_other_tokens_end_the_run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a table of a run that was not lossless."""
    given = bench.timed

    def wrong(engine: Engine, choice: str, *args: object, **kwargs: object) -> object:
        rate, result = given(engine, choice, *args, **kwargs)
        if choice == "tree 8":
            result.tokens[-1] += 1
        return rate, result

    monkeypatch.setattr(bench, "timed", wrong)
    with pytest.raises(SystemExit, match="tree 8 wrote other tokens"):
        bench.main(["--corpus", str(tmp_path), "--pairs", "1", "--prompts", "1", "--tokens", "4", "--kinds", "random"])
