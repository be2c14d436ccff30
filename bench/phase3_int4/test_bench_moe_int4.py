"""INT4 experts: Moonlight's (2048 x 1408, 64, 6 a row) and Kimi K2's widths (7168 x 2048, 8 a row, of 16)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mixtures import Mixture


@pytest.fixture(scope="module", params=["moonlight", "k2"])
def experts(request: pytest.FixtureRequest, rng: np.random.Generator) -> Mixture:
    if request.param == "moonlight":
        return Mixture(rng, "int4", count=64, top_k=6, hidden=2048, inner=1408)
    return Mixture(rng, "int4", count=16, top_k=8, hidden=7168, inner=2048)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_experts_int4(measure: Callable[..., None], experts: Mixture, rows: int) -> None:
    experts.measure(measure, rows)
