"""A Hugging Face folder: config.json and safetensors, audited whole, then streamed into the builder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .checkpoint_audit import Item, Names, audit
from .checkpoint_base import (
    Builder,
    CheckpointBase,
    Progress,
    Rounding,
    TensorInfo,
    check_extent,
    collector_paused,
    naming,
)
from .checkpoint_stream import Piece, Stream
from .config import DEFAULT_LATENT_NORM_EPS, load_json, parse_config
from .errors import fail
from .safetensors_file import SafetensorsFile, TensorEntry

__all__ = ["Folder", "as_array", "open_shards", "refuse_zeros"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_KINDS = (".json", ".safetensors", ".model", ".jinja")  # files that are read
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".npz")
_PROBES = 8  # places of each file that are looked at before loading
_PROGRESS_SECONDS = 0.05


class Folder(CheckpointBase):
    """A Hugging Face folder: config.json with model.safetensors, or with an index and its shards."""

    def __init__(self, path: Path, latent_norm_eps: float = DEFAULT_LATENT_NORM_EPS) -> None:
        self.path = path
        self._files: list[SafetensorsFile] = []
        _refuse_dangling(path)
        config_path = path / "config.json"
        if not config_path.exists():
            fail("bad_file", f"the folder {path} has no config.json")
        self.config = parse_config(load_json(config_path), str(config_path), latent_norm_eps)
        try:
            names = Names(self.config)
            canonical = names.canonical
            with collector_paused():
                self._entries = open_shards(path, self._files)
                self._named = [(canonical(name), entry) for name, entry in self._entries.items()]
            names.check_left_out(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def close(self) -> None:
        for file in self._files:
            file.close()

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor by its stored name, in the order of the files."""
        return self._entries

    @property
    def files(self) -> list[Path]:
        """The files that hold them."""
        return [file.path for file in self._files]

    def tensors(self) -> list[TensorInfo]:
        return [
            TensorInfo(e.name, e.dtype, e.shape, e.nbytes, e.file.path.name, name) for name, e in self._named
        ]

    def check_extent(self) -> None:
        check_extent(self.path, self.config, {name for name, _ in self._named})
        experts = self.config["n_routed_experts"]
        for name, entry in self._named:
            fused = name is not None and name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))
            if fused and entry.shape[:1] != (experts,):
                fail(
                    "bad_model",
                    f"{entry.file.path}: {entry.name} has shape {list(entry.shape)}, "
                    f"but n_routed_experts is {experts:.0f}",
                )

    def audit(self, expected: Iterable[tuple[str, list[int], bool]]) -> list[Item]:
        """See checkpoint_audit.audit. Reads no weight."""
        with collector_paused():
            return audit(self.path, self.config, self._named, expected)

    def load_into(
        self, builder: Builder, progress: Progress | None = None, rounding: Rounding = "exact"
    ) -> None:
        items = self.audit(builder.expected())
        order = {id(file): i for i, file in enumerate(self._files)}
        items.sort(key=lambda item: (order[id(item.entry.file)], item.pieces[0].offset))
        self._check_memory(items, builder, rounding)
        self._probe(items)
        total = sum(piece.nbytes for item in items for piece in item.pieces)
        done, told = 0, 0.0
        with Stream([item.pieces for item in items]) as stream:
            for item, parts in zip(items, stream, strict=True):
                refuse_zeros(item, parts)
                with naming(item.entry.file.path):
                    _hand_over(builder, item, parts, rounding == "bf16")
                done += sum(piece.nbytes for piece in item.pieces)
                if progress is not None and (done == total or time.monotonic() - told > _PROGRESS_SECONDS):
                    progress(done, total)
                    told = time.monotonic()

    def _check_memory(self, items: Iterable[Item], builder: Builder, rounding: Rounding) -> None:
        needed = sum(_engine_bytes(item, rounding == "bf16") for item in items)
        left = getattr(builder, "memory_available", None)
        if left is not None and needed > left:
            fail(
                "out_of_memory",
                f"{self.path}: the weights need {needed / 2**30:.1f} GiB; {left / 2**30:.1f} GiB are left",
            )

    def _probe(self, items: list[Item]) -> None:
        """A shard whose header arrived and whose data did not is a file of the right size, full of zeros.
        So before anything is used, some tensors of each file are looked at."""
        by_file: dict[int, list[Item]] = {}
        for item in items:
            by_file.setdefault(id(item.entry.file), []).append(item)
        for of_file in by_file.values():
            step = max(1, len(of_file) // _PROBES)
            for item in of_file[::step]:
                refuse_zeros(item, [_Lazy(piece) for piece in item.pieces])


def open_shards(path: Path, files: list[SafetensorsFile]) -> dict[str, TensorEntry]:
    """Open the safetensors files of the folder `path` into `files`, index and shards matched both ways; their
    tensors by name. Raises EngineError; what was opened by then is in `files`."""
    index, single = path / _INDEX, path / _SINGLE
    if index.exists() and single.exists():
        fail("bad_file", f"the folder {path} has both {_SINGLE} and {_INDEX}; expected one of them")
    if not index.exists():
        if not single.exists():
            others = sorted(p.name for p in path.iterdir() if p.suffix in _OTHER_WEIGHTS)
            found = f"; {others[0]} is of a format that is not read" if others else ""
            fail("bad_file", f"the folder {path} has neither {_SINGLE} nor {_INDEX}{found}")
        _refuse_strays(path, {_SINGLE})
        files.append(SafetensorsFile(single))
        return dict(files[0].tensors)

    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        fail("bad_file", f"{index}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not name.isprintable():
            fail("bad_file", f"{index}: a tensor is called {name!a}; expected printable characters")
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(".safetensors"):
            fail("bad_file", f"{index}: {name} lies in {shard!r}; expected a file of the folder")
    shards = set(weight_map.values())
    _refuse_strays(path, shards)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(shards):
        if not (path / shard).exists():
            fail("bad_file", f"{index} names the shard {shard}, which is not in the folder")
        file = SafetensorsFile(path / shard)
        files.append(file)
        for name, entry in file.tensors.items():
            where = weight_map.get(name)
            if where is None:
                fail("bad_file", f"{file.path}: the tensor {name} is not in {_INDEX}, which is stale")
            if where != shard:
                fail("bad_file", f"{file.path}: the tensor {name} belongs to {where} by {_INDEX}")
            entries[name] = entry
    if len(entries) < len(weight_map):
        name = next(name for name in weight_map if name not in entries)
        fail("bad_file", f"{index} is stale: {weight_map[name]} does not hold {name}")
    return entries


def _refuse_dangling(folder: Path) -> None:
    """Links whose file is gone, as in a download cache that was cleaned: not the same as a file that never was."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        fail("io", f"cannot read the folder {folder}: {error.strerror or error}", error)
    for path in found:
        if path.suffix in _KINDS and path.is_symlink() and not os.path.exists(path):
            fail("bad_file", f"{path} is a link to {os.readlink(path)}, which does not exist or cannot be reached")


def _refuse_strays(folder: Path, known: set[str]) -> None:
    """Weights that nothing refers to: a shard of another download, an adapter that would be left out."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in known:
            fail("bad_file", f"{path} is not one of the model's files; remove it or correct {_INDEX}")


class _Lazy:
    """The bytes of a piece, read where they are asked for: enough of an array for `refuse_zeros`."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    def __len__(self) -> int:
        return self._piece.nbytes

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint8]:
        start, stop, _ = part.indices(self._piece.nbytes)
        buffer = np.empty(stop - start, np.uint8)
        self._piece.file.read_into(buffer.data, self._piece.offset + start)
        return buffer


def refuse_zeros(item: Item, parts: Iterable[npt.NDArray[np.uint8] | _Lazy]) -> None:
    """No matrix and no norm is zero throughout; a router's bias may be."""
    if item.name.endswith("bias"):
        return
    for piece, part in zip(item.pieces, parts, strict=True):
        if not any(block.any() for block in _blocks(part)):
            entry = next(
                e for e in (item.entry, item.scales, item.sizes) if e is not None and _inside(piece, e)
            )
            fail("bad_file", f"{entry.file.path}: {entry.name} holds nothing but zeros, as if never written")


def _inside(piece: Piece, entry: TensorEntry) -> bool:
    return piece.file is entry.file and entry.offset <= piece.offset < entry.offset + entry.nbytes


def _blocks(part: npt.NDArray[np.uint8] | _Lazy) -> Iterator[npt.NDArray[np.uint8]]:
    """Small at first: one look is enough for every tensor that is not zero."""
    start, step = 0, 4096
    while start < len(part):
        yield part[start : start + step]
        start, step = start + step, 1 << 20


def _engine_bytes(item: Item, to_bf16: bool) -> int:
    """Bytes of an item's weights in the engine, at least."""
    count = int(np.prod(item.shape, dtype=np.int64))
    if item.kind == "plain":
        return count * (2 if item.entry.dtype == "BF16" else 4)
    if item.kind == "fp8" or to_bf16:
        return count * 2
    return sum(piece.nbytes for piece in item.pieces[:2])


def _hand_over(builder: Builder, item: Item, parts: list[npt.NDArray[np.uint8]], to_bf16: bool) -> None:
    main = as_array(parts[0], item.entry, item.pieces[0])
    if item.kind == "plain":
        builder.add(item.name, main.reshape(item.shape))
        return
    assert item.scales is not None
    scales = as_array(parts[1], item.scales, item.pieces[1]).reshape(item.scales.shape)
    if item.kind == "fp8":
        if scales.dtype == np.uint16:
            scales = (scales.astype(np.uint32) << 16).view(np.float32)
        builder.add_fp8(item.name, main.reshape(item.shape), scales, to_bf16)
        return
    assert item.sizes is not None
    sizes = as_array(parts[2], item.sizes, item.pieces[2])
    if tuple(sizes.tolist()) != item.shape:
        fail("bad_model", f"{item.sizes.name} is {sizes.tolist()}; expected {list(item.shape)}")
    builder.add_w4a16(item.name, main.reshape(item.entry.shape), scales, to_bf16)


_NUMPY = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1"}


def as_array(raw: npt.NDArray[np.uint8], entry: TensorEntry, piece: Piece) -> npt.NDArray[Any]:
    """Flat. bf16 as its bits in uint16, fp8 as its codes in uint8; f16 widened to float32, which is exact."""
    dtype = np.dtype(_NUMPY[entry.dtype])
    if piece.offset % dtype.itemsize:  # a header of odd length: the data is as misaligned in memory
        raw = raw.copy()
    array = raw.view(dtype)
    return array.astype(np.float32) if entry.dtype == "F16" else array
