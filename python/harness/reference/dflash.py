"""The DFlash draft model on numpy (counterpart of cpp/draft/dflash.cpp).

Chen, Liang, Liu, "DFlash" (arXiv 2602.06036), in the form of the published checkpoints. A committed position t
has the feature c_t = hidden_norm(fc(taps at t)), and every layer takes it, as it is, for the key and the value
at t. A draft runs the block [root, MASK, ...] at the positions behind the committed ones; queries come from the
block alone, keys from both. The target's head reads the rows of the masks; the row of the mask at position p
proposes the token at p.

Everything is computed anew from the taps of the whole prefix: there is no state to get wrong here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.reference import rope
from harness.reference.model import silu, softmax

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DraftConfig:
    """fields: the scalars of cpp/draft/dflash_config.h; window (0: none) and causal: one number a layer;
    target_layers: taps, in the order of fc."""

    fields: Mapping[str, float]
    target_layers: Sequence[int]
    window: Sequence[int]
    causal: Sequence[int]

    def number(self, name: str) -> int:
        """An integer field."""
        return int(self.fields[name])


def weight_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, with its published name, and its shape ([out, in] or [n])."""
    hidden, inner, dim = config.number("hidden_size"), config.number("intermediate_size"), config.number("head_dim")
    query, key = (config.number(f"num_{kind}_heads") * dim for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.number("num_hidden_layers")):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (query, hidden),
                "self_attn.k_proj": (key, hidden),
                "self_attn.v_proj": (key, hidden),
                "self_attn.o_proj": (hidden, query),
                "self_attn.q_norm": (dim,),
                "self_attn.k_norm": (dim,),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    return shapes


class Drafter:
    """A draft model in one precision. Methods are small so that tests can break one of them on purpose.

    weights: float arrays under the checkpoint's names; embed, head [vocab, hidden]: the target's. Raises
    KeyError for a missing tensor and ValueError for one of the wrong shape.
    """

    def __init__(
        self, config: DraftConfig, weights: Mapping[str, Array], embed: Array, head: Array, dtype: Any = np.float64
    ) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.embed, self.head = embed.astype(dtype), head.astype(dtype)
        self.weights: dict[str, Array] = {}
        for name, shape in weight_shapes(config).items():
            if weights[name].shape != shape:
                raise ValueError(f"{name} has shape {weights[name].shape}, expected {shape}")
            self.weights[name] = weights[name].astype(dtype)

    def rms_norm(self, x: Array, name: str) -> Array:
        """Over the last axis."""
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=self.dtype)
        y: Array = x / np.sqrt(mean + self.dtype.type(self.config.fields["rms_norm_eps"])) * self.weights[name]
        return y

    def linear(self, x: Array, name: str) -> Array:
        """x [R, in] times the transpose of NAME.weight."""
        y: Array = x @ self.weights[f"{name}.weight"].T
        return y

    def amplitude(self) -> float:
        """Factor of cos and sin."""
        return float(self.config.fields["rope_amplitude"])

    def rotate(self, x: Array, position: Array) -> Array:
        """RoPE of x [R, heads, head_dim], pairs (j, j + head_dim / 2)."""
        c = self.config.fields
        named = {
            "qk_rope_head_dim": c["head_dim"],
            "rope_mscale": 1.0,
            "rope_mscale_all_dim": 1.0,  # an amplitude of 1: ours is below
            **{key: c[key] for key in c if key.startswith("rope_")},
        }
        cos, sin = rope.tables(named, position, np.float64)
        scale = self.amplitude()
        return rope.rotate(x, (cos * scale).astype(self.dtype), (sin * scale).astype(self.dtype), False)

    def features(self, taps: Array) -> Array:
        """c_t [R, hidden] from taps [R, taps * hidden]."""
        return self.rms_norm(self.linear(taps.astype(self.dtype), "fc"), "hidden_norm.weight")

    def key_value(self, h: Array, layer: int, position: Array) -> tuple[Array, Array]:
        """Keys after norm and RoPE, and values, each [R, kv_heads, head_dim], of features or of block rows."""
        name = f"layers.{layer}.self_attn"
        shape = (len(h), self.config.number("num_key_value_heads"), self.config.number("head_dim"))
        k = self.linear(h, f"{name}.k_proj").reshape(shape)
        v = self.linear(h, f"{name}.v_proj").reshape(shape)
        return self.rotate(self.rms_norm(k, f"{name}.k_norm.weight"), position), v

    def visible(self, layer: int, query: Array, key: Array) -> Array:
        """bool [queries, keys] by their positions."""
        distance = query[:, None] - key[None, :]
        seen: Array = np.ones(distance.shape, dtype=np.bool_)
        if window := self.config.window[layer]:
            seen = np.abs(distance) < window
        if self.config.causal[layer]:
            seen = seen & (distance >= 0)
        return seen

    def block_tokens(self, root: int) -> list[int]:
        """What the block's rows hold."""
        return [root] + [self.config.number("mask_token_id")] * (self.config.number("block_rows") - 1)

    def block_positions(self, start: int) -> Array:
        """Where the block's rows stand: the root first."""
        return start + np.arange(self.config.number("block_rows"))

    def attention(self, h: Array, feature: Array, layer: int, context: Array, block: Array) -> Array:
        """o_proj of the attention of block rows h [B, hidden]; feature [S, hidden] at positions `context`."""
        name, dim = f"layers.{layer}.self_attn", self.config.number("head_dim")
        q = self.linear(h, f"{name}.q_proj").reshape(len(h), -1, dim)
        q = self.rotate(self.rms_norm(q, f"{name}.q_norm.weight"), block)
        keys, values = zip(self.key_value(feature, layer, context), self.key_value(h, layer, block), strict=True)
        group = q.shape[1] // keys[0].shape[1]
        k, v = (np.repeat(np.concatenate(x), group, axis=1).transpose(1, 0, 2) for x in (keys, values))
        scores = np.matmul(q.transpose(1, 0, 2), k.transpose(0, 2, 1)) * self.dtype.type(dim**-0.5)
        seen = self.visible(layer, block, np.concatenate([context, block]))
        p = softmax(np.where(seen, scores, self.dtype.type(-np.inf)))
        out: Array = np.matmul(p, v).transpose(1, 0, 2).reshape(len(h), -1)
        return self.linear(out, f"{name}.o_proj")

    def logits(self, root: int, taps: Array) -> Array:
        """[drafts, vocab]: what is proposed behind `root`; taps [S, taps * hidden] of all positions before it."""
        feature = self.features(taps)
        context, block = np.arange(len(taps)), self.block_positions(len(taps))
        x = self.embed[self.block_tokens(root)]
        for layer in range(self.config.number("num_hidden_layers")):
            h = self.rms_norm(x, f"layers.{layer}.input_layernorm.weight")
            x = x + self.attention(h, feature, layer, context, block)
            h = self.rms_norm(x, f"layers.{layer}.post_attention_layernorm.weight")
            mlp = f"layers.{layer}.mlp"
            inner = silu(self.linear(h, f"{mlp}.gate_proj")) * self.linear(h, f"{mlp}.up_proj")
            x = x + self.linear(inner, f"{mlp}.down_proj")
        return self.read_out(self.rms_norm(x, "norm.weight"))

    def read_out(self, x: Array) -> Array:
        """The target's head on the masks' rows."""
        y: Array = x[1:] @ self.head.T
        return y
