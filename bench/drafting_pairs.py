"""Tokens per second of plain decoding against a DFlash draft model: chain, trees of fixed sizes, automatic budget.

    python bench/drafting_pairs.py --corpus DIR [--json RECORD] [--pairs 30] [--tokens 128] [--temperature 0.7]

Every choice runs beside a plain run of the same prompt, at most one other run between them, all choices in turn,
prompts rotating: what else the machine does hits both of a pair. A pair is one ratio; a cell is the median of its
ratios with a 95 % bootstrap interval. The clock runs from the first token to the last, so the prompt is outside and
all of the engine's and Python's work behind it is inside. A choice whose tokens differ from the plain ones ends the
script. On the CPU every ratio is taken a second time, in processor seconds of this process: while others want the same
cores, a short run may fit between their turns where a long one cannot, and the clock is then unfair to the slower of a
pair.

DIR is a folder that `python -m harness.train corpus` made. "random" is text of random tokens: a random prompt, and
answers sampled at temperature 1e6, of which no draft can know anything. MODEL and its draft model: the demo model
where none is given; for others the held-out texts are encoded with the model's own tokenizer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import numpy as np

    from demo_model import SIZE, cut, prompts
    from harness.guard import guarded
    from harness.train.sources import KINDS
    from kdtree_engine import DFlashDrafter, DraftOptions, Engine, demo_model
    from kdtree_engine.checkout import commit
except ImportError as error:  # no PYTHONPATH, a package that is not there, a native module of another Python
    raise SystemExit(f"error: {error}") from None

ROOT = Path(__file__).resolve().parents[1]
RESAMPLES = 10_000
TREES = (4, 8, 16, 32)
FIXED = ("chain", *(f"tree {n}" for n in TREES))
CHOICES = (*FIXED, "auto", "auto + ngram")
RANDOM = "random"
BESIDE = 4  # choices that share a plain run
CLOCKS = ("clock", "processor time")


def interval(ratios: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, float]:
    """Median with its 95 % percentile bootstrap interval (Efron 1979): the same for the same ratios and seed."""
    values = np.asarray(ratios, np.float64)
    rng = np.random.default_rng(seed)
    medians = np.median(values[rng.integers(0, len(values), (resamples, len(values)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high), "pairs": len(values)}


def options(engine: Engine, choice: str) -> dict[str, Any]:
    """What `generate` takes for a choice."""
    if choice == "plain":
        return {"drafter": None, "budget": 0}
    if choice == "chain":
        assert engine.native.draft_config is not None
        drafts = int(engine.native.draft_config["block_rows"]) - 1
        return {"drafter": DFlashDrafter(width=1), "budget": min(drafts, 64)}
    if choice == "auto":
        return {"drafter": "dflash", "budget": "auto"}
    if choice == "auto + ngram":
        return {"drafter": "auto", "budget": "auto"}
    return {"drafter": "dflash", "budget": int(choice.removeprefix("tree "))}


def timed(engine: Engine, choice: str, prompt: list[int], tokens: int, **sampling: Any) -> tuple[np.ndarray, Any]:
    """Tokens behind the first one, per second of the clock and per processor second, and the result."""
    running = engine.session().generate(
        prompt_tokens=prompt, max_tokens=tokens, ignore_eos=True, **options(engine, choice), **sampling
    )
    next(running)
    start = np.array([time.perf_counter(), time.process_time()])
    result = running.run()
    return (len(result.tokens) - 1) / (np.array([time.perf_counter(), time.process_time()]) - start), result


def best_fixed(ratios: dict[str, list[float]]) -> dict[str, Any]:
    """The best choice that is fixed, plain decoding among them, and what `auto` reaches of it in the same turns."""
    best = max(FIXED, key=lambda choice: float(np.median(ratios[choice])))
    if np.median(ratios[best]) <= 1:
        return {"best": "plain", **interval(ratios["auto"])}
    return {"best": best, **interval([a / b for a, b in zip(ratios["auto"], ratios[best], strict=True)])}


def measure(engine: Engine, given: list[list[int]], pairs: int, tokens: int, temperature: float) -> dict[str, Any]:
    """All choices on one kind of prompts: per choice the cell, tokens per second and tokens per round."""
    rates: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {choice: [] for choice in CHOICES}
    lengths: dict[str, list[int]] = {choice: [] for choice in CHOICES}
    for i in range(pairs):
        prompt = given[i % len(given)]
        sampling = {"temperature": temperature, "seed": i} if temperature else {}
        for at in range(0, len(CHOICES), BESIDE):  # a plain run in the middle of a few choices
            turn = list(CHOICES[at : at + BESIDE])
            turn.insert(len(turn) // 2, "plain")
            runs = {choice: timed(engine, choice, prompt, tokens, **sampling) for choice in turn}
            plain, expected = runs.pop("plain")
            for choice, (rate, result) in runs.items():
                if result.tokens != expected.tokens:
                    raise SystemExit(f"{choice} wrote other tokens than plain decoding on prompt {i % len(given)}")
                rates[choice].append((rate, plain))
                lengths[choice] += result.stats["accepted_lengths"]
    cell: dict[str, Any] = {
        "plain_tokens_per_second": float(np.median([plain[0] for both in rates.values() for _, plain in both])),
        "tokens_a_round": {choice: float(np.mean(emitted)) for choice, emitted in lengths.items()},
        "tokens_per_second": {c: float(np.median([rate[0] for rate, _ in both])) for c, both in rates.items()},
    }
    for clock, name in enumerate(CLOCKS if engine.device == "cpu" else CLOCKS[:1]):
        ratios = {c: [float(rate[clock] / plain[clock]) for rate, plain in both] for c, both in rates.items()}
        cell[name] = {c: interval(r) for c, r in ratios.items()} | {"auto_against_best_fixed": best_fixed(ratios)}
    return cell


def table(cells: dict[str, Any], clock: str) -> str:
    """Markdown: one line a kind, ratios to plain decoding with their intervals."""
    lines = [
        f"| ratio by the {clock} | plain, tokens/s | {' | '.join(CHOICES)} | best fixed | auto / best fixed |",
        "|" + "---|" * (len(CHOICES) + 4),
    ]
    for name, cell in cells.items():
        shown = [text(cell[clock][choice]) for choice in CHOICES]
        best = cell[clock]["auto_against_best_fixed"]
        lines.append(
            f"| {name} | {cell['plain_tokens_per_second']:.0f} | {' | '.join(shown)} | {best['best']} | {text(best)} |"
        )
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def of_kind(engine: Engine, corpus: Path, kind: str, count: int, demo: bool) -> list[list[int]]:
    if kind == RANDOM:
        rng = np.random.default_rng(0)
        special = engine.eos_token_ids | engine.config.placeholders
        usable = [t for t in range(engine.vocab_size) if t not in special]
        return [rng.choice(usable, SIZE).tolist() for _ in range(count)]
    if demo:
        return prompts(corpus, kind, count)
    return cut(engine.encode((corpus / f"heldout.{kind}.txt").read_text()), count)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a target; default: the demo model and its draft model")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, RANDOM), default=(*KINDS, RANDOM))
    parser.add_argument("--temperature", type=float, action="append", help="0: greedy, the default; may be repeated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="", help="f32 or bf16; default: the device's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{os.cpu_count()}-core {platform.machine()}", help="its kind, in words")
    args = parser.parse_args(arguments)
    if args.model is not None and args.draft_model is None:
        parser.error("MODEL needs --draft-model DIR")
    if min(args.pairs, args.prompts) < 1 or args.tokens < 2:
        parser.error("--pairs and --prompts must be at least 1, --tokens at least 2")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder")
    demo = args.model is None
    found = demo_model()
    engine = Engine.load(
        found.target if demo else args.model,
        device=args.device,
        precision=args.precision,
        threads=args.threads,
        draft_model=args.draft_model or found.draft,
        draft_options=DraftOptions.parse(dict(pair.partition("=")[::2] for pair in args.draft_option)),
    )
    # All of them first: a text that cannot be read ends the script before it has measured for minutes.
    texts = {kind: of_kind(engine, args.corpus, kind, args.prompts, demo) for kind in args.kinds}
    given = sys.argv[1:] if arguments is None else arguments
    record: dict[str, Any] = {
        "command": "python bench/drafting_pairs.py " + shlex.join(given).replace(str(args.corpus), "DIR"),
        "machine": args.machine,
        "engine": engine.description,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(ROOT) or "unknown",
        "load_average": [[round(x, 2) for x in os.getloadavg()]],
        "tokens": args.tokens,
        "cells": {},
    }
    for temperature in args.temperature or [0.0]:
        for kind in args.kinds:
            name = f"{kind}, {f'temperature {temperature:g}' if temperature else 'greedy'}"
            if kind == RANDOM:
                name, temperature_ = "random tokens", 1e6
                if name in record["cells"]:
                    continue
            else:
                temperature_ = temperature
            for choice in ("plain", *CHOICES):  # costs measured, graphs recorded, memory touched
                timed(engine, choice, texts[kind][0], min(args.tokens, 32))
            record["cells"][name] = measure(engine, texts[kind], args.pairs, args.tokens, temperature_)
            record["load_average"].append([round(x, 2) for x in os.getloadavg()])
            if args.json:  # after every cell: a run that is cut short has what it measured
                args.json.write_text(json.dumps(record, indent=1) + "\n")
            print(table({name: record["cells"][name]}, "clock"), file=sys.stderr, flush=True)
    for clock in CLOCKS if engine.device == "cpu" else CLOCKS[:1]:
        print(table(record["cells"], clock), end="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
