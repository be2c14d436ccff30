"""`kdtree generate`: continue a prompt, stream the text, end with statistics or with one JSON object."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_engine.cli import console, exits, run
from kdtree_engine.cli.interrupt import Interruptible
from kdtree_engine.cli.options import RunOptions
from kdtree_engine.errors import EngineError

if TYPE_CHECKING:
    from kdtree_engine.engine import Engine
    from kdtree_engine.session import Event, GenerationResult, Session

# Statistics of a run that ended before its first forward.
_NO_STATS: dict[str, Any] = {
    "target_forwards": 0,
    "rounds": 0,
    "accepted_lengths": [],
    "seconds": dict.fromkeys(("prefill", "draft", "build", "verify", "accept", "commit"), 0.0),
    "tokens_per_second": 0.0,
}


def execute(options: RunOptions, interruption: Interruptible) -> int:
    """Runs the command; the exit code. With --json one object is printed however the run ends."""
    prompt: list[int] = []
    try:
        engine = run.load(options)
        prompt = run.prompt_tokens(engine, options, default=None)
        session = engine.session()
        result = _generate(engine, session, prompt, options, interruption)
    except (EngineError, exits.Failure, MemoryError) as e:
        if options.json:
            _print_json(prompt, [], "", "error", _NO_STATS, error=str(e) or "out of memory")
        raise
    except (exits.Interrupted, KeyboardInterrupt):
        if options.json:
            _print_json(prompt, [], "", "cancelled", _NO_STATS)
        raise
    if options.json:
        _print_json(
            result.prompt_tokens,
            result.tokens,
            result.text,
            result.stop_reason,
            result.stats,
            error=result.error,
            logprobs=_logprobs(result) if options.logprobs is not None else None,
        )
    else:
        console.log(_summary(result))
    if result.error is not None:
        console.error(result.error)
        return exits.FAILED
    if result.stop_reason == "cancelled":
        return interruption.exit_code or exits.INTERRUPTED
    return exits.OK


def _generate(
    engine: Engine, session: Session, prompt: list[int], options: RunOptions, interruption: Interruptible
) -> GenerationResult:
    """Generates, streaming to stdout unless JSON is wanted. An error of a step is in the result."""
    out = console.TextStream()
    with console.token_progress("prompt") as progress, _trace(engine, options) as on_round:
        generation = session.generate(
            prompt_tokens=prompt,
            logprobs=options.logprobs or 0,
            drafter=run.resolved_drafter(engine, options, prompt),
            budget=options.budget,
            on_prompt=progress,
            on_round=on_round,
            **run.sampling(options),
        )
        interruption.cancel = session.native.cancel
        try:
            for event in generation:
                if not options.json:
                    out.write(_piece(engine, event))
        except EngineError:
            if generation.result is None or generation.result.error is None:
                raise  # a step's failure is in the result; this is another
        finally:
            interruption.cancel = None
            out.close()
    if generation.result is None:
        raise exits.Failure("the generation ended without a result")
    return generation.result


@contextlib.contextmanager
def _trace(engine: Engine, options: RunOptions) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A function that writes a round to --trace's file; None without one."""
    if options.trace is None:
        yield None
        return
    from kdtree_engine.trace import TraceWriter

    try:
        writer = TraceWriter(Path(options.trace), engine.tokenizer)
    except OSError as e:
        raise exits.Failure(f"--trace {options.trace} cannot be written: {e.strerror or e}") from None
    with writer:
        yield writer.write


def _piece(engine: Engine, event: Event) -> str:
    if engine.tokenizer is not None or event.token is None:
        return event.text
    return f"{event.token} "  # a model without text: its token ids


def _print_json(
    prompt: list[int],
    tokens: list[int],
    text: str,
    stop_reason: str,
    stats: dict[str, Any],
    *,
    error: str | None = None,
    logprobs: list[dict[str, Any]] | None = None,
) -> None:
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "tokens": tokens,
        "text": text,
        "stop_reason": stop_reason,
        "stats": stats,
    }
    if logprobs is not None:
        value["logprobs"] = logprobs
    if error is not None:
        value["error"] = error
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _logprobs(result: GenerationResult) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
        for token, entry in zip(result.tokens, result.logprobs or [], strict=False)
    ]


def _summary(result: GenerationResult) -> str:
    stats = result.stats
    seconds = stats["seconds"]
    lengths = stats["accepted_lengths"]
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    return (
        f"{console.count_text(len(result.tokens), 'token')}, {stats['tokens_per_second']:.1f} tokens/s; "
        f"{mean:.2f} tokens a round, {console.count_text(stats['target_forwards'], 'target forward')}; "
        f"prompt: {console.count_text(len(result.prompt_tokens), 'token')} in {seconds['prefill']:.2f} s; "
        f"stopped: {result.stop_reason}"
    )
