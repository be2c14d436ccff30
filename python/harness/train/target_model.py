"""The target in PyTorch: DeepSeek V3's architecture (arXiv 2412.19437, section 2.1), for training.

Multi-head latent attention in its expanded form, SwiGLU experts behind a sigmoid router, YaRN. Parameters are
float32 masters under names of their own; `harness.train.export` gives them the checkpoint's names. Routed experts
are quantised in every forward pass (`harness.train.qat`).

All experts run on all tokens, and those that were not chosen have weight 0. At this size that is faster than
gathering: two large products instead of hundreds of small ones, no capacity, no dropped token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from harness.reference import rope
from harness.train.qat import fake_quantized
from harness.train.shapes import TargetShape

__all__ = ["Cache", "Norm", "Target", "rotary_tables"]


def rotary_tables(shape: TargetShape) -> tuple[torch.Tensor, torch.Tensor, float]:
    """cos and sin, float32 [context, rope / 2], and the factor of q . k."""
    config = {
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "rope_theta": shape.rope_theta,
        "rope_factor": shape.factor,
        "rope_original_max_position_embeddings": shape.original,
        "rope_beta_fast": shape.beta_fast,
        "rope_beta_slow": shape.beta_slow,
        "rope_mscale": 1.0,
        "rope_mscale_all_dim": 1.0,
    }
    cos, sin = rope.tables(config, np.arange(shape.context), np.float32)
    return torch.from_numpy(cos), torch.from_numpy(sin), rope.softmax_scale(config)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2j, 2j + 1) of the last axis; x [..., S, rope], cos and sin [S, rope / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Norm(nn.RMSNorm):
    """In float32, whatever comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps)


@dataclass
class Cache:
    """Keys and values of one layer for a batch: [B, heads, capacity, dim] each; ``filled`` positions count."""

    keys: torch.Tensor
    values: torch.Tensor
    filled: int = 0


class Attention(nn.Module):
    def __init__(self, shape: TargetShape, scale: float) -> None:
        super().__init__()
        s = shape
        self.heads, self.nope, self.rope, self.v = (
            s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim, s.v_head_dim,
        )  # fmt: skip
        self.latent, self.scale = s.kv_lora_rank, scale
        self.q_a = nn.Linear(s.hidden_size, s.q_lora_rank, bias=False)
        self.q_norm = Norm(s.q_lora_rank, eps=s.latent_norm_eps)
        self.q_b = nn.Linear(s.q_lora_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a = nn.Linear(s.hidden_size, self.latent + self.rope, bias=False)
        self.kv_norm = Norm(self.latent, eps=s.latent_norm_eps)
        self.kv_b = nn.Linear(self.latent, self.heads * (self.nope + self.v), bias=False)
        self.o = nn.Linear(self.heads * self.v, s.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache | None = None
    ) -> torch.Tensor:
        """x [B, S, H]; cos, sin [S, rope / 2] of its positions. With a cache: behind what it holds, and added to it;
        then S is 1 or the cache is empty."""
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        compressed = self.kv_a(x)
        shared = _rotated(compressed[..., self.latent :].unsqueeze(1), cos, sin)  # one key part for all heads
        up = self.kv_b(self.kv_norm(compressed[..., : self.latent])).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q = torch.cat((q[..., : self.nope], _rotated(q[..., self.nope :], cos, sin).to(q.dtype)), dim=-1)
        k = torch.cat((up[..., : self.nope], shared.to(up.dtype).expand(-1, self.heads, -1, -1)), dim=-1)
        v = up[..., self.nope :]
        causal = True
        if cache is not None:
            end = cache.filled + x.shape[1]
            cache.keys[:, :, cache.filled : end], cache.values[:, :, cache.filled : end] = k, v
            causal = cache.filled == 0
            cache.filled = end
            k, v = cache.keys[:, :, :end], cache.values[:, :, :end]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape[2] > 1, scale=self.scale)
        y: torch.Tensor = self.o(out.transpose(1, 2).flatten(-2))
        return y


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """Router, routed experts and shared experts. ``quantized`` is switched off only to measure what INT4 costs."""

    bias: torch.Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        e, i, h = shape.n_routed_experts, shape.moe_intermediate_size, shape.hidden_size
        self.chosen, self.scaling = shape.num_experts_per_tok, shape.routed_scaling_factor
        self.router = nn.Parameter(torch.empty(e, h))
        self.register_buffer("bias", torch.zeros(e))
        self.gate, self.up = (nn.Parameter(torch.empty(e, i, h)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(e, h, i))
        self.shared = MLP(h, i * shape.n_shared_experts)
        self.quantized = True

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, experts], 0 where not chosen, and how often each expert was chosen, float32. The bias counts
        for the choice alone."""
        with torch.autocast(x.device.type, enabled=False):
            score = torch.sigmoid(x.float() @ self.router.float().t())
            _, index = torch.topk(score.detach() + self.bias, self.chosen, dim=-1)
            weight = score.gather(-1, index)
            weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20) * self.scaling
            dense = torch.zeros_like(score).scatter(-1, index, weight)
            load = torch.zeros_like(score).scatter(-1, index, 1.0).sum(dim=0)
        return dense, load

    def values(self) -> Weights:
        """Gate, up and down as the file will hold them. Not part of `forward`: a compiler fuses it, and then leaves
        out that scales are rounded to bf16."""
        gate, up, down = ((fake_quantized(w) if self.quantized else w) for w in (self.gate, self.up, self.down))
        return gate, up, down

    def forward(self, x: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, -2)
        weight, load = self.route(rows)
        gate, up, down = weights
        inner = F.silu(F.linear(rows, gate.flatten(0, 1))) * F.linear(rows, up.flatten(0, 1))
        experts = weight.shape[1]
        inner = (inner.unflatten(-1, (experts, -1)) * weight.to(inner.dtype).unsqueeze(-1)).flatten(-2)
        routed = F.linear(inner, down.transpose(0, 1).flatten(1))  # [H, E * I]: sums over experts too
        y: torch.Tensor = self.shared(x) + routed.unflatten(0, x.shape[:-1])
        return y, load


class Layer(nn.Module):
    def __init__(self, shape: TargetShape, dense: bool, scale: float) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.attention = Attention(shape, scale)
        self.mlp_norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size) if dense else Experts(shape)
        self.dense = dense

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weights: Weights | None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after this layer, and the experts' loads (of no experts where it is dense). weights:
        what `Experts.values` gave; None in a dense layer."""
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        if weights is None:
            return x + self.mlp(self.mlp_norm(x)), x.new_zeros(0)
        y, load = self.mlp(self.mlp_norm(x), weights)
        return x + y, load


