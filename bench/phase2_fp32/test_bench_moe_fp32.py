"""FP32 experts at Moonlight's widths: 2048 x 1408, 6 a row, of 24."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mixtures import Mixture


@pytest.fixture(scope="module")
def experts(rng: np.random.Generator) -> Mixture:
    return Mixture(rng, "f32", count=24, top_k=6, hidden=2048, inner=1408)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_experts_fp32(measure: Callable[..., None], experts: Mixture, rows: int) -> None:
    experts.measure(measure, rows)
