"""What the demo model reaches in the engine: bits per byte on held-out texts, tokens per round against the budget.

    python bench/demo_model.py --corpus DIR [--json RECORD] [--prompts 12] [--tokens 192] [--limit N]

DIR is a folder that `python -m harness.train corpus` made; its held-out documents were in no training. Bits per byte
are INT4's, in windows of 2048 that overlap by half, beside `xz -9e` of the same file. Tokens per round count the
target's own. Everything here is exact and repeats, whatever else the machine does; no time is measured.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from pathlib import Path
from typing import Any

from harness.train.corpus import load_tokens
from harness.train.sources import KINDS
from kdtree_engine import Engine, demo_model
from kdtree_engine.perplexity import perplexity

BUDGETS = (1, 2, 4, 8, 9, 16, 32, 64)  # 9: as many nodes as the drafter's chain has
SIZE = 96  # tokens of a prompt
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "t0.7": {"temperature": 0.7, "seed": 1}}


def bits(engine: Engine, corpus: Path, limit: int | None) -> dict[str, dict[str, float]]:
    """Per kind, and over all bytes of all kinds."""
    shown = {}
    total = {"bytes": 0, "xz": 0.0, "int4": 0.0}
    for kind in KINDS:
        data = (corpus / f"heldout.{kind}.txt").read_bytes()
        result = perplexity(engine, data.decode(), limit=limit)
        xz = 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)
        shown[kind] = {"xz": xz, "int4": result.bits_per_byte, "below_xz": 1 - result.bits_per_byte / xz}
        print(kind, shown[kind], file=sys.stderr, flush=True)
        total["bytes"] += len(data)
        total["xz"] += xz * len(data)
        total["int4"] += result.bits_per_byte * len(data)
    xz, int4 = total["xz"] / total["bytes"], total["int4"] / total["bytes"]
    shown["all"] = {"xz": xz, "int4": int4, "below_xz": 1 - int4 / xz}
    return shown


def prompts(corpus: Path, kind: str, count: int) -> list[list[int]]:
    """Stretches of the held-out stream, evenly spread: those of `harness.train evaluate`."""
    return cut(load_tokens(corpus, "heldout", kind).tolist(), count)  # type: ignore[arg-type]


def cut(stream: list[int], count: int) -> list[list[int]]:
    """`count` stretches of SIZE tokens, evenly spread."""
    room = len(stream) - SIZE
    return [stream[at : at + SIZE] for at in (i * room // count for i in range(count))]


def lengths(engine: Engine, given: list[list[int]], tokens: int, **options: Any) -> dict[str, float]:
    """Mean tokens of a round, over all rounds of all prompts."""
    rounds = emitted = 0
    for prompt in given:
        result = engine.session().generate(
            prompt_tokens=prompt, max_tokens=tokens, ignore_eos=True, **options
        ).run()
        rounds += len(result.stats["accepted_lengths"])
        emitted += sum(result.stats["accepted_lengths"])
    return {"tokens_a_round": emitted / rounds, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--limit", type=int, help="tokens of each text that are scored; default: all")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = demo_model()
    engine = Engine.load(model.target, device=args.device, draft_model=model.draft)
    record: dict[str, Any] = {"engine": engine.description, "prompts": args.prompts, "tokens": args.tokens}
    record["tokens_a_round"] = {}
    for kind in KINDS:
        given = prompts(args.corpus, kind, args.prompts)
        for name, sampling in SAMPLING.items():
            cell = {
                str(budget): lengths(engine, given, args.tokens, drafter="dflash", budget=budget, **sampling)
                for budget in BUDGETS
            }
            record["tokens_a_round"][f"{kind}, {name}"] = cell
            print(kind, name, {b: round(c["tokens_a_round"], 3) for b, c in cell.items()}, file=sys.stderr, flush=True)
    record["bits_per_byte"] = bits(engine, args.corpus, args.limit)
    text = json.dumps(record, indent=1) + "\n"
    if args.json:
        args.json.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
