"""python -m harness.demo [--bundle NAME] [--out DIR]

Makes one golden bundle, decodes it plainly and with draft trees, and shows both: the same tokens from the
same logits, in fewer forwards of the model. Exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kdtree_engine import Engine, GenerationResult

DEFAULT_BUNDLE = "model_int4_tiny2"
TOKENS = 24


def decode(engine: Engine, drafter: str) -> tuple[GenerationResult, npt.NDArray[np.float32]]:
    """One greedy decoding of the bundle's prompt, and its logits, float32 [tokens, vocab]."""
    session = engine.session()
    prompt = [int(token) for token in engine.recorded["prompt.tokens"]]
    # Asking for log-probabilities keeps the logits.
    result = session.generate(
        prompt_tokens=prompt, max_tokens=TOKENS, drafter=drafter, budget=64, logprobs=1
    ).run()
    return result, session.native.logits()


def by_forward(result: GenerationResult) -> list[list[int]]:
    """The tokens that each forward brought: the prompt's forward brings the first."""
    lengths = [1, *result.stats["accepted_lengths"]]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [result.tokens[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def show(title: str, result: GenerationResult) -> None:
    """The tokens, one pair of brackets per forward."""
    groups = " ".join("[" + " ".join(map(str, group)) + "]" for group in by_forward(result))
    print(f"{title}: {len(result.tokens)} tokens from {result.stats['target_forwards']} forwards")
    print(f"  {groups}")


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.demo", description=__doc__.splitlines()[2])
    parser.add_argument("--bundle", metavar="NAME", default=DEFAULT_BUNDLE, help="golden bundle of a model")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("bundles"), help="where to write it")
    args = parser.parse_args(argv)

    from harness.golden.__main__ import main as golden

    if code := golden(["--bundle", args.bundle, "--out", str(args.out), "--threads", "1"]):
        return code

    from kdtree_engine import Engine

    path = args.out / f"{args.bundle}.kdtr"
    engine = Engine.load(path)
    print(f"{path} on {engine.description}")
    print("Each pair of brackets is one forward of the model. The bundle's drafts are planted: they show the")
    print("mechanism, not a speed.\n")
    plain, plain_logits = decode(engine, "none")
    show("plain decoding", plain)
    tree, tree_logits = decode(engine, "replay")
    show("draft trees   ", tree)

    same = plain.tokens == tree.tokens and plain_logits.tobytes() == tree_logits.tobytes()
    count = plain_logits.size
    print(
        f"\nsame tokens, and all {count} logits behind them the same bit for bit"
        if same
        else "\nthe two decodings DIFFER"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
