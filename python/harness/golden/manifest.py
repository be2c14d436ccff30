"""The manifest: what every golden bundle must contain, small enough for git.

Inputs and integer outputs are held by checksum, float outputs by a few values and sums, since a BLAS library,
a thread count or a math library may change their last bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import hashing

Array = npt.NDArray[Any]
Entry = str | dict[str, Any]
Bundle = dict[str, Entry]

TOLERANCE = 1e-6  # times max(1, largest magnitude of the tensor)
SAMPLES = 6
SUMS = 2


def path() -> Path:
    """The manifest beside these sources."""
    return Path(str(resources.files("harness.golden"))) / "manifest.json"


def is_float_output(name: str, value: Array) -> bool:
    """Whether a tensor is compared by tolerance. Weights of nodes are float64 sums of dyadic numbers:
    exact."""
    return value.dtype == np.float32 and (name == "plain.logits" or ".out." in name)


def kind(value: Array) -> str:
    """Type and shape, like f32[24, 320]."""
    short = {"float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64"}[value.dtype.name]
    return f"{short}{list(value.shape)}"


def probes(name: str, value: Array) -> tuple[list[float], list[float]]:
    """Values at a few places, and sums with signs from a hash."""
    flat = value.astype(np.float64).ravel()
    if not len(flat):
        return [], []
    places = hashing.integers(f"{name}/places", (SAMPLES,), 0, len(flat))
    signs = hashing.integers(f"{name}/signs", (SUMS, len(flat)), 0, 2) * 2.0 - 1.0
    return [float(flat[i]) for i in places], [float((s * flat).sum()) for s in signs]


def entry(name: str, value: Array) -> Entry:
    """What the manifest holds of one tensor."""
    if is_float_output(name, value):
        samples, sums = probes(name, value)
        largest = float(np.abs(value).max(initial=0.0))
        return {
            "type": kind(value),
            "largest": float(f"{largest:.9g}"),
            "samples": [float(f"{x:.9g}") for x in samples],
            "sums": [float(f"{x:.9g}") for x in sums],
        }
    little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
    return f"{kind(value)} {hashlib.sha256(little.tobytes()).hexdigest()[:16]}"


def describe(tensors: Mapping[str, Array]) -> Bundle:
    """What the manifest holds of one bundle."""
    return {name: entry(name, tensors[name]) for name in sorted(tensors)}


def difference(bundle: str, tensors: Mapping[str, Array], expected: Bundle) -> str | None:
    """One sentence about the first difference between a bundle and its manifest entry, None where there is
    none."""
    for name in sorted(set(tensors) | set(expected)):
        if name not in tensors:
            return f"{bundle}: tensor {name} is in the manifest but was not generated"
        if name not in expected:
            return f"{bundle}: tensor {name} was generated but is not in the manifest"
        want, have = expected[name], entry(name, tensors[name])
        if isinstance(want, str) or isinstance(have, str):
            if want != have:
                return f"{bundle}: {name} is {have}, the manifest has {want}"
            continue
        if want["type"] != have["type"]:
            return f"{bundle}: {name} is {have['type']}, the manifest has {want['type']}"
        allowed = TOLERANCE * max(1.0, want["largest"])
        size = float(max(tensors[name].size, 1))
        for what, bound in (("samples", allowed), ("sums", allowed * size**0.5)):
            a, b = have[what], want[what]
            if not all(abs(x - y) <= bound for x, y in zip(a, b, strict=True)):
                return f"{bundle}: {name} has {what} {a}, the manifest {b}, allowed is {bound:.1e}"
    return None


def load() -> dict[str, Bundle]:
    """Bundle name -> entries. Raises ValueError for a manifest of another version."""
    data = json.loads(path().read_text(encoding="utf-8"))
    if data["version"] != 1:
        raise ValueError(f"{path()} has version {data['version']}, expected 1")
    bundles: dict[str, Bundle] = data["bundles"]
    return bundles


def save(bundles: Mapping[str, Bundle]) -> None:
    """Write the manifest, one tensor a line."""
    lines = ["{", '"version": 1,', '"bundles": {']
    for i, name in enumerate(sorted(bundles)):
        lines.append(f"{json.dumps(name)}: {{")
        rows = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in bundles[name].items()]
        lines.append(",\n".join(rows))
        lines.append("}" + ("," if i + 1 < len(bundles) else ""))
    lines += ["}", "}", ""]
    path().write_text("\n".join(lines), encoding="utf-8")
