"""safetensors files byte by byte, for dtypes that numpy does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Stored = tuple[str, np.ndarray]
"""A dtype as the format calls it, and an array of that element size."""

_NAMES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64"}


def bf16(x: np.ndarray) -> Stored:
    """float32 rounded to bf16."""
    import ml_dtypes

    return "BF16", x.astype(ml_dtypes.bfloat16).view(np.uint16)


def write(path: Path, tensors: Mapping[str, np.ndarray | Stored]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else (_NAMES[value.dtype.name], value)
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + at for at in entry["data_offsets"])
            kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1"}[
                entry["dtype"]
            ]
            found[name] = (entry["dtype"], np.frombuffer(raw[begin:end], kind).reshape(entry["shape"]))
    return found
