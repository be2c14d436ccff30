"""`kdtree perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kdtree_engine.cli import console, exits
from kdtree_engine.cli import options as o

if TYPE_CHECKING:
    from kdtree_engine.checkpoint import Rounding


@dataclass(frozen=True)
class Options:
    """Checked; built by `from_arguments` only."""

    model: str
    text: str
    window: int | None
    stride: int | None
    limit: int | None
    device: str
    precision: str
    rounding: str
    latent_norm_eps: float | None
    threads: int
    json: bool

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Options:
        """Checks the values as typer delivers them. Raises UsageProblem."""
        a = dict(arguments)
        if a["text"] is None:
            raise exits.UsageProblem("--text FILE is missing; - reads stdin")
        o.default_model(a)
        o.within("--window", a["window"], 1, 2**31 - 1)
        o.within("--stride", a["stride"], 1, 2**31 - 1)
        o.within("--limit", a["limit"], 2, 2**31 - 1)
        o.within("--threads", a["threads"], 0, 1024)
        if a["window"] is not None and a["stride"] is not None and a["stride"] > a["window"]:
            raise exits.UsageProblem(
                f"--stride is {a['stride']} and --window {a['window']}: tokens between the windows would be left out"
            )
        o.check_device(a["device"])
        o.check_precision(a["precision"])
        o.check_weights(a["rounding"], a["latent_norm_eps"])
        return cls(**a)


def execute(options: Options) -> int:
    """Runs the command."""
    text = o.read_text("--text", options.text)
    from kdtree_engine.engine import Engine
    from kdtree_engine.perplexity import perplexity

    with console.byte_progress(f"loading {options.model}") as progress:
        engine = Engine.load(
            options.model,
            device=options.device,
            threads=options.threads,
            progress=progress,
            precision="" if options.precision == "auto" else options.precision,
            rounding=cast("Rounding", options.rounding),
            latent_norm_eps=options.latent_norm_eps,
        )
    started = time.perf_counter()
    with console.token_progress("scoring") as progress:
        result = perplexity(engine, text, options.window, options.stride, options.limit, progress)
    seconds = time.perf_counter() - started
    report = {
        "model": options.model,
        "device": engine.description,
        "text": options.text,
        **asdict(result),
        "bits_per_byte": result.bits_per_byte if math.isfinite(result.bits_per_byte) else None,
        "bits_per_token": result.bits_per_token,
        "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
        "seconds": seconds,
    }
    if options.json:
        print(json.dumps(report), flush=True)
        return exits.OK
    name = console.visible(Path(options.model).resolve().name, keep_lines=False)
    print(f"{name} on {engine.description}")
    print(
        f"{console.count_text(result.tokens, 'token')}, {console.count_text(result.bytes, 'byte')}, "
        f"{console.count_text(result.windows, 'window')}, {seconds:.1f} s, "
        f"{result.tokens / seconds:.1f} tokens/s"
    )
    print(f"bits per byte   {result.bits_per_byte:.6f}")
    print(f"bits per token  {result.bits_per_token:.6f}")
    print(f"perplexity      {result.perplexity:.6g}")
    return exits.OK
