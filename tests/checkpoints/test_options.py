"""Options of the command line that concern weights: they reach the engine, and nonsense does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import assert_refused, kdtree

FIXTURE = Path(__file__).parents[1] / "data" / "arch_fixtures" / "kimi_k25"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "model", ignore=shutil.ignore_patterns("expected.kdtr")))


def logprobs(model: Path, *options: str) -> str:
    fixed = ("--prompt-tokens", "5,6,7", "--max-tokens", "4", "--logprobs", "2", "--json", "--ignore-eos")
    done = kdtree("generate", model, *fixed, *options)
    assert done.code == 0, done.err
    return json.dumps(done.json["logprobs"])


def test_each_option_changes_what_it_is_for(model: Path) -> None:
    plain = logprobs(model)
    assert logprobs(model, "--rounding", "exact") == plain == logprobs(model, "--latent-norm-eps", "1e-6")
    assert logprobs(model, "--rounding", "bf16") != plain
    assert logprobs(model, "--latent-norm-eps", "1e-5") != plain


@pytest.mark.parametrize("command", [["generate"], ["verify"], ["perplexity", "--text", "-"]])
@pytest.mark.parametrize(
    ("option", "value"), [("--rounding", "f16"), ("--latent-norm-eps", "0"), ("--latent-norm-eps", "nan")]
)
def test_values_that_make_no_sense(model: Path, command: list[str], option: str, value: str) -> None:
    assert_refused(kdtree(command[0], model, *command[1:], option, value), option, code=2)
