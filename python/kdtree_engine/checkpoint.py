"""Checkpoints: a Hugging Face folder or a .kdtr bundle, audited whole, then streamed into the native builder.

The audit goes both ways before a single tensor is used: index against shards, headers against file sizes,
and the names in the files against the names that the config implies. Each expected tensor must be there
exactly once with its shape and a known dtype; what nobody expects is an error that names it, because a
tensor that is silently left out is a model that is silently wrong. Two kinds of names are ignored:
``rotary_emb.inv_freq`` (stale buffers that some converters leave behind) and layers past
``num_hidden_layers`` (multi-token prediction).

Routed experts come one by one (``mlp.experts.E.gate_proj.weight``) or fused over all experts of a layer
(``mlp.experts.gate_up_proj`` [E, 2I, H] with the gate rows first, ``mlp.experts.down_proj`` [E, H, I]), as
transformers 5 saves them with ``save_original_format=False``.

Weights go one tensor at a time, in file order: peak memory is the model plus one tensor. bf16 stays bf16,
f16 is widened to f32, which is exact; vectors (norms, the router's bias) are float32 in the engine whatever
they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import kdtr
from .config import DEFAULT_LATENT_NORM_EPS, FIELDS, ModelConfig, load_json, parse_config
from .errors import EngineError, fail
from .safetensors_file import SafetensorsFile, TensorEntry

__all__ = ["Bundle", "Checkpoint", "Folder", "Progress", "TensorInfo", "open_checkpoint"]

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""

Expected = Iterable[tuple[str, list[int], bool]]
"""What the builder expects: full name, shape, and whether INT4 may stand for it."""


class Builder(Protocol):
    """The part of the native EngineBuilder that loading uses."""

    def expected(self) -> list[tuple[str, list[int], bool]]: ...
    def add(self, name: str, array: npt.NDArray[Any]) -> None: ...
    def add_w4a16(self, module: str, qw: npt.NDArray[Any], sc: npt.NDArray[Any]) -> None: ...


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


class Checkpoint(Protocol):
    """A checkpoint that is open and whose container is sound. Close it, or use it in a ``with``."""

    path: Path
    config: ModelConfig

    def tensors(self) -> list[TensorInfo]:
        """Everything in the files, what loading ignores included."""

    def check_extent(self) -> None:
        """See that the last layer and the last expert of the config are there. Cheap; to be called before a
        builder is made, which allocates for as many as the config claims."""

    def load_into(self, builder: Builder, progress: Progress | None = None) -> None:
        """Audit against ``builder.expected()``, then add every tensor. Raises EngineError."""

    def close(self) -> None: ...
    def __enter__(self) -> Checkpoint: ...
    def __exit__(self, *_: object) -> None: ...


def open_checkpoint(path: str | Path, latent_norm_eps: float | None = None) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a .kdtr bundle.

    `latent_norm_eps` is the eps of q_a_layernorm and kv_a_layernorm, which no config.json states; None
    means 1e-6 for a folder and, for a bundle, what the bundle says. Raises EngineError: ``io`` where there
    is nothing to read, ``bad_file``, ``bad_model`` or ``unsupported`` for what is there but cannot be used.
    """
    path = Path(path)
    if path.is_dir():
        return Folder(path, DEFAULT_LATENT_NORM_EPS if latent_norm_eps is None else latent_norm_eps)
    if not path.exists():
        fail("io", f"{path} does not exist; expected a model folder or a .kdtr bundle")
    if path.suffix != ".kdtr":
        fail("bad_file", f"{path} is neither a folder nor a .kdtr bundle")
    return Bundle(path, latent_norm_eps)


class _Closing:
    def close(self) -> None:
        """Nothing is open by default."""

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def naming(path: Path, *codes: str) -> Iterator[None]:
    """The builder knows tensors and fields but no files: put the file before what it says (with one of
    `codes`, where any are given)."""
    try:
        yield
    except EngineError as error:
        if codes and error.code not in codes:
            raise
        fail(error.code, f"{path}: {error}", error)


