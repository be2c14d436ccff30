"""python -m harness.train: a corpus, a target, its drafter."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.train.errors import TrainError

_STARTED = time.monotonic()  # a run by the clock counts its own imports

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)

Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; repeatable.")]
Minutes = Annotated[float | None, typer.Option(min=0.01, help="Train by the clock, from the start of the command.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Train this many steps.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Corpus = Annotated[Path, typer.Option(help="A folder that `corpus` made.")]


def _guarded(work: Callable[[], Any]) -> None:
    try:
        work()
    except TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ImportError as error:
        if error.name not in ("torch", "tokenizers"):
            raise
        print(f"error: training needs {error.name}: pip install 'kdtree-engine[train]'", file=sys.stderr)
        raise typer.Exit(1) from None


def _changes(pairs: list[str] | None, base: Any) -> dict[str, Any]:
    """NAME=VALUE, the values as JSON, or as text where they are none."""
    changes: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise TrainError(f"--set {pair}: expected NAME=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        old = getattr(base, name, None)
        if isinstance(old, tuple) and isinstance(value, list):
            value = tuple(value)
        if old is not None and isinstance(old, float) and isinstance(value, int):
            value = float(value)
        if old is not None and type(value) is not type(old):
            raise TrainError(f"--set {pair}: expected a value like {old!r}")
        changes[name] = value
    return changes


def _clock(minutes: float | None, steps: int | None) -> Any:
    from harness.train.loop import Clock

    if (minutes is None) == (steps is None):
        raise TrainError("say how long to train: --minutes or --steps")
    return Clock(minutes, steps, _STARTED)


@app.command()
def corpus(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    downloads: Annotated[Path, typer.Option(help="The packages; missing ones are downloaded.")] = Path("packages"),
    vocab: Annotated[int, typer.Option(help="Tokens of the tokenizer.")] = 4096,
    heldout: Annotated[int, typer.Option(min=1000, help="Bytes of each kind that are held out.")] = 400_000,
    only: Annotated[list[str] | None, typer.Option(help="Only this package; repeatable.")] = None,
) -> None:
    """Build the corpus: download packages, extract documents, split them, train the tokenizer, pack."""

    def work() -> None:
        from harness.train.corpus import CorpusOptions, build
        from harness.train.sources import SOURCES

        chosen = [s for s in SOURCES if not only or s.package in only]
        if only and len(chosen) != len(set(only)):
            raise TrainError(f"--only {set(only) - {s.package for s in SOURCES}}: not in the table of sources")
        made = build(out, downloads, CorpusOptions(heldout, vocab=vocab), chosen)
        for name, count in made["counts"].items():
            print(name, *(f"{k} {v}" for k, v in count.items()))

    _guarded(work)


@app.command()
def target(
    corpus: Corpus,
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoint, log, plot, and the model in OUT/model.")],
    minutes: Minutes = None,
    steps: Steps = None,
    size: Annotated[str, typer.Option(help="demo or micro.")] = "demo",
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change a size; repeatable.")] = None,
    set_: Set = None,
    device: Device = "auto",
    compile: Annotated[bool, typer.Option(help="Compile the layers; falls back where that fails.")] = False,
    start: Annotated[Path | None, typer.Option(help="Begin with the weights of this model folder.")] = None,
) -> None:
    """Train a target; resumes where OUT has a checkpoint of the same settings."""

    def work() -> None:
        from harness.train.loop import choose_device
        from harness.train.shapes import TARGETS, Training, replaced
        from harness.train.target import train_target

        if size not in TARGETS:
            raise TrainError(f"--size {size}; known: {', '.join(TARGETS)}")
        train_target(
            corpus, out,
            replaced(TARGETS[size], _changes(shape, TARGETS[size])),
            replaced(Training(), _changes(set_, Training())),
            _clock(minutes, steps), choose_device(device), compile, start,
        )  # fmt: skip

    _guarded(work)


@app.command()
def drafter(
    corpus: Corpus,
    target: Annotated[Path, typer.Option(help="The model folder of a target.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the drafter in OUT/draft, the target in OUT/model.")],
    minutes: Minutes = None,
    steps: Steps = None,
    size: Annotated[str, typer.Option(help="demo or micro.")] = "demo",
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change a size; repeatable.")] = None,
    set_: Set = None,
    device: Device = "auto",
) -> None:
    """Train a DFlash drafter for a target; resumes where OUT has a checkpoint of the same settings."""

    def work() -> None:
        from harness.train.drafter import DraftTraining, train_drafter
        from harness.train.loop import choose_device
        from harness.train.shapes import DRAFTS, replaced

        if size not in DRAFTS:
            raise TrainError(f"--size {size}; known: {', '.join(DRAFTS)}")
        train_drafter(
            corpus, target, out,
            replaced(DRAFTS[size], _changes(shape, DRAFTS[size])),
            replaced(DraftTraining(), _changes(set_, DraftTraining())),
            _clock(minutes, steps), choose_device(device),
        )  # fmt: skip

    _guarded(work)


@app.command()
def evaluate(
    corpus: Corpus,
    target: Annotated[Path, typer.Option(help="The model folder of a target.")],
    draft: Annotated[Path | None, typer.Option(help="The folder of its drafter.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of each kind.")] = 16,
    most: Annotated[int | None, typer.Option(min=2, help="Tokens of each kind that are scored; default: all.")] = None,
    device: Device = "auto",
) -> None:
    """Held-out bits per byte beside xz, and mean tokens of a chain round; JSON on stdout."""

    def work() -> None:
        from harness.train import evaluate as measures
        from harness.train.export import load_drafter, load_target
        from harness.train.loop import choose_device

        where = choose_device(device)
        model = load_target(target, where)
        shown: dict[str, Any] = {"heldout": measures.folder_report(model, corpus, where, most)}
        if draft is not None:
            drafter, shape = load_drafter(draft, model, where)
            shown["chain"] = measures.draft_report(model, drafter, shape, corpus, where, prompts)
        print(json.dumps(shown, indent=1))

    _guarded(work)


if __name__ == "__main__":
    app()
