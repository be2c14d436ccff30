"""A second reading of DFlash, in PyTorch, by the paper (arXiv 2602.06036) and the published layout of checkpoints.

Written against the shapes and names of the files alone, in float64, with torch's own attention, norms and the
frequencies of transformers; it shares no line with the numpy oracle. One call runs one draft over the taps of the
whole prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3 import Qwen3Config


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        heads, groups, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.dim = dim
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, groups * dim, bias=False)
        self.v_proj = nn.Linear(hidden, groups * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=eps)
        self.k_norm = nn.RMSNorm(dim, eps=eps)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.dim))

    def forward(self, x: torch.Tensor, feature: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [B, H] of the block, feature [S, H]; turn [S + B, dim / 2] complex; mask [B, S + B], True where seen."""
        both = torch.cat([feature, x])  # one projection for context and block
        q = rotated(self.q_norm(self.heads(self.q_proj(x))), turn[-len(x) :])
        k = rotated(self.k_norm(self.heads(self.k_proj(both))), turn)
        v = self.heads(self.v_proj(both))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(out.transpose(0, 1).flatten(-2))


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Half-split pairs as complex numbers: component j is the real, j + dim / 2 the imaginary part."""
    real, imaginary = x.chunk(2, dim=-1)
    y = torch.complex(real, imaginary) * turn[:, None, :]
    return torch.cat([y.real, y.imag], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    def forward(self, x: torch.Tensor, feature: torch.Tensor, turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), feature, turn, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchDFlash(nn.Module):
    """config: of the folder. rows: of a block, the anchor included. causal, window (0: none): one number a layer.
    amplitude: of cos and sin."""

    def __init__(
        self, config: dict[str, Any], rows: int, causal: list[int], window: list[int], amplitude: float
    ) -> None:
        super().__init__()
        inner = config.get("dflash_config", {})
        self.taps = inner["target_layer_ids"]
        self.mask_token = inner["mask_token_id"]
        self.rows, self.causal, self.window, self.amplitude = rows, causal, window, amplitude
        hidden = config["hidden_size"]
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
        scaling = config["rope_scaling"]
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        if scaling is not None:
            rope = {k: v for k, v in scaling.items() if k != "type"} | rope | {"rope_type": "yarn"}
        self.rope = Qwen3Config(**{k: config[k] for k in names}, rope_parameters=rope)

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """[P, dim / 2] complex: the rotation at each position."""
        if self.rope.rope_parameters["rope_type"] == "default":
            dim = self.rope.head_dim
            frequency = self.rope.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        else:
            frequency, _ = ROPE_INIT_FUNCTIONS["yarn"](self.rope, torch.device("cpu"))
        angle = (positions.float()[:, None] * frequency.float()[None, :]).double()
        return torch.polar(torch.full_like(angle, self.amplitude), angle)

    def features(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        """[S, H] of the target's hidden states as transformers numbers them: the embedding first."""
        return self.hidden_norm(self.fc(torch.cat([hidden_states[i + 1] for i in self.taps], dim=-1)))

    def forward(self, root: int, feature: torch.Tensor, embed: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Logits [rows - 1, vocab] behind `root`, which stands at position len(feature)."""
        start = len(feature)
        x = embed[torch.tensor([root] + [self.mask_token] * (self.rows - 1))]
        key = torch.arange(start + self.rows)
        turn, query = self.turns(key), key[start:]
        for layer, causal, window in zip(self.layers, self.causal, self.window, strict=True):
            apart = query[:, None] - key[None, :]
            mask = torch.ones_like(apart, dtype=torch.bool)
            if causal:
                mask &= apart >= 0
            if window:
                mask &= apart.abs() < window
            x = layer(x, feature, turn, mask)
        return self.norm(x)[1:] @ head.T
