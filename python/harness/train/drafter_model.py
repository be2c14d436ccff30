"""The DFlash draft model in PyTorch (arXiv 2602.06036), in the form that trains many anchors of a sequence at once.

Parameters carry the published names. ``mask`` is the embedding of the mask token, which is trained with the
drafter and then written into the target's embedding: text never holds that token, so the target does not change.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from harness.train.shapes import DraftShape, TargetShape
from harness.train.target_model import Norm

__all__ = ["Drafter"]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (j, j + dim / 2); x [B, heads, R, dim], cos and sin [B or 1, 1, R, dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int, draft: DraftShape) -> None:
        super().__init__()
        self.dim = draft.head_dim
        self.groups = draft.num_attention_heads // draft.num_key_value_heads
        self.q_proj = nn.Linear(hidden, draft.num_attention_heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, draft.num_key_value_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, draft.num_key_value_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(draft.num_attention_heads * self.dim, hidden, bias=False)
        self.q_norm = Norm(self.dim, eps=draft.rms_norm_eps)
        self.k_norm = Norm(self.dim, eps=draft.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, feature: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], seen: torch.Tensor
    ) -> torch.Tensor:
        """x [B, R, H] of the blocks, feature [B, S, H]; turn: cos and sin of the S + R positions; seen
        [B, 1, R, S + R]."""
        both = torch.cat((feature.to(x.dtype), x), dim=1)
        cos, sin = turn
        rows = x.shape[1]
        q = _rotated(self.q_norm(self._heads(self.q_proj(x))), cos[:, :, -rows:], sin[:, :, -rows:])
        k = _rotated(self.k_norm(self._heads(self.k_proj(both))), cos, sin).to(q.dtype)
        v = self._heads(self.v_proj(both)).to(q.dtype)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return y


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    def __init__(self, hidden: int, draft: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(hidden, eps=draft.rms_norm_eps)
        self.self_attn = Attention(hidden, draft)
        self.post_attention_layernorm = Norm(hidden, eps=draft.rms_norm_eps)
        self.mlp = MLP(hidden, draft.intermediate_size)

    def forward(
        self, x: torch.Tensor, feature: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], seen: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), feature, turn, seen)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Drafter(nn.Module):
    """draft, target: the shapes. Embedding and head are the target's and are handed to `forward`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, draft: DraftShape, target: TargetShape) -> None:
        super().__init__()
        draft.check(target)
        hidden = target.hidden_size
        self.rows, self.window = draft.rows, draft.window
        self.fc = nn.Linear(len(draft.taps) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps=draft.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(hidden, draft) for _ in range(draft.num_hidden_layers))
        self.norm = Norm(hidden, eps=draft.rms_norm_eps)
        self.mask = nn.Parameter(torch.empty(hidden))
        exponent = torch.arange(0, draft.head_dim, 2, dtype=torch.float64) / draft.head_dim
        frequency = (draft.rope_theta**-exponent).float()
        angle = (torch.arange(target.context + draft.rows).float()[:, None] * frequency).double()
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        writers = (2 * draft.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=p.shape[-1] ** -0.5 * (writers if last else 1.0))
        nn.init.normal_(self.mask, std=0.5)

    def features(self, taps: list[torch.Tensor]) -> torch.Tensor:
        """c_t [B, S, H] of the target's streams [B, S, H] after the tapped layers."""
        y: torch.Tensor = self.hidden_norm(self.fc(torch.cat(taps, dim=-1)))
        return y

    def forward(
        self, root: torch.Tensor, at: torch.Tensor, feature: torch.Tensor, embed: torch.Tensor
    ) -> torch.Tensor:
        """What the target's head reads [B, A, rows - 1, H] of A anchors in each sequence.

        root [B, A]: the tokens at positions `at` [B, A]; an anchor sees the features [B, S, H] of the positions
        before its own, no further back than the window, and its own block. embed [V, H]: the target's.
        """
        batch, anchors = root.shape
        context, rows = feature.shape[1], self.rows
        first = embed[root].unsqueeze(2)
        block = torch.cat((first, self.mask.to(first.dtype).expand(batch, anchors, rows - 1, -1)), dim=2)
        x = block.flatten(1, 2)
        step = torch.arange(rows, device=root.device)
        query = (at.unsqueeze(-1) + step).flatten(1)  # [B, A * rows]
        before = torch.arange(context, device=root.device)
        position = torch.cat((before.expand(batch, -1), query), dim=1)
        turn = self.cos[position].unsqueeze(1), self.sin[position].unsqueeze(1)
        owner = torch.arange(anchors, device=root.device).repeat_interleave(rows)
        anchor = at.repeat_interleave(rows, dim=1).unsqueeze(-1)
        past = (before < anchor) & (query.unsqueeze(-1) - before < self.window)
        own = (owner[:, None] == owner[None, :]).expand(batch, -1, -1)
        seen = torch.cat((past, own), dim=-1).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, feature, turn, seen)
        y: torch.Tensor = self.norm(x).unflatten(1, (anchors, rows))[:, :, 1:]
        return y
