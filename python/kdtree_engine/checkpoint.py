"""Checkpoints: a Hugging Face folder or a .kdtr bundle, audited whole, then streamed into the native builder.

The audit goes both ways before a single tensor is used: index against shards, headers against file sizes,
and the names in the files against the names that the config implies (checkpoint_audit.py). Then the files
are read in large sequential pieces, ahead of the builder (checkpoint_stream.py): peak memory is the model
plus a bounded window. bf16 stays bf16, INT4 stays INT4, f16 is widened to f32, which is exact; fp8 becomes bf16
where that is exact, else f32; vectors (norms, the router's bias) are float32 in the engine whatever they were.
"""

from __future__ import annotations

from pathlib import Path

from .checkpoint_base import ROUNDINGS, Builder, Checkpoint, Progress, Rounding, TensorInfo, naming
from .checkpoint_bundle import Bundle
from .checkpoint_folder import Folder
from .config import DEFAULT_LATENT_NORM_EPS
from .errors import fail

__all__ = [
    "ROUNDINGS",
    "Builder",
    "Bundle",
    "Checkpoint",
    "Folder",
    "Progress",
    "Rounding",
    "TensorInfo",
    "naming",
    "open_checkpoint",
]


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
