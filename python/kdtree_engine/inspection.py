"""What a checkpoint holds and what it needs, from headers alone: the same audit as loading, and no weight read.

Memory per device is a plan, for a model split over N devices in the usual manner of tensor parallelism: matrices are
cut by heads, by the width of an MLP or of an expert, or by the vocabulary; what feeds every part of a cut (q_a_proj,
kv_a_proj_with_mqa, the router, norms) is on every device, and so is the latent cache. INT4 is cut in whole groups.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from . import kdtr
from .config import ModelConfig
from .convert_config import bundle_model_type
from .convert_source import Matrix, Source, Stored, open_source
from .engine import text_side
from .errors import EngineError, fail
from .quantize import GROUP
from .templates import load_template

__all__ = ["DEVICES", "inspect_path"]

DEVICES = (1, 2, 4, 8)
CONTEXT = 8192  # tokens of the smaller of the two contexts that memory is stated for

COMPONENTS = (
    "embedding",
    "attention",
    "dense MLP",
    "router",
    "routed experts",
    "shared experts",
    "norms",
    "head",
)
_FORMS = {"int4": "int4 (w4a16, groups of 32)", "fp8": "fp8 (e4m3, blocks of 128)"}
# How a matrix is cut: by rows (its outputs) or by columns (its inputs); what is not named here is on every device.
_BY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_CUT = frozenset(_BY_ROWS + _BY_COLUMNS)


def inspect_path(path: Path) -> dict[str, Any]:
    """The report of a Hugging Face folder or a .kdtr file, as plain data (docs/cli.md names its fields);
    ``tensors`` is a list of Stored. Raises EngineError naming what is wrong."""
    with _no_collection():
        return _inspect(path)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Headers of a large model are a million small objects, none of them garbage: looking for it again and again
    is a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _inspect(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        if not path.exists():
            fail("io", f"{path} does not exist; expected a model folder or a .kdtr file")
        infos = kdtr.KdtrFile.open(path).infos()
        if not any(info.name.startswith("config.") for info in infos):
            stored = [Stored(t.name, t.dtype, t.shape, t.nbytes) for t in infos]
            return _report(path, "KDTR v1", "none: data only", stored) | {"config": {}}
    with open_source(path, checksums=False) as source:
        folder = path.is_dir()
        return _report(
            path,
            "Hugging Face folder" if folder else "KDTR v1, a bundle",
            source.config.model_type if folder else bundle_model_type(source.config.fields),
            source.stored,
        ) | _of_model(source)


def _report(path: Path, container: str, architecture: str, stored: Sequence[Stored]) -> dict[str, Any]:
    return {
        "path": str(path),
        "container": container,
        "architecture": architecture,
        "bytes": sum(tensor.nbytes for tensor in stored),
        "tensor_count": len(stored),
        "tensor_groups": [group._asdict() for group in groups(stored)],
        "tensors": stored,
    }


def _of_model(source: Source) -> dict[str, Any]:
    components: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    quantisation: dict[str, dict[str, int]] = {}
    parameters = 0
    for matrix in source.matrices:
        component = _component(matrix, source.config)
        components[component] = components.get(component, 0) + sum(part.nbytes for part in matrix.parts)
        if matrix.canonical is not None:
            parameters += math.prod(matrix.shape)
            form = _FORMS.get(matrix.form, matrix.main.dtype.lower())
            kinds = quantisation.setdefault(component, {})
            kinds[form] = kinds.get(form, 0) + 1
    weights = sum(components.values())
    other = sum(tensor.nbytes for tensor in source.stored) - weights
    components["config and other data"] = other
    kinds_of_all: dict[str, int] = {}
    for kinds in quantisation.values():
        for form, count in kinds.items():
            kinds_of_all[form] = kinds_of_all.get(form, 0) + count
    elements = _cache_elements(source.config)
    return {
        "config": dict(source.config.fields),
        "parameters": parameters,
        "quantisation": kinds_of_all,
        "quantisation_by_component": quantisation,
        "components": {name: size for name, size in components.items() if size},
        "kv_bytes_per_token": {"f32": 4 * elements, "bf16": 2 * elements},
        "devices": _devices(source),
        "text": _text(source),
    }


def _text(source: Source) -> dict[str, Any] | None:
    """The text side of a folder, checked as loading checks it: the tokenizer's file, end tokens and whether there is a
    chat template. None for a bundle. What needs a package that is not installed is not checked (``unchecked``: why)."""
    path = source.path
    if not path.is_dir():
        return None
    name = next((name for name in ("tiktoken.model", "tokenizer.json") if (path / name).exists()), None)
    text: dict[str, Any] = {"tokenizer": name, "end_tokens": [], "chat_template": None, "unchecked": None}
    try:
        text["end_tokens"] = sorted(text_side(path, source.config)[1])
        text["chat_template"] = load_template(path) is not None
    except EngineError as error:
        if error.code != "unsupported":
            raise
        text["unchecked"] = str(error)
    return text


def _component(matrix: Matrix, config: ModelConfig) -> str:
    name = matrix.canonical
    if name is None:
        if config.skipped and matrix.name.startswith(config.skipped):
            return "vision (not loaded)"
        return "stale buffers (not loaded)" if matrix.name.endswith("inv_freq") else "layers past the last (not loaded)"
    parts = name.split(".")
    if parts[0] == "lm_head":
        return "head"
    if parts[1] == "embed_tokens":
        return "embedding"
    module = parts[-2]
    if module.endswith("norm"):
        return "norms"
    if parts[3] == "self_attn":
        return "attention"
    if parts[4] == "experts":
        return "routed experts"
    if parts[4] == "shared_experts":
        return "shared experts"
    return "router" if parts[4] == "gate" else "dense MLP"


def _cache_elements(config: ModelConfig) -> int:
    """Of one token, in all layers."""
    return int(config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]))


# -- memory --------------------------------------------------------------------------------------------------------


def _devices(source: Source) -> list[dict[str, Any]]:
    """For each number of devices, the bytes that each of them needs; ``obstacle``: why the model cannot be split so,
    else None."""
    split = replicated = 0
    grouped: dict[int, str] = {}  # widths that are cut in groups, and a module that has them
    for matrix in source.matrices:
        if matrix.canonical is None:
            continue
        kind = matrix.module.rpartition(".")[2]
        size = _engine_bytes(matrix, source.config)
        if source.config.tie_word_embeddings and kind == "embed_tokens":
            size *= 2  # embedding and head
        if len(matrix.shape) == 2 and kind in _CUT:
            split += size
        else:
            replicated += size
        if matrix.form == "int4" and kind in _BY_COLUMNS:
            grouped.setdefault(matrix.shape[1], matrix.module)
    per_token = 2 * _cache_elements(source.config)
    most = int(source.config["max_position_embeddings"])
    rows = []
    for count in DEVICES:
        each = -(-split // count) + replicated
        rows.append(
            {
                "devices": count,
                "weights": each,
                "replicated": replicated,
                "with_cache": {str(n): each + n * per_token for n in sorted({min(CONTEXT, most), most})},
                "obstacle": _obstacle(source.config, grouped, count),
            }
        )
    return rows


def _engine_bytes(matrix: Matrix, config: ModelConfig) -> int:
    """Of a matrix as the engine keeps it under ``--rounding exact``: bf16 and INT4 as stored, fp8 as bf16 where the
    config says that its scales are powers of two, everything else and all vectors as float32."""
    if matrix.form == "int4":
        assert matrix.scales is not None
        return matrix.main.nbytes + matrix.scales.nbytes
    exact = config.quantization is not None and config.quantization.powers_of_two
    narrow = exact if matrix.form == "fp8" else matrix.main.dtype == "BF16"
    return math.prod(matrix.shape) * (2 if narrow and len(matrix.shape) == 2 else 4)


def _obstacle(config: ModelConfig, grouped: Mapping[int, str], count: int) -> str | None:
    fields = ["num_attention_heads", "vocab_size"]
    if config["first_k_dense_replace"] or not config["n_routed_experts"]:
        fields.append("intermediate_size")
    if config["n_routed_experts"]:
        fields.append("moe_intermediate_size")
    for field in fields:
        if config[field] % count:
            return f"{field} is {config[field]:.0f}, which {count} does not divide"
    for width, module in grouped.items():
        if width // count % GROUP:
            return f"{width} / {count} = {width // count} inputs of {module} are no whole groups of {GROUP}"
    return None


# -- lists of tensors ----------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Tensors whose names differ in numbers only, of one dtype and shape. ``name`` has ranges for those numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensors: int
    nbytes: int


def groups(stored: Iterable[Stored]) -> Iterator[Group]:
    """The tensors, grouped, in the order of their first appearance."""
    modules: dict[str, tuple[str, list[int]]] = {}  # the numbers of a module, and its name without them
    found: dict[tuple[str, str, str, tuple[int, ...]], list[Any]] = {}  # bytes; numbers of each tensor
    for name, dtype, shape, nbytes in stored:
        module, _, kind = name.rpartition(".")
        known = modules.get(module)
        if known is None:
            parts = module.split(".")
            at = [i for i, part in enumerate(parts) if part.isdecimal()]
            numbers = [int(parts[i]) for i in at]
            for i in at:
                parts[i] = "\0"
            known = ".".join(parts), numbers
            modules[module] = known
        pattern, numbers = known
        key = (pattern, kind, dtype, shape)
        seen = found.get(key)
        if seen is None:
            found[key] = [nbytes, [numbers]]
            continue
        seen[0] += nbytes
        seen[1].append(numbers)
    for (pattern, kind, dtype, shape), (nbytes, all_numbers) in found.items():
        count = len(all_numbers)
        spans = ((min(places), max(places)) for places in zip(*all_numbers, strict=True))
        ranges = (str(a) if a == b else f"{{{a}-{b}}}" for a, b in spans)
        name = "".join(next(ranges) if c == "\0" else c for c in pattern)
        yield Group(f"{name}.{kind}" if name else kind, dtype, shape, count, nbytes)
