"""The whole model, top to bottom, on numpy (counterpart of cpp/model/forward.cpp).

DeepSeek-V3's equations (arXiv 2412.19437, section 2.1): pre-norm layers of multi-head latent attention and
either a dense MLP or a mixture of experts. Attention comes in both algebraically equal forms: *expanded*
(keys and values of every head are computed from the latents) and *absorbed* (kv_b_proj moves to the query's
and the output's side, as engines run it). A forward runs over arbitrary rows with an explicit visibility, so
the rows may be a prompt, one decoding step or a draft tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.reference import config as fields
from harness.reference import quant, rope

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of each position: latent [S, kv_lora] after its norm, rope [S, rope] after
    RoPE."""

    latent: Array
    rope: Array

    def select(self, rows: Sequence[int]) -> LayerCache:
        """The same for some rows, in the order given."""
        return LayerCache(self.latent[list(rows)], self.rope[list(rows)])

    def extended(self, other: LayerCache) -> LayerCache:
        """These positions, then the other's."""
        return LayerCache(
            np.concatenate([self.latent, other.latent]), np.concatenate([self.rope, other.rope])
        )


@dataclass(frozen=True)
class Output:
    """logits [R, vocab]; cache: of these rows alone, one entry a layer; taps: residual stream [R, hidden]
    after each layer."""

    logits: Array
    cache: list[LayerCache]
    taps: list[Array]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        y: Array = 1 / (1 + np.exp(-x))
    return y


def silu(x: Array) -> Array:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    """Softmax of the last axis; entries of -inf get 0."""
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    y: Array = p / p.sum(axis=-1, keepdims=True)
    return y


def best_first(score: Array, count: int) -> Array:
    """Indices [R, count] of the largest entries of each row, best first, ties to the lower index."""
    return np.argsort(-score, axis=-1, kind="stable")[:, :count]


