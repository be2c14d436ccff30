"""A .kdtr bundle as a checkpoint: ``config.KEY`` scalars and weights in one file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kdtr
from .checkpoint_audit import require_all
from .checkpoint_base import Builder, CheckpointBase, Progress, Rounding, TensorInfo, check_extent, naming
from .config import FIELDS, ModelConfig
from .errors import fail

__all__ = ["Bundle"]

_CONFIG = "config."
_WEIGHTS = ("model.", "lm_head.")  # the checkpoint's own name space; a bundle may hold golden data beside it


class Bundle(CheckpointBase):
    """A .kdtr bundle: ``config.KEY`` scalars, weights by their checkpoint names (``NAME.qw`` and
    ``NAME.sc`` where a matrix is INT4) and, in golden bundles, data of tests under other names. Without
    `checksums` no data is read."""

    def __init__(self, path: Path, latent_norm_eps: float | None = None, checksums: bool = True) -> None:
        self.path = path
        self.arrays: dict[str, npt.NDArray[Any]] = kdtr.read(path, checksums=checksums)
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
            TensorInfo(
                name, _dtype_name(a.dtype), a.shape, a.nbytes, self.path.name,
                name if name.startswith(_WEIGHTS) else None,
            )
            for name, a in self.arrays.items()
        ]

    def recorded(self) -> dict[str, npt.NDArray[Any]]:
        """What the bundle holds beside config and weights."""
        return {name: a for name, a in self.arrays.items() if not name.startswith((_CONFIG, *_WEIGHTS))}

    def check_extent(self) -> None:
        check_extent(self.path, self.config, self.arrays)

    def audit(self, expected: Iterable[tuple[str, list[int], bool]]) -> dict[str, tuple[npt.NDArray[Any], ...]]:
        """What to load: by module (words and scales) or full name (one array). `expected` as from the native
        builder, which checks shapes and dtypes. Raises EngineError naming the tensor."""
        wanted = [name for name, _, _ in expected]
        plan: dict[str, tuple[npt.NDArray[Any], ...]] = {}
        known = frozenset(wanted)
        for name, array in self.arrays.items():
            module, _, kind = name.rpartition(".")
            if kind in ("qw", "sc") and f"{module}.weight" in known:
                if f"{module}.weight" in self.arrays:
                    fail("bad_model", f"{self.path}: {module} has both .weight and .{kind}")
                for part in (f"{module}.qw", f"{module}.sc"):
                    if part not in self.arrays:
                        fail("bad_model", f"{self.path}: {name} is there, but {part} is missing")
                plan[module] = (self.arrays[f"{module}.qw"], self.arrays[f"{module}.sc"])
            elif name in known:
                plan[name] = (array,)
            elif name.startswith(_WEIGHTS):
                fail("bad_model", f"{self.path}: the tensor {name} is not one of this model's")
        require_all(
            self.path, wanted, [n for n in wanted if n not in plan and n.removesuffix(".weight") not in plan]
        )
        return plan

    def load_into(
        self, builder: Builder, progress: Progress | None = None, rounding: Rounding = "exact"
    ) -> None:
        plan = self.audit(builder.expected())
        total = sum(a.nbytes for arrays in plan.values() for a in arrays)
        done = 0
        for name, arrays in plan.items():
            given = [self._loadable(name, a) for a in arrays]
            with naming(self.path):
                if len(given) == 2:
                    builder.add_w4a16(name, given[0], given[1], rounding == "bf16")
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
