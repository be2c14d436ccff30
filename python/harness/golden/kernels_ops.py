"""Kernel bundles of the model's ops: rms_norm, rope, route, w4a16_matmul, experts.

Tensors are named CASE.in.NAME and CASE.out.NAME. Expert ids are exact; float outputs are float64 rounded to
float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import hashing
from harness.golden.kernels_tree import Case, case, i32
from harness.reference import config as fields
from harness.reference import quant, rope
from harness.reference.model import Model, silu

Array = npt.NDArray[Any]
SMALLEST_MARGIN = 1e-4  # between the last chosen expert and the first that is not, unless they tie exactly


def f64(x: Any) -> Array:
    """float64 array, possibly rank 0."""
    return np.array(x, dtype=np.float64)


# ------------------------------------------------------------------------------------------------------------
# rms_norm


def norm_case(name: str, x: Array, eps: float) -> Case:
    """x / sqrt(mean(x^2) + eps) * weight."""
    weight = np.float32(1.0) + hashing.dyadic(f"norm/{name}/weight", x.shape[-1:], 32, 7)
    wide, e = x.astype(np.float64), float(np.float32(eps))
    y = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + e) * weight
    inputs = {"x": x, "weight": weight, "eps": np.array(eps, dtype=np.float32)}
    return case(name, inputs, {"y": y.astype(np.float32)})


def rms_norm() -> Case:
    """Widths around multiples of 16, and magnitudes at which eps matters or is lost."""
    cases: Case = {}
    for width in (1, 15, 16, 17, 64, 72, 128, 192, 1000):
        cases |= norm_case(f"width_{width:04}", hashing.dyadic(f"norm/{width}", (5, width), 255, 6), 1e-6)
    for exponent in (12, 18, 24, 40):
        for eps in (1e-5, 1e-6):
            x = hashing.dyadic(f"norm/small/{exponent}", (3, 64), 255, exponent)
            cases |= norm_case(f"scale_minus_{exponent}_eps_{eps:.0e}", x, eps)
    cases |= norm_case("large", hashing.dyadic("norm/large", (3, 64), 255, -20), 1e-6)
    cases |= norm_case("zeros", np.zeros((2, 64), dtype=np.float32), 1e-6)
    return cases


# ------------------------------------------------------------------------------------------------------------
# rope


def rope_case(name: str, config: dict[str, Any], positions: list[int], interleaved: bool) -> Case:
    """RoPE of [R, 3 heads, rope]; the softmax scale of the same config."""
    position = np.array(positions)
    x = hashing.dyadic(f"rope/{name}", (len(positions), 3, config["qk_rope_head_dim"]), 255, 7)
    cos, sin = rope.tables(config, position, np.float64)
    inputs = {"x": x, "position": i32(position), "interleaved": i32(int(interleaved))}
    inputs |= {f"config.{k}": f64(v) for k, v in config.items()}
    return case(
        name,
        inputs,
        {
            "y": rope.rotate(x.astype(np.float64), cos, sin, interleaved).astype(np.float32),
            "cos": cos.astype(np.float32),
            "sin": sin.astype(np.float32),
            "softmax_scale": np.array(rope.softmax_scale(config), dtype=np.float32),
        },
    )


def rope_config(
    theta: float, factor: float, fast: float, slow: float, mscale: float, all_dim: float
) -> dict[str, Any]:
    """The fields of a config that RoPE reads, at 128 + 64 dimensions."""
    return {
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": theta,
        "rope_factor": factor,
        "rope_original_max_position_embeddings": 4096.0 if factor else 0.0,
        "rope_beta_fast": fast,
        "rope_beta_slow": slow,
        "rope_mscale": mscale,
        "rope_mscale_all_dim": all_dim,
    }


def rope_cases() -> Case:
    """The released models' settings, both pairings, positions up to the contexts' ends."""
    near, far = [0, 1, 2, 63, 64, 65], [4095, 4096, 40000, 131071, 262143]
    settings = {
        "plain": rope_config(50000.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        "k2": rope_config(50000.0, 32.0, 1.0, 1.0, 1.0, 1.0),
        "k2_5": rope_config(50000.0, 64.0, 32.0, 1.0, 1.0, 1.0),
        "v3": rope_config(10000.0, 40.0, 32.0, 1.0, 1.0, 1.0),
        "v2_lite": rope_config(10000.0, 40.0, 32.0, 1.0, 0.707, 0.707),
        "amplitude": rope_config(10000.0, 40.0, 32.0, 1.0, 1.0, 0.707),
        "no_mscale": rope_config(10000.0, 40.0, 32.0, 1.0, 0.0, 0.0),
    }
    cases: Case = {}
    for name, config in settings.items():
        cases |= rope_case(f"{name}_near", config, near, True)
        cases |= rope_case(f"{name}_far", config, far, True)
        cases |= rope_case(f"{name}_neox", config, near, False)
    return cases


# ------------------------------------------------------------------------------------------------------------
# route


class Router(Model):
    """The router of the oracle, without the model around it."""

    def __init__(self, config: dict[str, Any], gate: Array, bias: Array | None) -> None:
        self.config = config
        self.dtype = np.dtype(np.float64)
        self.weights = {"gate.weight": gate.astype(np.float64)}
        if bias is not None:
            self.weights["gate.e_score_correction_bias"] = bias.astype(np.float64)


def route_case(
    name: str,
    experts: int,
    top_k: int,
    groups: tuple[int, int] = (1, 1),
    scoring: int = fields.SIGMOID_NOAUX_TC,
    normalize: bool = True,
    scaling: float = 2.5,
    twins: bool = False,
    bias_scale: int = 8,
) -> Case:
    """Rows, gate and bias such that every choice is clear or an exact tie. `twins`: every second expert
    repeats the one before it, so that scores tie and the lower id must win."""
    config = {
        "scoring": scoring,
        "n_group": groups[0],
        "topk_group": groups[1],
        "num_experts_per_tok": top_k,
        "norm_topk_prob": int(normalize),
        "routed_scaling_factor": scaling,
    }
    noaux = scoring == fields.SIGMOID_NOAUX_TC
    for salt in range(1000):
        at = f"route/{name}/{salt}"
        x = hashing.dyadic(f"{at}/x", (9, 64), 127, 6)
        gate = hashing.dyadic(f"{at}/gate", (experts, 64), 127, 9)
        bias = hashing.dyadic(f"{at}/bias", (experts,), 64, bias_scale) if noaux else None
        if twins:
            gate[1::2] = gate[0::2]
            if bias is not None:
                bias[1::2] = bias[0::2]
        router = Router(config, gate, bias)
        score = router.scores(x.astype(np.float64) @ router.weights["gate.weight"].T)
        if _clear(router, router.choice(score, "gate")):
            expert, weight = router.route(x.astype(np.float64), "gate")
            inputs = {"x": x, "gate": gate} | ({"bias": bias} if bias is not None else {})
            inputs |= {k: i32(v) for k, v in config.items() if k != "routed_scaling_factor"}
            inputs["routed_scaling_factor"] = np.array(scaling, dtype=np.float32)
            return case(name, inputs, {"expert": i32(expert), "weight": weight.astype(np.float32)})
    raise ValueError(f"{name}: no salt below 1000 separates the experts by {SMALLEST_MARGIN}")


def _clear(router: Router, choice: Array) -> bool:
    """Whether neighbours in the ranking (of groups and of experts) tie exactly or differ by the margin."""
    limited = router.limited_to_groups(choice)
    ranked = -np.sort(-limited, axis=-1)[:, : router.number("num_experts_per_tok") + 1]
    steps = [-np.diff(ranked, axis=-1)]
    groups = router.number("n_group")
    if groups > 1:
        top = -np.sort(-choice.reshape(len(choice), groups, -1), axis=-1)
        best = (
            top[..., :2].sum(axis=-1) if router.config["scoring"] == fields.SIGMOID_NOAUX_TC else top[..., 0]
        )
        steps.append(-np.diff(-np.sort(-best, axis=-1), axis=-1))
    return all(bool(((s == 0) | (s >= SMALLEST_MARGIN) | np.isnan(s)).all()) for s in steps)


def route() -> Case:
    """Both routers, groups, ties, negative choice values, more experts than lanes."""
    softmax = fields.SOFTMAX_GREEDY
    return (
        route_case("sigmoid_8_top_2", 8, 2)
        | route_case("sigmoid_64_top_6", 64, 6, scaling=2.446)
        | route_case("sigmoid_12_groups_2", 12, 3, (2, 1))
        | route_case("sigmoid_32_groups_8", 32, 4, (8, 4))
        | route_case("sigmoid_large_bias", 16, 4, (4, 2), bias_scale=4)
        | route_case("sigmoid_not_normalised", 16, 4, normalize=False)
        | route_case("sigmoid_ties", 16, 3, twins=True)
        | route_case("sigmoid_one", 8, 1)
        | route_case("sigmoid_all", 4, 4)
        | route_case("softmax_16_top_4", 16, 4, scoring=softmax, normalize=False, scaling=1.0)
        | route_case("softmax_groups", 16, 2, (4, 2), scoring=softmax, normalize=False, scaling=16.0)
        | route_case("softmax_normalised", 8, 2, scoring=softmax)
        | route_case("softmax_ties", 8, 3, scoring=softmax, normalize=False, scaling=1.0, twins=True)
    )


# ------------------------------------------------------------------------------------------------------------
# w4a16


def int4(name: str, out: int, width: int) -> tuple[Array, Array]:
    """Packed words with all sixteen codes and dyadic scales of several magnitudes."""
    codes = hashing.integers(f"{name}/codes", (out, width), -8, 8)
    magnitude = hashing.integers(f"{name}/magnitude", (out, width // quant.GROUP), 128, 256)
    exponent = hashing.integers(f"{name}/exponent", (out, width // quant.GROUP), 11, 14)
    return quant.pack(codes), (magnitude * 2.0**-exponent).astype(np.float32)


def matmul_case(name: str, rows: int, out: int, width: int, bf16: bool = False) -> Case:
    """x [rows, width] times the transpose of an INT4 matrix. bf16: scales as bf16 bits (they are exact in
    bf16)."""
    words, scale = int4(f"w4a16/{name}", out, width)
    x = hashing.dyadic(f"w4a16/{name}/x", (rows, width), 255, 7)
    y = x.astype(np.float64) @ quant.dequantize(words, scale).astype(np.float64).T
    stored: Array = quant.bf16_bits(scale).astype(np.int32) if bf16 else scale
    name_of_scale = "sc_bf16_bits" if bf16 else "sc"
    return case(name, {"x": x, "qw": words, name_of_scale: stored}, {"y": y.astype(np.float32)})


def w4a16_matmul() -> Case:
    """Row counts of a verify, ragged outputs, one group to many, a row of one-hot inputs that reads single
    codes."""
    cases: Case = {}
    for rows in (1, 2, 3, 5, 8, 9, 16, 17, 33, 65):
        cases |= matmul_case(f"rows_{rows:02}", rows, 48, 96)
    for out in (1, 7, 15, 17, 33):
        cases |= matmul_case(f"out_{out:02}", 3, out, 64)
    for width in (32, 64, 160, 1408):
        cases |= matmul_case(f"in_{width:04}", 2, 24, width)
    cases |= matmul_case("bf16_scales", 4, 32, 128, bf16=True)
    words, scale = int4("w4a16/one_hot", 16, 64)
    x = np.eye(64, dtype=np.float32)
    cases |= case(
        "one_hot", {"x": x, "qw": words, "sc": scale}, {"y": quant.dequantize(words, scale).T.copy()}
    )
    return cases


# ------------------------------------------------------------------------------------------------------------
# experts


def experts_case(
    name: str, rows: int, experts: int, top_k: int, hidden: int, inner: int, shared: bool, quantised: bool
) -> Case:
    """y + sum over slots of weight * down(silu(gate x) * up x) + shared."""
    at = f"experts/{name}"
    x = hashing.dyadic(f"{at}/x", (rows, hidden), 255, 7)
    y = hashing.dyadic(f"{at}/y", (rows, hidden), 255, 7)
    extra = hashing.dyadic(f"{at}/shared", (rows, hidden), 255, 7) if shared else None
    expert = np.array([hashing.distinct(f"{at}/ids/{i}", top_k, experts) for i in range(rows)])
    weight = hashing.integers(f"{at}/weight", (rows, top_k), 1, 128).astype(np.float32) / np.float32(64)
    inputs: Case = {"x": x, "y": y, "expert": i32(expert), "weight": weight}
    dense: dict[str, list[Array]] = {}
    for part, out, width in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        made = [
            hashing.of_rms(f"{at}/{part}/{e}", (out, width), float(width) ** -0.5) for e in range(experts)
        ]
        if quantised:
            packed = [quant.quantize_w4a16(m) for m in made]
            inputs[f"{part}.qw"] = np.stack([w for w, _ in packed])
            inputs[f"{part}.sc"] = np.stack([s for _, s in packed])
            made = [quant.dequantize(w, s) for w, s in packed]
        else:
            inputs[part] = np.stack(made)
        dense[part] = [m.astype(np.float64) for m in made]
    total = np.zeros((rows, hidden))
    for i in range(rows):
        for slot, e in enumerate(expert[i]):
            h = x[i].astype(np.float64)
            total[i] += float(weight[i, slot]) * (
                dense["down"][e] @ (silu(dense["gate"][e] @ h) * (dense["up"][e] @ h))
            )
    if extra is not None:
        inputs["shared"] = extra
        total = total + extra
    return case(name, inputs, {"y": (y + total).astype(np.float32)})


def experts() -> Case:
    """With and without the shared expert, float and INT4, rows that meet at one expert."""
    return (
        experts_case("fp32_1_row", 1, 8, 2, 64, 32, True, False)
        | experts_case("fp32_17_rows", 17, 6, 3, 48, 40, True, False)
        | experts_case("fp32_no_shared", 5, 8, 2, 64, 32, False, False)
        | experts_case("int4_1_row", 1, 8, 2, 64, 32, True, True)
        | experts_case("int4_9_rows", 9, 6, 3, 96, 64, True, True)
        | experts_case("int4_65_rows", 65, 4, 2, 64, 32, True, True)
        | experts_case("int4_no_shared", 3, 4, 1, 32, 32, False, True)
    )
