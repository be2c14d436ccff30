"""`kdtree convert`: from one checkpoint to another."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from kdtree_engine.cli import console, exits
from kdtree_engine.cli import options as o

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Options:
    """Checked; built by `from_arguments` only."""

    source: str
    target: str
    to: str
    scales: str
    rest: str
    shard_size: int
    threads: int
    json: bool

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Options:
        """Checks the values as typer delivers them. Raises UsageProblem."""
        from kdtree_engine.convert_plan import RESTS, TARGETS
        from kdtree_engine.quantize import SCALE_RULES

        a = dict(arguments)
        for name, known in (("to", TARGETS), ("scales", SCALE_RULES), ("rest", RESTS)):
            if a[name] not in known:
                raise exits.UsageProblem(f"--{name} is {a[name]!r}; it must be one of {', '.join(known)}")
        if a["rest"] != "same" and a["to"] != "int4":
            raise exits.UsageProblem(f"--rest goes with --to int4; --to {a['to']} is about every tensor")
        o.within("--threads", a["threads"], 0, 1024)
        a["shard_size"] = _size(a["shard_size"])
        return cls(**a)


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]{1,15})\s*([A-Za-z]{0,3})\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= int(match[1]) * unit <= 1 << 50:
        raise exits.UsageProblem(f"--shard-size is {text!r}; write a size like 500MiB or 4GiB")
    return int(match[1]) * unit


def execute(options: Options) -> int:
    """Runs the command. A stopped run says how to go on."""
    from kdtree_engine.convert import convert

    try:
        with console.byte_progress(f"converting {options.source}") as progress:
            report = convert(
                options.source,
                options.target,
                to=cast(Any, options.to),
                scales=cast(Any, options.scales),
                rest=cast(Any, options.rest),
                shard_bytes=options.shard_size,
                threads=options.threads,
                progress=progress,
            )
    except exits.Interrupted:
        console.log("the same command goes on where this one stopped")
        raise
    files = [Path(options.source) / name for name in ("tokenizer.json", "tiktoken.model")]
    if report.target.suffix == ".kdtr" and any(file.is_file() for file in files):
        console.log("note: a bundle holds no tokenizer; give its prompts as token ids (--prompt-tokens)")
    if options.json:
        print(json.dumps({**asdict(report), "target": str(report.target)}), flush=True)
        return exits.OK
    print(
        f"{console.visible(str(report.target), keep_lines=False)}: {report.tensors} tensors, "
        f"{console.byte_text(report.bytes)} in {report.shards} {'part' if report.shards == 1 else 'parts'}"
        + (f" ({report.resumed} from an earlier run)" if report.resumed else "")
        + f", {report.seconds:.1f} s"
    )
    if report.relative_error is not None:
        print(
            f"{report.quantised} matrices quantised, scales by {options.scales}: "
            f"relative error {report.relative_error:.4%}"
        )
    return exits.OK
