"""What `generate` and `verify` share: loading a model and finding its prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kdtree_engine.cli import console
from kdtree_engine.cli.exits import Failure, UsageProblem
from kdtree_engine.cli.options import RunOptions

if TYPE_CHECKING:
    from kdtree_engine.checkpoint import Rounding
    from kdtree_engine.engine import Engine

OWN_PROMPT = "prompt.tokens"  # of a bundle: int32 [n]
OWN_DRAFTS = "draft.tokens"


def load(options: RunOptions) -> Engine:
    """Loads the model, and the draft model where there is one, with a progress bar. Raises EngineError."""
    from kdtree_engine.draft_config import DraftOptions
    from kdtree_engine.engine import Engine

    with console.byte_progress(f"loading {options.model}") as progress:
        return Engine.load(
            options.model,
            device=options.device,
            threads=options.threads,
            context=options.context,
            progress=progress,
            precision="" if options.precision == "auto" else options.precision,
            draft_model=options.draft_model,
            draft_options=DraftOptions.parse(options.draft_options),
            rounding=cast("Rounding", options.rounding),
            latent_norm_eps=options.latent_norm_eps,
        )


def own_prompt(engine: Engine) -> list[int] | None:
    """The prompt that a bundle holds, None where it holds none."""
    tokens = engine.recorded.get(OWN_PROMPT)
    return None if tokens is None else [int(token) for token in tokens.reshape(-1)]


def prompt_tokens(engine: Engine, options: RunOptions, default: Callable[[], list[int]] | None) -> list[int]:
    """Token ids of the prompt: the one given, else the bundle's own, else `default`'s.

    Raises Failure where there is none, or where it has no tokens.
    """
    if options.prompt_tokens is not None:
        return options.prompt_tokens
    if options.prompt is not None:
        tokens = engine.encode(options.prompt)
        if not tokens:
            raise Failure("the prompt is empty: the tokenizer makes no token of it")
        return tokens
    own = own_prompt(engine)
    if own:
        return own
    if default is None:
        raise UsageProblem(
            "the prompt is missing; give --prompt TEXT, --prompt-file FILE or --prompt-tokens 1,2,3"
            if engine.tokenizer is not None
            else f"the prompt is missing; {options.model} has no text, so give --prompt-tokens 1,2,3"
        )
    return default()


def resolved_drafter(engine: Engine, options: RunOptions, prompt: list[int]) -> str:
    """The drafter's name, `auto` resolved: a draft model comes first (`auto` stays, which merges it with
    n-gram lookup); a bundle's draft tables fit its own prompt and no other."""
    if options.drafter != "auto" or options.draft_model is not None:
        return options.drafter
    return "replay" if OWN_DRAFTS in engine.recorded and prompt == own_prompt(engine) else "ngram"


def sampling(options: RunOptions) -> dict[str, Any]:
    """The keyword arguments of `Session.generate` that shape the output, as opposed to the speed."""
    return {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
        "ignore_eos": options.ignore_eos,
    }


def model_label(options: RunOptions) -> str:
    """The last part of the model's path, for headings."""
    return Path(options.model).resolve().name
