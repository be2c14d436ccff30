"""What INT4 costs a model in accuracy: bits per byte of one text, under weights of several kinds.

    python bench/int4_accuracy.py MODEL --text FILE [--limit N] [--dir DIR] [--json FILE]

MODEL is a Hugging Face folder with a tokenizer; FILE should be text that it was not trained on. The
weights are widened to float32 once (`kdtree convert --to f32`, exact but for fp8), and everything else is made from
those: all weights in bf16; routed experts in INT4, groups of 32, scales by minmax and by mse, the rest in bf16 as the
released Kimi checkpoints have it; and the better of the two once more under `--rounding bf16`, the other INT4 rule of
docs/numerics.md. Each is scored by `kdtree perplexity`'s own function on the same tokens. A model that is stored
quantised has a row of its own; one that was trained on its INT4 grid is best as it is: `mse` finds that grid again,
`minmax` chooses another. Needs disk space for the float32 folder and one more, in DIR (default: the system's
temporary folder); both are removed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdtree_engine import Engine, EngineError
from kdtree_engine.checkout import commit
from kdtree_engine.convert import convert
from kdtree_engine.inspection import inspect_path
from kdtree_engine.perplexity import perplexity

Row = dict[str, Any]


def rows(model: Path, text: str, work: Path, options: argparse.Namespace) -> Iterator[Row]:
    """One row for each kind of weights, as it is measured."""

    def score(name: str, path: Path, error: float | None = None, rounding: Any = "exact") -> Row:
        engine = Engine.load(
            path, device=options.device, precision=options.precision, threads=options.threads, rounding=rounding
        )
        started = time.perf_counter()
        result = perplexity(engine, text, options.window, options.stride, options.limit)
        return {
            "weights": name,
            "bits_per_byte": result.bits_per_byte,
            "bits_per_token": result.bits_per_token,
            "tokens": result.tokens,
            "bytes": result.bytes,
            "weight_bytes": engine.weight_bytes,
            "relative_error": error,
            "seconds": round(time.perf_counter() - started, 2),
            "device": engine.description,
        }

    if any(kind.startswith(("int4", "fp8")) for kind in inspect_path(model)["quantisation"]):
        yield score("as stored", model)
    wide = work / "f32"
    convert(model, wide, to="f32", threads=options.threads)
    yield score("f32", wide)
    with tempfile.TemporaryDirectory(dir=work) as name:
        convert(wide, half := Path(name) / "bf16", to="bf16", threads=options.threads)
        yield score("bf16", half)
    best: tuple[float, float | None, Path] | None = None
    for rule in ("minmax", "mse"):
        folder = work / rule
        report = convert(wide, folder, to="int4", scales=rule, rest="bf16", threads=options.threads)
        row = score(f"int4 {rule}", folder, report.relative_error)
        yield row
        if best is None or row["bits_per_byte"] < best[0]:
            best = row["bits_per_byte"], report.relative_error, folder
    assert best is not None
    yield score(f"int4 {best[2].name}, rounded to bf16", best[2], best[1], "bf16")


def line(row: Row, first: float) -> str:
    error = "" if row["relative_error"] is None else f"{row['relative_error']:.3%}"
    change = "" if math.isclose(row["bits_per_byte"], first, abs_tol=0) else f"{row['bits_per_byte'] / first - 1:+.3%}"
    return (
        f"{row['weights']:28}{row['bits_per_byte']:12.6f}{change:>10}{row['bits_per_token']:12.6f}"
        f"{row['weight_bytes'] / 1e6:12.2f}{error:>10}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="only the first LIMIT tokens")
    parser.add_argument("--window", type=int)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="", help="on CUDA: f32 or bf16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the converted models lie for a while")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args(argv)
    try:
        data = options.text.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: cannot read {options.text} as UTF-8 text: {error}", file=sys.stderr)
        return 1
    if options.model.is_file():
        print(f"error: {options.model} is a file; expected a Hugging Face folder with a tokenizer", file=sys.stderr)
        return 1
    made: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="int4-accuracy-", dir=options.dir) as work:
            print(f"{'weights':28}{'bits/byte':>12}{'':>10}{'bits/token':>12}{'MB':>12}{'error':>10}")
            for row in rows(options.model, text, Path(work), options):
                made.append(row)
                print(line(row, made[0]["bits_per_byte"]), flush=True)
    except (EngineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{made[0]['tokens']} tokens, {made[0]['bytes']} bytes of {options.text.name}; {made[0]['device']}")
    if options.json is not None:
        record = {
            "command": "python bench/int4_accuracy.py " + shlex.join(argv if argv is not None else sys.argv[1:]),
            "commit": commit(Path(__file__).resolve().parents[1]) or "unknown",
            "date": datetime.date.today().isoformat(),
            "cores": len(os.sched_getaffinity(0)),
            "model": options.model.resolve().name,
            "text": {"name": options.text.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "rows": made,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
