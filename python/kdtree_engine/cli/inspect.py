"""`kdtree inspect`: what a model or file holds. Headers only: no weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdtree_engine.cli import console, exits

FEW = 500  # tensors that are listed one by one unless asked otherwise


def execute(path: str, as_json: bool, every_tensor: bool) -> int:
    """Prints the report. Raises EngineError naming what is wrong with the path."""
    from kdtree_engine.inspection import inspect_path

    report = inspect_path(Path(path))
    every_tensor = every_tensor or report["tensor_count"] <= FEW
    if as_json:
        tensors = report.pop("tensors")
        if every_tensor:
            report["tensors"] = [tensor._asdict() for tensor in tensors]
        print(json.dumps(report, indent=2), flush=True)
    else:
        for line in _lines(report, every_tensor):
            print(line)
    return exits.OK


def _lines(report: dict[str, Any], every_tensor: bool) -> Iterator[str]:
    yield f"path           {console.visible(report['path'], keep_lines=False)}"
    yield f"container      {report['container']}, {console.byte_text(report['bytes'])} of tensors"
    yield f"architecture   {report['architecture']}"
    if report["config"]:
        yield "config         " + ", ".join(f"{k} {v:.10g}" for k, v in report["config"].items())
        yield from _model_lines(report)
    yield f"tensors        {report['tensor_count']}"
    if every_tensor:
        listed = [(t.name, t.dtype, t.shape, 1) for t in report["tensors"]]
    else:
        listed = [(g["name"], g["dtype"], g["shape"], g["tensors"]) for g in report["tensor_groups"]]
    for name, dtype, shape, count in listed:
        many = f"  x {count}" if count > 1 else ""
        yield f"  {console.visible(name, keep_lines=False):64} {dtype.lower():8} {list(shape)}{many}"


def _model_lines(report: dict[str, Any]) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["quantisation"].items())
    yield f"weights        {report['parameters']:,} parameters; matrices and vectors: {kinds}"
    yield "bytes"
    for name, size in report["components"].items():
        forms = ", ".join(report["quantisation_by_component"].get(name, {}))
        yield f"  {name:34} {size:>18,}  {forms}".rstrip()
    text = report["text"]
    if text is not None:
        ends = ", ".join(map(str, text["end_tokens"])) or "none"
        template = "with" if text["chat_template"] else "without"
        checked = f"{text['tokenizer'] or 'no tokenizer'}; end tokens {ends}; {template} chat template"
        told = text["unchecked"] or checked
        yield f"text           {console.visible(told, keep_lines=False)}"
    cache = report["kv_bytes_per_token"]
    yield f"KV cache       {cache['bf16']:,} bytes per token in bf16, {cache['f32']:,} in float32 (CPU)"
    contexts = list(report["devices"][0]["with_cache"])
    yield "memory         of each device: weights, and with a bf16 cache for so many tokens"
    yield f"  {'devices':8} {'weights':>14}" + "".join(f"{int(tokens):>16,}" for tokens in contexts)
    for row in report["devices"]:
        if row["obstacle"] is not None:
            yield f"  {row['devices']:<8} {'-':>14}  {row['obstacle']}"
            continue
        sizes = "".join(f"{console.byte_text(row['with_cache'][tokens]):>16}" for tokens in contexts)
        yield f"  {row['devices']:<8} {console.byte_text(row['weights']):>14}{sizes}"
