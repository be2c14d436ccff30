"""Rotary positions with YaRN (counterpart of what cpp/model makes RopeTable and softmax_scale from).

Sources: Su et al., "RoFormer" (arXiv 2104.09864); Peng et al., "YaRN" (arXiv 2309.00071), in the form of the
DeepSeek-V3 reference model, where the attention temperature is split into a cos/sin amplitude and a softmax
correction. Config keys are those of ModelConfig; `rope_factor` 0 means plain RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Config = Mapping[str, Any]


def correction_range(config: Config) -> tuple[float, float]:
    """First and last pair of the YaRN ramp: pairs below turn often enough to be left alone, pairs above are
    interpolated."""
    d = int(config["qk_rope_head_dim"])
    theta = float(config["rope_theta"])
    original = float(config["rope_original_max_position_embeddings"])

    def pair_that_turns(times: float) -> float:
        return d * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(float(config["rope_beta_fast"]))), 0)
    high = min(math.ceil(pair_that_turns(float(config["rope_beta_slow"]))), d - 1)
    return float(low), high + 0.001 if low == high else float(high)


def inverse_frequencies(config: Config) -> npt.NDArray[np.float64]:
    """float64 [rope / 2]: radians per position of each pair, before rounding to float32."""
    d = int(config["qk_rope_head_dim"])
    pair = np.arange(d // 2, dtype=np.float64)
    plain = float(config["rope_theta"]) ** (-2.0 * pair / d)
    factor = float(config["rope_factor"])
    if factor == 0.0:
        return plain
    low, high = correction_range(config)
    ramp = np.clip((pair - low) / (high - low), 0.0, 1.0)
    return plain / factor * ramp + plain * (1.0 - ramp)


def yarn_temperature(factor: float, mscale: float) -> float:
    """m(mscale) = 0.1 * mscale * ln(factor) + 1, and 1 for a factor that stretches nothing."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def amplitude(config: Config) -> float:
    """Factor of cos and sin: m(mscale) / m(mscale_all_dim) where both are given, else m(1); 1 without
    YaRN."""
    factor = float(config["rope_factor"])
    if factor == 0.0:
        return 1.0
    mscale, all_dim = float(config["rope_mscale"]), float(config["rope_mscale_all_dim"])
    if mscale and all_dim:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, all_dim)
    return yarn_temperature(factor, 1.0)


def softmax_scale(config: Config) -> float:
    """(nope + rope)^-1/2, times m(mscale_all_dim)^2 where YaRN is on and mscale_all_dim is not zero."""
    scale: float = (float(config["qk_nope_head_dim"]) + float(config["qk_rope_head_dim"])) ** -0.5
    factor, all_dim = float(config["rope_factor"]), float(config["rope_mscale_all_dim"])
    if factor != 0.0 and all_dim != 0.0:
        scale *= yarn_temperature(factor, all_dim) ** 2
    return scale


def tables(
    config: Config, position: npt.NDArray[Any], dtype: Any
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """cos and sin, [R, rope / 2] of `dtype`, for integer positions [R].

    Rounding the frequency and the angle to float32 belongs to the definition (reference implementations do
    it, and at high positions it moves the angle visibly), so it happens in the float64 oracle too.
    """
    frequency = inverse_frequencies(config).astype(np.float32)
    angle = position.astype(np.float32)[:, None] * frequency[None, :]
    wide = angle.astype(np.float64)
    factor = amplitude(config)
    return (np.cos(wide) * factor).astype(dtype), (np.sin(wide) * factor).astype(dtype)


def rotate(
    x: npt.NDArray[Any], cos: npt.NDArray[Any], sin: npt.NDArray[Any], interleaved: bool
) -> npt.NDArray[Any]:
    """Rotate the pairs of the last axis; the result stays in the stored places.

    x: [R, ..., rope]; cos, sin: [R, rope / 2]. Pairs are (2j, 2j + 1) where `interleaved`, else (j, j + rope
    / 2) (the NeoX form).
    """
    half = x.shape[-1] // 2
    first = np.s_[..., 0::2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., half:]
    shape = (cos.shape[0], *([1] * (x.ndim - 2)), half)
    c, s = cos.reshape(shape), sin.reshape(shape)
    y = np.empty_like(x)
    y[first] = x[first] * c - x[second] * s
    y[second] = x[second] * c + x[first] * s
    return y
