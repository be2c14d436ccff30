"""python -m harness.train: every mistake is one sentence."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from command import environment

TORCH = importlib.util.find_spec("torch") is not None


def refused(*arguments: object) -> str:
    argv = [sys.executable, "-m", "harness.train", *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and done.stdout == "" and len(lines) == 1, done
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_package_that_is_not_a_source_is_named(tmp_path: Path) -> None:
    """Catches a corpus that is silently smaller than asked for."""
    assert "nothing-like-it" in refused("corpus", "--out", tmp_path / "c", "--only", "nothing-like-it")
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(TORCH, reason="PyTorch is installed")
def test_without_torch_the_extra_is_named(tmp_path: Path) -> None:
    line = refused("target", "--corpus", tmp_path, "--out", tmp_path / "o", "--steps", 1)
    assert "training needs torch: pip install 'kdtree-engine[train]'" in line


@pytest.mark.torch
@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", 1], "manifest.json cannot be read"),
        ([], "--minutes or --steps"),
        (["--steps", 1, "--minutes", 1], "--minutes or --steps"),
        (["--steps", 1, "--size", "huge"], "known: demo, micro"),
        (["--steps", 1, "--set", "batches=3"], "'batches' is no setting"),
        (["--steps", 1, "--set", "batch=many"], "expected a value like 32"),
        (["--steps", 1, "--shape", "hidden_size=100"], "multiple of 32"),
    ],
)
def test_wrong_options_of_target(tmp_path: Path, options: list[object], words: str) -> None:
    """Catches a traceback, and a run that starts with settings nobody asked for."""
    assert words in refused("target", "--corpus", tmp_path, "--out", tmp_path / "o", "--device", "cpu", *options)


@pytest.mark.torch
@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
def test_a_target_that_is_none_is_named(tmp_path: Path) -> None:
    line = refused("drafter", "--corpus", tmp_path, "--target", tmp_path / "t", "--out", tmp_path, "--steps", 1)
    assert "config.json is no config.json of a model" in line
