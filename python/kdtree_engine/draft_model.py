"""A DFlash draft model on disk: a folder with config.json and safetensors, audited whole, then streamed into the
engine that is being built.

The names are those of the published checkpoints (arXiv 2602.06036), with or without the prefix ``model.``:
``fc``, ``hidden_norm``, ``norm`` and eleven tensors a layer. Embedding and head are the target's; a folder
that brings its own is refused, since drafting with another head than the target's fails without a sound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from .checkpoint_audit import Item, require_all
from .checkpoint_base import Progress, TensorInfo, naming
from .checkpoint_folder import as_array, open_shards, refuse_zeros
from .checkpoint_stream import Piece, Stream
from .draft_config import DraftConfig, DraftOptions, load_json, parse_draft_config
from .errors import fail
from .safetensors_file import SafetensorsFile

__all__ = ["DraftModel", "DraftOptions"]

_PREFIX = "model."
_FLOATS = ("F32", "BF16", "F16")
_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight", "mask_embedding", "mask_embedding.weight")


class Loader(Protocol):
    """The part of the native DraftModelLoader that loading uses."""

    def expected(self) -> list[tuple[str, list[int]]]: ...
    def add(self, name: str, array: npt.NDArray[Any]) -> None: ...


class DraftModel:
    """An open folder whose container and config are sound. Close it, or use it in a ``with``.

    Raises EngineError: ``io`` where there is nothing to read, ``bad_file``, ``bad_model`` or ``unsupported``
    for what is there but cannot be used.
    """

    def __init__(self, path: str | Path, options: DraftOptions | None = None) -> None:
        self.path = Path(path)
        self._files: list[SafetensorsFile] = []
        if not self.path.is_dir():
            what = "is not a folder" if self.path.exists() else "does not exist"
            fail("io", f"{self.path} {what}; expected the folder of a draft model")
        config_path = self.path / "config.json"
        if not config_path.exists():
            fail("bad_file", f"the folder {self.path} has no config.json")
        self.config: DraftConfig = parse_draft_config(load_json(config_path), str(config_path), options)
        try:
            self._entries = open_shards(self.path, self._files)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DraftModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def tensors(self) -> list[TensorInfo]:
        """Everything in the files."""
        return [
            TensorInfo(e.name, e.dtype, e.shape, e.nbytes, e.file.path.name, e.name.removeprefix(_PREFIX))
            for e in self._entries.values()
        ]

    def check_target(self, layers: int) -> None:
        """See that the config was made for a target of `layers` layers; EngineError ``bad_model`` otherwise."""
        wanted = self.config.num_target_layers
        if wanted is not None and wanted != layers:
            fail("bad_model", f"{self.path}: made for a target of {wanted} layers; the target has {layers}")

    def load_into(self, loader: Loader, progress: Progress | None = None) -> None:
        """Audit against ``loader.expected()``, then add every tensor. Raises EngineError."""
        items = self._audit({name: tuple(shape) for name, shape in loader.expected()})
        total = sum(item.entry.nbytes for item in items)
        done = 0
        with Stream([item.pieces for item in items]) as stream:
            for item, parts in zip(items, stream, strict=True):
                refuse_zeros(item, parts)
                with naming(item.entry.file.path):
                    loader.add(item.name, as_array(parts[0], item.entry, item.pieces[0]).reshape(item.shape))
                done += item.entry.nbytes
                if progress is not None:
                    progress(done, total)

    def _audit(self, wanted: dict[str, tuple[int, ...]]) -> list[Item]:
        """Match files and expectation one to one; the items come in the order of the files."""
        items: dict[str, Item] = {}
        for entry in self._entries.values():
            name = entry.name.removeprefix(_PREFIX)
            what = f"{entry.file.path}: the tensor {entry.name}"
            if name in _OF_THE_TARGET:
                fail("unsupported", f"{what} is not used: a DFlash draft model has its target's embedding and head")
            if name not in wanted:
                fail("bad_model", f"{what} is not one of this draft model's")
            if name in items:
                fail("bad_model", f"{what} is there twice, also as {items[name].entry.name}")
            if entry.shape != wanted[name]:
                fail("bad_model", f"{what} has shape {list(entry.shape)}; expected {list(wanted[name])}")
            if entry.dtype not in _FLOATS:
                fail("bad_model", f"{what} has dtype {entry.dtype}; expected {', '.join(_FLOATS)}")
            piece = Piece(entry.file, entry.offset, entry.nbytes)
            items[name] = Item("plain", name, entry.shape, entry, (piece,))
        require_all(self.path, list(wanted), [name for name in wanted if name not in items])
        return list(items.values())