def _check_extent(path: Path, config: ModelConfig, names: Collection[str]) -> None:
    last = int(config["num_hidden_layers"]) - 1
    experts = int(config["n_routed_experts"])
    probes: list[tuple[str, tuple[str, ...]]] = [
        ("num_hidden_layers", (f"model.layers.{last}.input_layernorm.weight",))
    ]
    if experts > 0 and last >= config["first_k_dense_replace"]:
        base = f"model.layers.{last}.mlp.experts"
        expert = f"{base}.{experts - 1}.down_proj"
        probes.append(("n_routed_experts", (f"{expert}.weight", f"{expert}.qw", f"{base}.down_proj")))
    for field, any_of in probes:
        if not any(name in names for name in any_of):
            fail("bad_model", f"{path}: {field} is {config[field]:.0f}, but {any_of[0]} is missing")


def _require_all(path: Path, wanted: Collection[str], missing: list[str]) -> None:
    if missing:
        fail(
            "bad_model",
            f"{path}: {len(missing)} of {len(wanted)} tensors are missing, the first is {missing[0]}",
        )


# -- Hugging Face folders --------------------------------------------------------------------------------

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_FUSED = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class _Piece:
    """An expected tensor and the part of a file's tensor that holds it."""

    name: str
    source: TensorEntry
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Folder(_Closing):
    """A Hugging Face folder: config.json with model.safetensors, or with an index and its shards."""

    def __init__(self, path: Path, latent_norm_eps: float = DEFAULT_LATENT_NORM_EPS) -> None:
        self.path = path
        self._files: list[SafetensorsFile] = []
        config_path = path / "config.json"
        if not config_path.exists():
            fail("bad_file", f"the folder {path} has no config.json")
        self.config = parse_config(load_json(config_path), str(config_path), latent_norm_eps)
        try:
            self._entries = self._open_shards()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def close(self) -> None:
        for file in self._files:
            file.close()

    def tensors(self) -> list[TensorInfo]:
        return [
            TensorInfo(e.name, e.dtype, e.shape, e.nbytes, e.file.path.name) for e in self._entries.values()
        ]

    def check_extent(self) -> None:
        _check_extent(self.path, self.config, self._entries)
        fused = (e for name, e in self._entries.items() if _FUSED.fullmatch(name))
        for entry in fused:
            if entry.shape[:1] != (self.config["n_routed_experts"],) and not self._ignorable(entry.name):
                fail(
                    "bad_model",
                    f"{entry.file.path}: {entry.name} has shape {list(entry.shape)}, "
                    f"but n_routed_experts is {self.config['n_routed_experts']:.0f}",
                )

    def load_into(self, builder: Builder, progress: Progress | None = None) -> None:
        pieces = self._audit(builder.expected())
        total = sum(piece.nbytes for piece in pieces)
        buffer = np.empty(max((piece.nbytes for piece in pieces), default=0), np.uint8)
        done = 0
        for piece in pieces:
            raw = buffer[: piece.nbytes]
            piece.source.file.read_into(raw.data, piece.offset)
            with naming(piece.source.file.path):
                builder.add(piece.name, _as_array(raw, piece))
            done += piece.nbytes
            if progress is not None:
                progress(done, total)

    def _open_shards(self) -> dict[str, TensorEntry]:
        index, single = self.path / _INDEX, self.path / _SINGLE
        if index.exists() and single.exists():
            fail("bad_file", f"the folder {self.path} has both {_SINGLE} and {_INDEX}; expected one of them")
        if not index.exists():
            if not single.exists():
                fail("bad_file", f"the folder {self.path} has neither {_SINGLE} nor {_INDEX}")
            self._files.append(SafetensorsFile(single))
            return dict(self._files[0].tensors)

        weight_map = load_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            fail("bad_file", f"{index}: weight_map is missing or empty")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
                fail("bad_file", f"{index}: {name} lies in {shard!r}; expected a file of the folder")
        entries: dict[str, TensorEntry] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self.path / shard).exists():
                fail("bad_file", f"{index} names the shard {shard}, which is not in the folder")
            file = SafetensorsFile(self.path / shard)
            self._files.append(file)
            for name, entry in file.tensors.items():
                where = weight_map.get(name)
                if where is None:
                    fail("bad_file", f"{file.path}: the tensor {name} is not in {_INDEX}, which is stale")
                if where != shard:
                    fail("bad_file", f"{file.path}: the tensor {name} belongs to {where} by {_INDEX}")
                entries[name] = entry
        for name, shard in weight_map.items():
            if name not in entries:
                fail("bad_file", f"{index} is stale: {shard} does not hold {name}")
        return entries

    def _audit(self, expected: Expected) -> list[_Piece]:
        """Match files and expectation one to one; the pieces come in the order of the files."""
        wanted = {name: tuple(shape) for name, shape, _ in expected}
        pieces: dict[str, _Piece] = {}
        unknown: list[TensorEntry] = []
        for entry in self._entries.values():
            if self._ignorable(entry.name):
                continue
            parts = list(self._parts(entry, wanted))
            if not parts:
                unknown.append(entry)
            for part in parts:
                if part.name in pieces:
                    fail(
                        "bad_model",
                        f"{entry.file.path}: {part.name} is also in {pieces[part.name].source.name}",
                    )
                pieces[part.name] = part
        if unknown:
            first, more = unknown[0], f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            fail("bad_model", f"{first.file.path}: the tensor {first.name} is not one of this model's{more}")
        if self.config.tie_word_embeddings and "model.embed_tokens.weight" in pieces:
            pieces["lm_head.weight"] = replace(pieces["model.embed_tokens.weight"], name="lm_head.weight")
        _require_all(self.path, wanted, [name for name in wanted if name not in pieces])
        return list(pieces.values())

    def _ignorable(self, name: str) -> bool:
        layer = _LAYER.match(name)
        past_the_end = layer is not None and int(layer[1]) >= self.config["num_hidden_layers"]
        return past_the_end or name.endswith("rotary_emb.inv_freq")

    def _parts(self, entry: TensorEntry, wanted: Mapping[str, tuple[int, ...]]) -> Iterable[_Piece]:
        """The expected tensors that `entry` holds: itself, the experts of a fused tensor, or none."""
        if entry.name in wanted:
            if entry.name == "lm_head.weight" and self.config.tie_word_embeddings:
                fail("bad_model", f"{entry.file.path}: lm_head.weight contradicts tie_word_embeddings true")
            _check(entry, wanted[entry.name])
            yield _Piece(entry.name, entry, entry.shape, entry.offset, entry.nbytes)
            return
        fused = _FUSED.fullmatch(entry.name)
        if fused is None or f"{fused[1]}.0.down_proj.weight" not in wanted:
            return
        experts = int(self.config["n_routed_experts"])
        parts = ("down_proj",) if fused[2] == "down_proj" else ("gate_proj", "up_proj")
        rows, columns = wanted[f"{fused[1]}.0.{parts[0]}.weight"]
        _check(entry, (experts, len(parts) * rows, columns))
        nbytes = entry.nbytes // (experts * len(parts))
        for i in range(experts * len(parts)):
            name = f"{fused[1]}.{i // len(parts)}.{parts[i % len(parts)]}.weight"
            yield _Piece(name, entry, (rows, columns), entry.offset + i * nbytes, nbytes)