class Target(nn.Module):
    """``run``: the layers as they are called; a trainer may put compiled ones in their place."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        cos, sin, self.scale = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        dense = shape.first_k_dense_replace
        self.layers = nn.ModuleList(Layer(shape, i < dense, self.scale) for i in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.run: list[Any] = list(self.layers)
        self._initialise()

    def _initialise(self) -> None:
        """Normal of variance 1 / inputs; what writes to the residual stream is divided by the square root of its
        writers; embeddings have the size of one."""
        writers = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            std = p.shape[-1] ** -0.5
            if name.endswith(("attention.o.weight", "down.weight", "mlp.down")):
                std *= writers
            nn.init.normal_(p, std=0.7 if name == "embed.weight" else 0.5 * std if name == "head.weight" else std)

    def hidden(
        self, tokens: torch.Tensor, caches: list[Cache] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """tokens [B, S]: the stream after the final norm [B, S, H]; after each layer; each expert layer's loads."""
        start = caches[0].filled if caches else 0
        end = start + tokens.shape[1]
        if end > self.shape.context:
            raise ValueError(f"{end} positions; the model has {self.shape.context}")
        cos, sin = self.cos[start:end], self.sin[start:end]
        x = self.embed(tokens)
        taps, loads = [], []
        for i, layer in enumerate(self.layers):
            run = layer if caches else self.run[i]
            weights = None if layer.dense else layer.mlp.values()
            x, load = run(x, cos, sin, weights, caches[i] if caches else None)
            taps.append(x)
            if load.numel():
                loads.append(load)
        return self.norm(x), taps, loads

    def caches(self, batch: int, capacity: int, dtype: torch.dtype) -> list[Cache]:
        """Empty ones."""
        s = self.shape
        device = self.embed.weight.device

        def room(width: int) -> torch.Tensor:
            return torch.empty(batch, s.num_attention_heads, capacity, width, dtype=dtype, device=device)

        return [
            Cache(room(s.qk_nope_head_dim + s.qk_rope_head_dim), room(s.v_head_dim)) for _ in range(s.num_hidden_layers)
        ]

    def balance(self, loads: list[torch.Tensor], step: float) -> None:
        """Move each router's bias by `step` towards equal loads (auxiliary-loss-free balancing, arXiv 2408.15664):
        up for experts below the mean, down above. The mean of the biases stays 0."""
        layers = [layer.mlp for layer in self.layers if not layer.dense]
        with torch.no_grad():
            for experts, load in zip(layers, loads, strict=True):
                experts.bias += step * torch.sign(load.mean() - load)
                experts.bias -= experts.bias.mean()
