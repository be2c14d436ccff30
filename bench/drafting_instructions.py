"""Instructions of plain decoding, chain, tree and automatic budget on the CPU, counted by callgrind.

    python bench/drafting_instructions.py --corpus DIR [--json RECORD] [--tokens 24] [--kinds code]

Counts what runs inside `Session::step`, prompt and rounds, of an engine with the AVX2 kernels (valgrind knows no
AVX-512) on one thread. Every choice is decoded twice in one process and once in another: the difference is an answer
of an engine that has measured its costs. Under the tool everything takes some fifty times as long, so what the
automatic budget decides there is not what it decides without; the counts of the others do not depend on a clock.
Needs valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from demo_model import prompts
from drafting_pairs import ROOT, options
from kdtree_engine import Engine, demo_model
from kdtree_engine.checkout import commit

CHOICES = ("plain", "chain", "tree 8", "auto")
PROMPT = 16  # tokens


def decode(corpus: Path, kind: str, choice: str, tokens: int, answers: int) -> None:
    """In the process that is counted."""
    found = demo_model()
    engine = Engine.load(found.target, device="cpu", threads=1, draft_model=found.draft)
    prompt = prompts(corpus, kind, 1)[0][:PROMPT]  # type: ignore[arg-type]
    for _ in range(answers):
        result = engine.session().generate(
            prompt_tokens=prompt, max_tokens=tokens, ignore_eos=True, **options(engine, choice)
        ).run()
    print("rounds", len(result.stats["accepted_lengths"]))


def count(arguments: list[str], answers: int) -> tuple[int, int]:
    """Instructions inside Session::step, and rounds of the last answer."""
    tool = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
            "--toggle-collect=kdt::Session::step()"]  # fmt: skip
    run = subprocess.run(
        [*tool, sys.executable, __file__, *arguments, "--answers", str(answers)],
        capture_output=True, text=True, check=True, env={**os.environ, "KDTREE_CPU_ISA": "avx2"},
    )  # fmt: skip
    collected, rounds = re.search(r"Collected : (\d+)", run.stderr), re.search(r"rounds (\d+)", run.stdout)
    if collected is None or rounds is None:
        raise SystemExit(f"callgrind counted nothing: {run.stderr[-300:]}")
    return int(collected[1]), int(rounds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--kinds", nargs="+", default=["code"])
    parser.add_argument("--choice", choices=CHOICES, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.choice:
        decode(args.corpus, args.kinds[0], args.choice, args.tokens, args.answers)
        return
    record: dict[str, Any] = {"commit": commit(ROOT) or "unknown", "tokens": args.tokens, "prompt": PROMPT,
                              "isa": "avx2", "cells": {}}  # fmt: skip
    for kind in args.kinds:
        cell: dict[str, Any] = {}
        for choice in CHOICES:
            given = ["--corpus", str(args.corpus), "--tokens", str(args.tokens), "--kinds", kind, "--choice", choice]
            once, twice = count(given, 1), count(given, 2)
            cell[choice] = {"instructions": twice[0] - once[0], "rounds": twice[1]}
            print(kind, choice, cell[choice], file=sys.stderr, flush=True)
        record["cells"][kind] = cell
    text = json.dumps(record, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
