"""`kdtree inspect`: what a model or file holds. Headers only: no weight is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kdtree_engine.cli import console, exits
from kdtree_engine.errors import fail

CACHE_BYTES = 4  # the CPU backend's latent cache is float32

# Components by tensor name, first match wins. Names of layers past num_hidden_layers are listed as unused.
_COMPONENTS = (
    ("embedding", r"model\.embed_tokens\."),
    ("head", r"lm_head\."),
    ("routed experts", r"model\.layers\.\d+\.mlp\.experts\."),
    ("shared experts", r"model\.layers\.\d+\.mlp\.shared_experts\."),
    ("router", r"model\.layers\.\d+\.mlp\.gate\."),
    ("dense MLP", r"model\.layers\.\d+\.mlp\."),
    ("norms", r"model\.(layers\.\d+\.)?[a-z_]*norm\.|model\.layers\.\d+\.self_attn\.[a-z_]*norm\."),
    ("attention", r"model\.layers\.\d+\.self_attn\."),
)


def execute(path: str, as_json: bool) -> int:
    """Prints the report. Raises EngineError naming what is wrong with the path."""
    report = collect(Path(path))
    if as_json:
        print(json.dumps(report, indent=2), flush=True)
    else:
        for line in _lines(report):
            print(line)
    return exits.OK


def collect(path: Path) -> dict[str, Any]:
    """The report as plain data. Raises EngineError."""
    if path.is_dir():
        from kdtree_engine.checkpoint import open_checkpoint

        with open_checkpoint(path) as checkpoint:
            config = dict(checkpoint.config.fields)
            architecture = checkpoint.config.model_type
            tensors = [(t.name, t.dtype.lower(), t.shape, t.nbytes) for t in checkpoint.tensors()]
        container = "Hugging Face folder"
    else:
        from kdtree_engine.kdtr import KdtrFile

        if not path.exists():
            fail("io", f"{path} does not exist; expected a model folder or a .kdtr file")
        file = KdtrFile.open(path)
        tensors = [(t.name, t.dtype, t.shape, t.nbytes) for t in file.infos()]
        config = {
            name.removeprefix("config."): float(file[name])
            for name, _, shape, _ in tensors
            if name.startswith("config.") and shape == ()
        }
        architecture = "bundle" if config else "none: data only"
        container = "KDTR v1"
    return {
        "path": str(path),
        "container": container,
        "architecture": architecture,
        "config": config,
        "tensors": [
            {"name": name, "dtype": dtype, "shape": list(shape), "bytes": nbytes}
            for name, dtype, shape, nbytes in tensors
        ],
        "bytes": sum(nbytes for *_, nbytes in tensors),
        "parameters": sum(_elements(name, shape) for name, _, shape, _ in tensors if _is_weight(name)),
        "quantisation": _quantisation((name, dtype) for name, dtype, *_ in tensors),
        "components": _components(((name, nbytes) for name, _, _, nbytes in tensors), config),
        "kv_bytes_per_token": _kv_bytes(config),
    }


def _is_weight(name: str) -> bool:
    return name.startswith(("model.", "lm_head."))


def _elements(name: str, shape: tuple[int, ...]) -> int:
    """Parameters in a tensor: eight to an INT4 word, none in its scales."""
    count = 1
    for extent in shape:
        count *= extent
    if name.endswith(".sc"):
        return 0
    return 8 * count if name.endswith(".qw") else count


def _quantisation(tensors: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Number of weight tensors per kind: an INT4 matrix (words and scales) is one."""
    kinds: dict[str, int] = {}
    for name, dtype in tensors:
        if not _is_weight(name) or name.endswith(".sc"):
            continue
        kind = "int4 (w4a16, groups of 32)" if name.endswith(".qw") else dtype
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def _components(tensors: Iterable[tuple[str, int]], config: Mapping[str, float]) -> dict[str, int]:
    """Bytes per component, those that are there, in the order of a forward pass."""
    sizes = dict.fromkeys(
        (
            "embedding",
            "attention",
            "dense MLP",
            "router",
            "routed experts",
            "shared experts",
            "norms",
            "head",
        ),
        0,
    )
    layers = config.get("num_hidden_layers", float("inf"))
    for name, nbytes in tensors:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= layers:
            component = "unused (layers past the last)"
        elif not _is_weight(name):
            component = "config" if name.startswith("config.") else "other data"
        else:
            component = next((c for c, pattern in _COMPONENTS if re.match(pattern, name)), "other weights")
        sizes[component] = sizes.get(component, 0) + nbytes
    return {name: size for name, size in sizes.items() if size}


def _kv_bytes(config: Mapping[str, float]) -> int | None:
    try:
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return int(config["num_hidden_layers"] * width) * CACHE_BYTES
    except KeyError:
        return None


def _lines(report: dict[str, Any]) -> list[str]:
    weights = [t for t in report["tensors"] if _is_weight(t["name"])]
    lines = [
        f"path           {console.visible(report['path'], keep_lines=False)}",
        f"container      {report['container']}, {console.byte_text(report['bytes'])} of tensors",
        f"architecture   {report['architecture']}",
    ]
    if report["config"]:
        lines.append("config         " + ", ".join(f"{k} {v:.10g}" for k, v in report["config"].items()))
    if weights:
        kinds = ", ".join(f"{count} {kind}" for kind, count in report["quantisation"].items())
        lines.append(f"weights        {report['parameters']:,} parameters; tensors: {kinds}")
    if report["components"]:
        lines.append("bytes")
        lines += [f"  {name:30} {size:>16,}" for name, size in report["components"].items()]
    if report["kv_bytes_per_token"] is not None:
        lines.append(
            f"KV cache       {report['kv_bytes_per_token']:,} bytes per token (float32, CPU backend)"
        )
    lines.append(f"tensors        {len(report['tensors'])}")
    for t in report["tensors"]:
        name = console.visible(t["name"], keep_lines=False)
        lines.append(f"  {name:64} {t['dtype']:5} {t['shape']}")
    return lines