def _check(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        fail(
            "bad_model",
            f"{entry.file.path}: the tensor {entry.name} has shape {list(entry.shape)}; "
            f"expected {list(shape)}",
        )
    if entry.dtype not in _FLOATS:
        fail(
            "bad_model",
            f"{entry.file.path}: the tensor {entry.name} has dtype {entry.dtype}; expected F32, BF16 or F16",
        )


def _as_array(raw: npt.NDArray[np.uint8], piece: _Piece) -> npt.NDArray[Any]:
    """float32 or, for bf16, its bits as uint16; f16 is widened, which is exact."""
    if piece.source.dtype == "F32":
        return raw.view("<f4").reshape(piece.shape)
    if piece.source.dtype == "BF16":
        return raw.view("<u2").reshape(piece.shape)
    return raw.view("<f2").reshape(piece.shape).astype(np.float32)


# -- .kdtr bundles ---------------------------------------------------------------------------------------

_CONFIG = "config."
_WEIGHTS = ("model.", "lm_head.")  # the checkpoint's own name space; a bundle may hold golden data beside it


class Bundle(_Closing):
    """A .kdtr bundle: ``config.KEY`` scalars, weights by their checkpoint names (``NAME.qw`` and
    ``NAME.sc`` where a matrix is INT4) and, in golden bundles, data of tests under other names."""

    def __init__(self, path: Path, latent_norm_eps: float | None = None) -> None:
        self.path = path
        self.arrays: dict[str, npt.NDArray[Any]] = kdtr.read(path)
        fields = {
            name.removeprefix(_CONFIG): self._scalar(name) for name in self.arrays if name.startswith(_CONFIG)
        }
        if not fields:
            fail("bad_model", f"{path} has no config.* scalars: it is not a model bundle")
        if latent_norm_eps is not None:
            fields["latent_norm_eps"] = latent_norm_eps
        for what, names in (
            ("is missing", [key for key in FIELDS if key not in fields]),
            ("is not a field of this version", sorted(set(fields) - set(FIELDS))),
        ):
            if names:
                fail("bad_model", f"{path}: {_CONFIG}{names[0]} {what}")
        self.config = ModelConfig(fields)

    def __enter__(self) -> Bundle:
        return self

    def tensors(self) -> list[TensorInfo]:
        return [
            TensorInfo(name, _dtype_name(a.dtype), a.shape, a.nbytes, self.path.name)
            for name, a in self.arrays.items()
        ]

    def recorded(self) -> dict[str, npt.NDArray[Any]]:
        """What the bundle holds beside config and weights."""
        return {name: a for name, a in self.arrays.items() if not name.startswith((_CONFIG, *_WEIGHTS))}

    def check_extent(self) -> None:
        _check_extent(self.path, self.config, self.arrays)

    def load_into(self, builder: Builder, progress: Progress | None = None) -> None:
        wanted = {name: may_be_int4 for name, _, may_be_int4 in builder.expected()}
        plan: dict[str, tuple[npt.NDArray[Any], ...]] = {}  # module (two arrays) or full name (one)
        for name, array in self.arrays.items():
            module, _, kind = name.rpartition(".")
            if kind in ("qw", "sc") and f"{module}.weight" in wanted:
                if f"{module}.weight" in self.arrays:
                    fail("bad_model", f"{self.path}: {module} has both .weight and .{kind}")
                for part in (f"{module}.qw", f"{module}.sc"):
                    if part not in self.arrays:
                        fail("bad_model", f"{self.path}: {name} is there, but {part} is missing")
                plan[module] = (self.arrays[f"{module}.qw"], self.arrays[f"{module}.sc"])
            elif name in wanted:
                plan[name] = (array,)
            elif name.startswith(_WEIGHTS):
                fail("bad_model", f"{self.path}: the tensor {name} is not one of this model's")
        _require_all(
            self.path, wanted, [n for n in wanted if n not in plan and n.removesuffix(".weight") not in plan]
        )
        total = sum(a.nbytes for arrays in plan.values() for a in arrays)
        done = 0
        for name, arrays in plan.items():
            given = [self._loadable(name, a) for a in arrays]
            with naming(self.path):
                if len(given) == 2:
                    builder.add_w4a16(name, given[0], given[1])
                else:
                    builder.add(name, given[0])
            done += sum(a.nbytes for a in arrays)
            if progress is not None:
                progress(done, total)

    def _scalar(self, name: str) -> float:
        array = self.arrays[name]
        if array.shape != () or array.dtype.name not in ("float64", "float32", "int64", "int32", "uint8"):
            fail("bad_model", f"{self.path}: {name} is {array.dtype.name} {list(array.shape)}, no scalar")
        if not np.isfinite(array):
            fail("bad_model", f"{self.path}: {name} is {float(array)}; expected a finite number")
        return float(array)

    def _loadable(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if kdtr.is_bf16(array.dtype):
            return kdtr.bf16_bits(array)
        if array.dtype == np.float16:
            return kdtr.to_float32(array)
        if array.dtype not in (np.float32, np.int32):
            kind = _dtype_name(array.dtype)
            fail("bad_model", f"{self.path}: {name} has dtype {kind}; expected f32, bf16, f16 or INT4 words")
        return array


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """A dtype as KDTR calls it."""
    return "bf16" if kdtr.is_bf16(dtype) else f"{dtype.kind}{8 * dtype.itemsize}"
