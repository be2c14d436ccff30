"""Bundle names and their generators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import kernels_ops, kernels_tree, models

Tensors = dict[str, npt.NDArray[Any]]

MODELS = ("model_fp32_tiny", "model_fp32_tiny2", "model_int4_tiny", "model_int4_tiny2")
KERNELS: dict[str, Callable[[], Tensors]] = {
    "kernel_tree_build": kernels_tree.tree_build,
    "kernel_tree_attention": kernels_tree.tree_attention,
    "kernel_accept": kernels_tree.accept,
    "kernel_rms_norm": kernels_ops.rms_norm,
    "kernel_rope": kernels_ops.rope_cases,
    "kernel_route": kernels_ops.route,
    "kernel_w4a16_matmul": kernels_ops.w4a16_matmul,
    "kernel_experts": kernels_ops.experts,
}
GENERATORS: dict[str, Callable[[], Tensors]] = {
    **{name: functools.partial(models.bundle, name) for name in MODELS},
    **KERNELS,
}


def cases(tensors: Tensors) -> dict[str, tuple[Tensors, Tensors]]:
    """A kernel bundle by case: name -> (inputs, outputs)."""
    found: dict[str, tuple[Tensors, Tensors]] = {}
    for name, value in tensors.items():
        side = 0 if ".in." in name else 1
        head, field = name.split(".in." if side == 0 else ".out.", 1)
        found.setdefault(head, ({}, {}))[side][field] = value
    return found


def contiguous(tensors: Tensors) -> Tensors:
    """The same, each C-contiguous."""
    return {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in tensors.items()}
