"""safetensors files of torch tensors, read and written with nothing but torch: a length, a JSON header, the bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from harness.train.errors import TrainError

__all__ = ["read", "write", "write_text"]

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Appears whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts = []
    at = 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):  # keeps every tensor aligned
        data = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _replace(path, b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def write_text(path: Path, text: str) -> None:
    """Appears whole or not at all."""
    _replace(path, text.encode())


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        raise TrainError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor. Raises TrainError for what is no safetensors file."""
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + at for at in entry["data_offsets"])
            raw = torch.from_numpy(np.frombuffer(data[begin:end], np.uint8).copy())
            found[name] = raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return found
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise TrainError(f"{path} is no safetensors file of known dtypes: {error}") from error
