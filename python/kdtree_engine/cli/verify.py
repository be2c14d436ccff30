"""`kdtree verify`: decode plainly, decode with trees, compare tokens, logits and cache bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from kdtree_engine.cli import console, exits, run
from kdtree_engine.cli.interrupt import Interruptible
from kdtree_engine.cli.options import RunOptions

if TYPE_CHECKING:
    from kdtree_engine._native import Drafter
    from kdtree_engine.engine import Engine
    from kdtree_engine.session import Session

Budget = int | Literal["auto"]

BUDGETS: tuple[Budget, ...] = (1, 4, 8, 16, 31, 64, "auto")
DEFAULT_TEXT = (
    "A speculative decoder guesses what a model will say and lets the model check many guesses at once. "
    "A guess that the model agrees with is kept; a guess that it does not agree with leaves no trace."
)
DEFAULT_TOKENS = 16  # of a prompt for a model without text

Bits = npt.NDArray[np.uint32]


@dataclass
class Decoded:
    """What one decoding left behind."""

    tokens: list[int]
    stop_reason: str
    logits: Bits  # [tokens, vocab] float32 as bits
    cache: list[Bits]  # per layer: [committed, width] float32 as bits
    stats: dict[str, Any]


@dataclass
class Comparison:
    """One tree decoding against the plain one."""

    budget: Budget
    tokens: int  # compared
    logits_bits: int  # compared
    cache_bits: int  # compared
    target_forwards: int
    rounds: int
    drafted: int
    accepted: int
    branching_rounds: int
    difference: str | None  # None: identical


def execute(options: RunOptions, interruption: Interruptible) -> int:
    """Runs the command. Exit code 0: all identical; 1: a difference; 2: no draft was accepted."""
    engine = run.load(options)
    prompt = run.prompt_tokens(engine, options, default=lambda: default_prompt(engine))
    plain = decode(engine, prompt, options, None, 0, interruption)
    name = run.resolved_drafter(engine, options, prompt)
    budgets = BUDGETS if options.budget == "auto" else (options.budget,)

    comparisons: list[Comparison] = []
    for comparison in compare_all(engine, prompt, plain, options, name, budgets, interruption):
        comparisons.append(comparison)
        if comparison.difference is not None:
            break
    accepted = sum(c.accepted for c in comparisons)
    difference = comparisons[-1].difference
    verdict = "different" if difference else "identical" if accepted else "nothing was tested"
    if options.json:
        print(json.dumps(_report(engine, options, name, prompt, plain, comparisons, verdict)), flush=True)
    else:
        for line in _lines(engine, options, name, prompt, plain, comparisons, verdict):
            print(line)
    if difference is not None:
        console.error(f"budget {comparisons[-1].budget}: {difference}")
        return exits.FAILED
    if not accepted:
        console.error(f"nothing was tested: the drafter {name} had no draft accepted")
        return exits.NOTHING_TESTED
    return exits.OK


def default_prompt(engine: Engine) -> list[int]:
    """A prompt that needs nothing but the model."""
    if engine.tokenizer is not None and (tokens := engine.encode(DEFAULT_TEXT)):
        return tokens
    return [token % engine.vocab_size for token in range(1, DEFAULT_TOKENS + 1)]


def compare_all(
    engine: Engine,
    prompt: list[int],
    plain: Decoded,
    options: RunOptions,
    name: str,
    budgets: tuple[Budget, ...],
    interruption: Interruptible,
) -> Iterator[Comparison]:
    """One comparison for each budget, each with a session of its own."""
    for budget in budgets:
        drafter: str | Drafter = name
        if name == "planted":
            from kdtree_engine import _native

            drafter = _native.PlantedDrafter(prompt + plain.tokens, engine.vocab_size, options.seed)
        tree = decode(engine, prompt, options, drafter, budget, interruption)
        count = min(len(plain.tokens), len(tree.tokens))
        yield Comparison(
            budget=budget,
            tokens=count,
            logits_bits=32 * count * engine.vocab_size,
            cache_bits=sum(32 * min(a.size, b.size) for a, b in zip(plain.cache, tree.cache, strict=True)),
            target_forwards=tree.stats["target_forwards"],
            rounds=tree.stats["rounds"],
            drafted=tree.stats["drafted"],
            accepted=tree.stats["accepted"],
            branching_rounds=tree.stats["branching_rounds"],
            difference=first_difference(len(prompt), plain, tree),
        )


def decode(
    engine: Engine,
    prompt: list[int],
    options: RunOptions,
    drafter: str | Drafter | None,
    budget: Budget,
    interruption: Interruptible,
) -> Decoded:
    """One generation from a new session, its logits and its cache kept.

    Raises EngineError, and Interrupted where a signal ended it.
    """
    session = engine.session()
    generation = session.generate(
        prompt_tokens=prompt, logprobs=1, drafter=drafter, budget=budget, **run.sampling(options)
    )
    interruption.cancel = session.native.cancel
    try:
        result = generation.run()
    finally:
        interruption.cancel = None
    if interruption.exit_code is not None:
        raise exits.Interrupted(interruption.exit_code)
    logits = session.native.logits()[: len(result.tokens)]  # a stop text may have taken tokens back
    return Decoded(result.tokens, result.stop_reason, _bits(logits), _cache(engine, session), result.stats)


def _cache(engine: Engine, session: Session) -> list[Bits]:
    return [_bits(session.native.cache(layer)) for layer in range(int(engine.config["num_hidden_layers"]))]


def _bits(array: npt.NDArray[np.float32]) -> Bits:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


def first_difference(prompt_length: int, plain: Decoded, tree: Decoded) -> str | None:
    """Where two decodings part, as one sentence; None where they are the same bit for bit."""
    for i, (a, b) in enumerate(zip(plain.tokens, tree.tokens, strict=False)):
        at = f"generated token {i} (position {prompt_length + i})"
        if a != b:
            return f"{at} is {a} plainly and {b} with trees"
        unequal = np.flatnonzero(plain.logits[i] != tree.logits[i])
        if unequal.size:
            j = int(unequal[0])
            x, y = (bits[i, j : j + 1].view(np.float32)[0] for bits in (plain.logits, tree.logits))
            return (
                f"the logits behind {at} differ in {unequal.size} of {plain.logits.shape[1]} entries, "
                f"first in entry {j}: {x:.9g} ({plain.logits[i, j]:#010x}) plainly, "
                f"{y:.9g} ({tree.logits[i, j]:#010x}) with trees"
            )
    if len(plain.tokens) != len(tree.tokens):
        return f"{len(plain.tokens)} tokens come plainly and {len(tree.tokens)} with trees"
    if plain.stop_reason != tree.stop_reason:
        return f"the run ends by {plain.stop_reason} plainly and by {tree.stop_reason} with trees"
    for layer, (p, t) in enumerate(zip(plain.cache, tree.cache, strict=True)):
        if p.shape != t.shape:
            return f"layer {layer} holds {p.shape[0]} positions plainly and {t.shape[0]} with trees"
        rows = np.flatnonzero((p != t).any(axis=1))
        if rows.size:
            return f"the cache of layer {layer} differs at position {int(rows[0])}"
    return None


def _report(
    engine: Engine,
    options: RunOptions,
    name: str,
    prompt: list[int],
    plain: Decoded,
    comparisons: list[Comparison],
    verdict: str,
) -> dict[str, Any]:
    return {
        "model": options.model,
        "device": engine.description,
        "drafter": name,
        "prompt_tokens": prompt,
        "tokens": plain.tokens,
        "stop_reason": plain.stop_reason,
        "plain_target_forwards": plain.stats["target_forwards"],
        "runs": [asdict(c) for c in comparisons],
        "verdict": verdict,
        "difference": comparisons[-1].difference,
    }


def _lines(
    engine: Engine,
    options: RunOptions,
    name: str,
    prompt: list[int],
    plain: Decoded,
    comparisons: list[Comparison],
    verdict: str,
) -> Iterator[str]:
    yield f"{run.model_label(options)} on {engine.description}, drafter {name}"
    yield (
        f"plain decoding: {len(prompt)} prompt tokens, {len(plain.tokens)} tokens in "
        f"{plain.stats['target_forwards']} target forwards, ended by {plain.stop_reason}"
    )
    head = ("budget", "tokens", "logits bits", "cache bits", "forwards", "drafted", "accepted", "branching")
    yield " ".join(f"{cell:>12}" for cell in head)
    for c in comparisons:
        cells = (
            str(c.budget),
            f"{c.tokens}/{len(plain.tokens)}",
            c.logits_bits,
            c.cache_bits,
            c.target_forwards,
            c.drafted,
            c.accepted,
            c.branching_rounds,
        )
        yield " ".join(f"{cell:>12}" for cell in cells) + ("" if c.difference is None else "   DIFFERENT")
    yield (
        f"{verdict}: {sum(c.tokens for c in comparisons)} tokens and "
        f"{sum(c.logits_bits for c in comparisons)} logits bits compared; "
        f"{sum(c.drafted for c in comparisons)} drafted, {sum(c.accepted for c in comparisons)} accepted, "
        f"{sum(c.branching_rounds for c in comparisons)} branching rounds"
    )
