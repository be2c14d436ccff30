"""What the two kinds of checkpoints share: the interface, and the checks that come before a builder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy.typing as npt

from .config import ModelConfig
from .errors import EngineError, fail

__all__ = [
    "ROUNDINGS",
    "Builder",
    "Checkpoint",
    "CheckpointBase",
    "Progress",
    "Rounding",
    "TensorInfo",
    "check_extent",
    "collector_paused",
    "naming",
]

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all), a few times a second and at the end. What it raises ends the
loading."""

Rounding = Literal["exact", "bf16"]
"""What becomes of the value code * scale of a quantised weight: kept, or rounded to bf16 (docs/numerics.md)."""

ROUNDINGS: tuple[Rounding, ...] = ("exact", "bf16")


class Builder(Protocol):
    """The part of the native EngineBuilder that loading uses. One that has ``memory_available`` is asked
    before anything is read."""

    def expected(self) -> list[tuple[str, list[int], bool]]: ...
    def add(self, name: str, array: npt.NDArray[Any]) -> None: ...
    def add_w4a16(
        self, module: str, qw: npt.NDArray[Any], sc: npt.NDArray[Any], round_to_bf16: bool = False
    ) -> None: ...
    def add_fp8(
        self, name: str, codes: npt.NDArray[Any], scales: npt.NDArray[Any], round_to_bf16: bool = False
    ) -> None: ...


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file describes it. ``canonical`` is the engine's own name for it (the prefix of a
    multimodal wrapper taken off), None where loading ignores it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    canonical: str | None


class Checkpoint(Protocol):
    """A checkpoint that is open and whose container is sound. Close it, or use it in a ``with``."""

    path: Path
    config: ModelConfig

    def tensors(self) -> list[TensorInfo]:
        """Everything in the files, what loading ignores included."""

    def check_extent(self) -> None:
        """See that the last layer and the last expert of the config are there. Cheap; to be called before a
        builder is made, which allocates for as many as the config claims."""

    def load_into(self, builder: Builder, progress: Progress | None = None, rounding: Rounding = "exact") -> None:
        """Audit against ``builder.expected()``, then add every tensor. Raises EngineError."""

    def close(self) -> None: ...
    def __enter__(self) -> Checkpoint: ...
    def __exit__(self, *_: object) -> None: ...


class CheckpointBase:
    def close(self) -> None:
        """Nothing is open by default."""

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hundreds of thousands of small objects are made that all live on: left to itself, the garbage collector
    goes through them again and again, for a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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


def check_extent(path: Path, config: ModelConfig, names: Collection[str | None]) -> None:
    """`names`: the engine's own, of everything that is there."""
    last = int(config["num_hidden_layers"]) - 1
    experts = int(config["n_routed_experts"])
    probes: list[tuple[str, tuple[str, ...]]] = [
        ("num_hidden_layers", (f"model.layers.{last}.input_layernorm.weight",))
    ]
    if experts > 0 and last >= config["first_k_dense_replace"]:
        base = f"model.layers.{last}.mlp.experts"
        expert = f"{base}.{experts - 1}.down_proj"
        forms = ("weight", "qw", "weight_packed")
        probes.append(("n_routed_experts", (*(f"{expert}.{form}" for form in forms), f"{base}.down_proj")))
    for field, any_of in probes:
        if not any(name in names for name in any_of):
            fail("bad_model", f"{path}: {field} is {config[field]:.0f}, but {any_of[0]} is missing")
