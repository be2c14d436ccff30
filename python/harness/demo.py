"""python -m harness.demo [--prompt TEXT] [--bundle NAME]

Decodes a prompt plainly and with draft trees, and shows both: the same tokens from the same logits, in fewer
forwards of the model. It runs the demo model with its trained drafter; with --bundle, a golden bundle with planted
drafts. Exit code 1 if the two differ.
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

PROMPT = "def mean(values):\n"
TOKENS = {"model": 96, "bundle": 24}
NODES = {"model": 16, "bundle": 64}


def decode(
    engine: Engine, prompt: list[int], drafter: str, kind: str
) -> tuple[GenerationResult, npt.NDArray[np.float32]]:
    """One greedy decoding, and its logits, float32 [tokens, vocab]."""
    session = engine.session()
    # Asking for log-probabilities keeps the logits.
    result = session.generate(
        prompt_tokens=prompt, max_tokens=TOKENS[kind], drafter=drafter, budget=NODES[kind], logprobs=1
    ).run()
    return result, session.native.logits()


def by_forward(result: GenerationResult) -> list[list[int]]:
    """The tokens that each forward brought: the prompt's forward brings the first."""
    lengths = [1, *result.stats["accepted_lengths"]]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [result.tokens[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def show(engine: Engine, title: str, result: GenerationResult, as_text: bool) -> None:
    """Text: a bar between what different forwards brought. Token ids: a pair of brackets for each."""
    print(f"{title}: {len(result.tokens)} tokens from {result.stats['target_forwards']} forwards")
    if engine.tokenizer is None or not as_text:
        print("  " + " ".join("[" + " ".join(map(str, group)) + "]" for group in by_forward(result)))
        return
    text = "|".join(engine.tokenizer.decode(group) for group in by_forward(result))
    print("\n".join("  " + line for line in text.split("\n")))


def load_model(text: str) -> tuple[Engine, list[int], str]:
    """The demo model, its prompt, and who drafts."""
    from kdtree_engine import Engine, demo_model

    model = demo_model()
    engine = Engine.load(model.target, draft_model=model.draft)
    print(f"the demo model on {engine.description}")
    print(f"prompt: {text!r}. A bar stands between what two forwards of the model brought.\n")
    return engine, engine.encode(text), "dflash"


def load_bundle(name: str, out: Path) -> tuple[Engine, list[int], str]:
    """A golden bundle, made now. Raises SystemExit where that fails."""
    from harness.golden.__main__ import main as golden
    from harness.golden.generate import GENERATORS
    from kdtree_engine import Engine

    models = [known for known in GENERATORS if known.startswith("model_")]
    if name not in models:
        print(f"error: no model bundle {name!r}; there are {', '.join(models)}", file=sys.stderr)
        raise SystemExit(2)
    if code := golden(["--bundle", name, "--out", str(out), "--threads", "1"]):
        raise SystemExit(code)
    path = out / f"{name}.kdtr"
    engine = Engine.load(path)
    print(f"{path} on {engine.description}")
    print("Each pair of brackets is one forward of the model. The bundle's drafts are planted: they show the")
    print("mechanism, not a speed.\n")
    return engine, [int(token) for token in engine.recorded["prompt.tokens"]], "replay"


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.demo", description="\n".join(__doc__.splitlines()[2:]))
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT, help="what the demo model continues")
    parser.add_argument("--bundle", metavar="NAME", help="a golden bundle instead of the demo model")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("bundles"), help="where to write a bundle")
    args = parser.parse_args(argv)

    kind = "bundle" if args.bundle else "model"
    engine, prompt, drafter = load_bundle(args.bundle, args.out) if args.bundle else load_model(args.prompt)
    plain, plain_logits = decode(engine, prompt, "none", kind)
    show(engine, "plain decoding", plain, kind == "model")
    tree, tree_logits = decode(engine, prompt, drafter, kind)
    show(engine, "draft trees   ", tree, kind == "model")

    same = plain.tokens == tree.tokens and plain_logits.tobytes() == tree_logits.tobytes()
    count = plain_logits.size
    print(
        f"\nsame tokens, and all {count} logits behind them the same bit for bit"
        if same
        else "\nthe two decodings DIFFER"
    )
    return 0 if same else 1


if __name__ == "__main__":
    from harness.guard import guarded

    sys.exit(guarded(main))