class Model:
    """A model in one precision. Methods are small so that tests can break one of them on purpose.

    config: exactly the fields of ModelConfig. weights: arrays under the checkpoint's names, float or uint16
    (bf16 bits); a quantised matrix is NAME.qw and NAME.sc instead of NAME.weight. dtype: np.float64 or
    np.float32, of every intermediate. Raises KeyError for a missing tensor and ValueError for one of the
    wrong shape.
    """

    def __init__(
        self,
        config: Mapping[str, float | int],
        weights: Mapping[str, Array],
        dtype: Any = np.float64,
        absorbed: bool = False,
    ) -> None:
        self.config = fields.checked(config)
        self.dtype = np.dtype(dtype)
        self.absorbed = absorbed
        self.weights: dict[str, Array] = {}
        for name, shape in fields.weight_shapes(self.config).items():
            stem = name.removesuffix(".weight")
            if f"{stem}.qw" in weights:
                value: Array = self.dequantized(weights[f"{stem}.qw"], weights[f"{stem}.sc"])
            else:
                value = weights[name]
                if value.dtype == np.uint16:
                    value = quant.from_bf16_bits(value)
            if value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}, expected {shape}")
            self.weights[name] = value.astype(self.dtype)

    def dequantized(self, words: Array, scale: Array) -> Array:
        """The matrix that a W4A16 product multiplies by."""
        return quant.dequantize(words, scale)

    def number(self, name: str) -> int:
        """An integer field of the config."""
        return int(self.config[name])

    def forward(
        self,
        token: Sequence[int] | Array,
        position: Sequence[int] | Array,
        visible: Array | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Output:
        """One forward over R rows after S cached positions.

        token, position: integers [R]. visible: bool [R, S + R], who sees what (cached positions first, then
        these rows); default: all cached positions and the rows up to itself, which is a prompt. cache: one
        entry a layer.
        """
        ids, at = np.asarray(token, dtype=np.int64), np.asarray(position, dtype=np.int64)
        rows = len(ids)
        cached = len(cache[0].latent) if cache else 0
        if visible is None:
            visible = np.tril(np.ones((rows, cached + rows), dtype=np.bool_), k=cached)
        x = self.weights["model.embed_tokens.weight"][ids]
        own: list[LayerCache] = []
        taps: list[Array] = []
        for layer in range(self.number("num_hidden_layers")):
            name = f"model.layers.{layer}"
            h = self.layer_norm(x, f"{name}.input_layernorm")
            attention, entry = self.attention(
                h, f"{name}.self_attn", at, visible, cache[layer] if cache else None
            )
            x = x + attention
            h = self.layer_norm(x, f"{name}.post_attention_layernorm")
            moe = fields.is_moe(self.config, layer)
            x = x + (self.moe(h, f"{name}.mlp") if moe else self.mlp(h, f"{name}.mlp"))
            own.append(entry)
            taps.append(x)
        logits = self.linear(self.layer_norm(x, "model.norm"), "lm_head")
        return Output(logits, own, taps)

    # --------------------------------------------------------------------------------------------------------
    # layers

    def linear(self, x: Array, name: str) -> Array:
        """x [R, in] times the transpose of NAME.weight [out, in]."""
        y: Array = x @ self.weights[f"{name}.weight"].T
        return y

    def rms_norm(self, x: Array, name: str, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=self.dtype)
        y: Array = x / np.sqrt(mean + self.dtype.type(eps)) * self.weights[f"{name}.weight"]
        return y

    def layer_norm(self, x: Array, name: str) -> Array:
        """A norm of the residual stream: rms_norm_eps."""
        return self.rms_norm(x, name, float(self.config["rms_norm_eps"]))

    def latent_norm(self, x: Array, name: str) -> Array:
        """A norm inside attention (q_a_layernorm, kv_a_layernorm): latent_norm_eps."""
        return self.rms_norm(x, name, float(self.config["latent_norm_eps"]))

    def mlp(self, x: Array, name: str) -> Array:
        """down(silu(gate x) * (up x))."""
        return self.linear(
            silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    # --------------------------------------------------------------------------------------------------------
    # attention

    def rotate(self, x: Array, position: Array) -> Array:
        """RoPE of the last axis of x [R, ..., rope]."""
        cos, sin = rope.tables(self.config, position, self.dtype)
        return rope.rotate(x, cos, sin, bool(self.config["rope_interleave"]))

    def softmax_scale(self) -> float:
        """Factor of q . k."""
        return rope.softmax_scale(self.config)

    def query(self, h: Array, name: str, position: Array) -> tuple[Array, Array]:
        """[R, heads, nope] without position and [R, heads, rope] after RoPE."""
        if self.number("q_lora_rank"):
            q = self.linear(
                self.latent_norm(self.linear(h, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"),
                f"{name}.q_b_proj",
            )
        else:
            q = self.linear(h, f"{name}.q_proj")
        q = q.reshape(len(h), self.number("num_attention_heads"), -1)
        nope = self.number("qk_nope_head_dim")
        return q[..., :nope], self.rotate(q[..., nope:], position)

    def latent(self, h: Array, name: str, position: Array) -> LayerCache:
        """What the cache keeps of each row."""
        ckv = self.linear(h, f"{name}.kv_a_proj_with_mqa")
        width = self.number("kv_lora_rank")
        return LayerCache(
            self.latent_norm(ckv[:, :width], f"{name}.kv_a_layernorm"), self.rotate(ckv[:, width:], position)
        )

    def attention(
        self, h: Array, name: str, position: Array, visible: Array, cache: LayerCache | None
    ) -> tuple[Array, LayerCache]:
        """o_proj of the attention of rows h [R, hidden] over the cache and themselves; and the rows'
        cache."""
        nope, v = self.number("qk_nope_head_dim"), self.number("v_head_dim")
        q_nope, q_rope = self.query(h, name, position)
        own = self.latent(h, name, position)
        keys = cache.extended(own) if cache is not None else own
        kv_b = self.weights[f"{name}.kv_b_proj.weight"].reshape(-1, nope + v, self.number("kv_lora_rank"))
        key_up, value_up = kv_b[:, :nope], kv_b[:, nope:]  # [heads, nope or v, latent]
        scores = np.matmul(q_rope.transpose(1, 0, 2), keys.rope.T)  # [heads, R, S + R]
        if self.absorbed:
            absorbed = np.matmul(q_nope.transpose(1, 0, 2), key_up)  # [heads, R, latent]
            scores = scores + np.matmul(absorbed, keys.latent.T)
        else:
            expanded = np.matmul(key_up, keys.latent.T)  # [heads, nope, S + R]
            scores = scores + np.matmul(q_nope.transpose(1, 0, 2), expanded)
        scores = np.where(visible, scores * self.dtype.type(self.softmax_scale()), self.dtype.type(-np.inf))
        p = softmax(scores)
        if self.absorbed:
            out = np.matmul(np.matmul(p, keys.latent), value_up.transpose(0, 2, 1))
        else:
            out = np.matmul(p, np.matmul(value_up, keys.latent.T).transpose(0, 2, 1))  # [heads, R, v]
        return self.linear(out.transpose(1, 0, 2).reshape(len(h), -1), f"{name}.o_proj"), own

    # --------------------------------------------------------------------------------------------------------
    # mixture of experts

    def route(self, h: Array, name: str) -> tuple[Array, Array]:
        """Experts [R, top_k], best first, and their weights, for rows h [R, hidden]."""
        score = self.scores(self.linear(h, name))
        chosen = best_first(
            self.limited_to_groups(self.choice(score, name)), self.number("num_experts_per_tok")
        )
        return chosen, self.combine_weights(score, chosen, name)

    def scores(self, logits: Array) -> Array:
        """Sigmoid (V3) or softmax over all experts (V2)."""
        return sigmoid(logits) if self.config["scoring"] == fields.SIGMOID_NOAUX_TC else softmax(logits)

    def choice(self, score: Array, name: str) -> Array:
        """What experts are ranked by: the score, plus the correction bias where the router is noaux_tc."""
        if self.config["scoring"] == fields.SIGMOID_NOAUX_TC:
            return score + self.weights[f"{name}.e_score_correction_bias"]
        return score

    def limited_to_groups(self, choice: Array) -> Array:
        """Experts outside the best groups set to -inf. A group's score: the sum of its two best (noaux_tc) or
        its best (softmax)."""
        groups, kept = self.number("n_group"), self.number("topk_group")
        if groups == 1:
            return choice
        grouped = choice.reshape(len(choice), groups, -1)
        top = -np.sort(-grouped, axis=-1)
        noaux = self.config["scoring"] == fields.SIGMOID_NOAUX_TC
        group_score = top[..., :2].sum(axis=-1) if noaux else top[..., 0]
        inside = np.zeros(group_score.shape, dtype=np.bool_)
        np.put_along_axis(inside, best_first(group_score, kept), True, axis=-1)
        return np.where(inside[..., None], grouped, self.dtype.type(-np.inf)).reshape(choice.shape)

    def combine_weights(self, score: Array, chosen: Array, name: str) -> Array:
        """Weights of the chosen experts: scores without bias, normalised if asked, scaled always."""
        weight = np.take_along_axis(score, chosen, axis=-1)
        if self.config["norm_topk_prob"]:
            weight = weight / (weight.sum(axis=-1, keepdims=True) + self.dtype.type(1e-20))
        scaled: Array = weight * self.dtype.type(self.config["routed_scaling_factor"])
        return scaled

    def moe(self, h: Array, name: str) -> Array:
        """Weighted sum of the chosen experts' outputs, plus the shared expert, which is neither gated nor
        scaled."""
        chosen, weight = self.route(h, f"{name}.gate")
        y = np.zeros_like(h)
        for expert in np.unique(chosen):
            row, slot = np.nonzero(chosen == expert)
            y[row] += weight[row, slot][:, None] * self.mlp(h[row], f"{name}.experts.{expert}")
        if self.number("n_shared_experts"):
            y = y + self.mlp(h, f"{name}.shared_experts")
        return y
