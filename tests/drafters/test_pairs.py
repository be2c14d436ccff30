"""bench/drafting_pairs.py: its statistics, and that a small run works. No test here looks at a time."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kdtree_engine import Engine, _native, demo_model

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


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine that only measures is given: folders, a corpus, no checkout. This Python's own native module."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copytree(ROOT / "python", folder / "python", ignore=shutil.ignore_patterns("__pycache__", "_native*.so"))
    native = Path(str(_native.__file__))
    shutil.copy(native, folder / "python" / "kdtree_engine" / native.name)
    (folder / "corpus").mkdir()
    stream = np.random.default_rng(0).integers(10, 3000, 400).astype("<u2")
    (folder / "corpus" / "heldout.code.bin.xz").write_bytes(lzma.compress(stream.tobytes()))
    (folder / "without").mkdir()
    (folder / "without" / "sitecustomize.py").write_text(WITHOUT)
    return folder


WITHOUT = """
import os
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["WITHOUT"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""


Run = subprocess.CompletedProcess[str]


def copied_run(folder: Path, *options: str, without: str = "", path: str = "python") -> Run:
    paths = os.pathsep.join(str(folder / part) for part in (path, "without"))
    small = ("--device", "cpu", "--pairs", "1", "--prompts", "1", "--tokens", "4")
    return subprocess.run(
        [sys.executable, "bench/drafting_pairs.py", "--corpus", str(folder / "corpus"), *small, *options],
        cwd=folder, env=os.environ | {"PYTHONPATH": paths, "WITHOUT": without}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def test_a_copy_without_git_and_the_command_lines_packages(copied: Path) -> None:
    """Catches a script that asks the command line's module for a commit, and so needs typer and rich to measure."""
    run = copied_run(copied, "--kinds", "code", "--json", "r.json", without="typer,rich,jinja2,torch,transformers")
    assert run.returncode == 0, run.stderr
    assert json.loads((copied / "r.json").read_text())["commit"] == "unknown"


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (["--kinds", "code", "prose"], {}, ["heldout.prose.bin.xz", "No such file"]),
        (["--kinds", "code", "--device", "tpu"], {}, ["device is 'tpu'"]),
        (["--kinds", "code"], {"without": "tokenizers"}, ["needs the package tokenizers"]),
        (["--kinds", "code"], {"without": "numpy"}, ["No module named 'numpy'"]),
        (["--kinds", "code"], {"without": "kdtree_engine"}, ["No module named 'kdtree_engine'"]),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(
    copied: Path, options: list[str], changes: dict[str, str], words: list[str]
) -> None:
    """Catches a traceback, and a second text that is found missing when the first was measured."""
    run = copied_run(copied, *options, **changes)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1, run.stderr
    for word in words:
        assert word in run.stderr


def test_a_native_module_that_is_not_there_is_named(copied: Path, tmp_path: Path) -> None:
    """Catches `cannot import name '_native'`: a tree that was built for another Python looked like a broken one."""
    package = tmp_path / "python" / "kdtree_engine"
    shutil.copytree(copied / "bench", tmp_path / "bench")
    shutil.copytree(copied / "corpus", tmp_path / "corpus")
    shutil.copytree(copied / "without", tmp_path / "without")
    shutil.copytree(copied / "python", tmp_path / "python", ignore=shutil.ignore_patterns("_native*", "demo_model"))
    absent = copied_run(tmp_path, "--kinds", "code").stderr
    assert absent.startswith("error: kdtree_engine's native module is not built in ") and absent.count("\n") == 1
    other = package / "_native.cpython-399-x86_64-linux-gnu.so"
    other.touch()
    said = copied_run(tmp_path, "--kinds", "code").stderr
    assert said.startswith(f"error: kdtree_engine's native module was built for another Python ({other.name})"), said
    (package / Path(str(_native.__file__)).name).write_bytes(b"no library")
    said = copied_run(tmp_path, "--kinds", "code").stderr
    assert "does not load: " in said and said.startswith("error: ") and said.count("\n") == 1
