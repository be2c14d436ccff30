"""The demo model: what runs where no MODEL is given."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from command import assert_refused, kdtree

from kdtree_engine import Engine, demo_model
from kdtree_engine import demo as demo_module
from kdtree_engine.perplexity import perplexity

PROMPTS = {
    "code": "def read_lines(path):\n    with open(path",
    "prose": "It was a truth that nobody in the room would",
    "lists": "- Fixed a bug in ",
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = demo_model()
    return Engine.load(model.target, device="cpu", threads=2, draft_model=model.draft)


def test_generate_runs_the_demo_model_and_its_drafter() -> None:
    """Catches a first command that asks for a model, and a drafter that was left at home."""
    options = ("--prompt", "import os\n", "--max-tokens", "48", "--ignore-eos", "--json")
    run = kdtree("generate", *options, "--budget", "8")
    assert run.code == 0, run.err
    assert len(run.json["text"]) > 48
    lengths = run.json["stats"]["accepted_lengths"]
    assert sum(lengths) / len(lengths) > 1.3
    plain = kdtree("generate", *options, "--drafter", "none")
    assert plain.json["tokens"] == run.json["tokens"]


def test_verify_runs_the_demo_model() -> None:
    run = kdtree("verify", "--prompt", "class Node:\n", "--drafter", "dflash", "--budget", "8", "--max-tokens", "32")
    assert run.code == 0, run.err


def test_bench_measures_the_demo_model_and_its_drafter() -> None:
    """Catches a command that asks for a model where the others have one."""
    run = kdtree("bench", "-p", "8", "-n", "24", "-r", "1", "--budget", "8", "-o", "json")
    assert run.code == 0, run.err
    assert run.json["model"] == demo_model().target.name and run.json["draft_model"] == demo_model().draft.name
    assert [(r["decoding"], r["drafter"]) for r in run.json["results"]][-1] == ("ddtree", "auto")
    plain = kdtree("bench", "-p", "0", "-n", "8", "-r", "1", "--drafter", "ngram", "-o", "json")
    assert plain.code == 0 and plain.json["draft_model"] is None, plain.err


def test_perplexity_scores_with_the_demo_model(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("It was a truth that nobody in the room would have cared to dispute.\n" * 3)
    run = kdtree("perplexity", "--text", text, "--json")
    assert run.code == 0, run.err
    assert run.json["model"] == str(demo_model().target) and run.json["bits_per_byte"] < 3


@pytest.mark.parametrize("kind", PROMPTS)
def test_trained_drafts_are_accepted_and_change_nothing(engine: Engine, kind: str) -> None:
    """Catches weights that were packed wrongly: a drafter for another target, a mask that was not trained."""
    results = {}
    for drafter, budget in (("none", 0), ("dflash", 16)):
        generation = engine.session().generate(
            prompt=PROMPTS[kind], max_tokens=96, drafter=drafter, budget=budget, ignore_eos=True
        )
        results[drafter] = generation.run()
    assert results["none"].tokens == results["dflash"].tokens
    lengths = results["dflash"].stats["accepted_lengths"]
    assert sum(lengths) / len(lengths) > 1.4  # 1.0 to 1.1 with weights of another target


def test_the_target_knows_english_and_python(engine: Engine) -> None:
    """Catches a checkpoint of an early step, or one that was quantised a second time."""
    text = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"
    assert perplexity(engine, text * 2).bits_per_byte < 2.0
    english = "The committee shall meet at the end of every year, and the members of it shall be elected by the people."
    assert perplexity(engine, english).bits_per_byte < 2.5


def test_the_demo_is_small_and_its_card_has_its_figures() -> None:
    """Catches a demo that outgrows the package, and a card of other weights."""
    folder = Path(demo_model().target).parent
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 24 * 2**20
    card = (folder / "MODEL.md").read_text(encoding="utf-8")
    for part in demo_model():
        weights = part / "model.safetensors"
        assert hashlib.sha256(weights.read_bytes()).hexdigest() in card
    for word in ("Licence", "steps", "bits per byte", "xz -9e"):
        assert re.search(word, card)
    config = json.loads((demo_model().target / "config.json").read_text())
    assert config["model_type"] == "kimi_k2" and "quantization_config" in config


def test_an_installation_without_the_demo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "__file__", str(tmp_path / "demo.py"))
    with pytest.raises(Exception, match="the demo model is not installed"):
        demo_model()


def test_commands_that_need_another_model_still_ask_for_it() -> None:
    assert_refused(kdtree("chat"), "MODEL is missing", code=2)
