"""Texts that the target writes: what a drafter has to predict."""

from __future__ import annotations

import torch

from harness.train.loop import autocast
from harness.train.target_model import Target

__all__ = ["rollout"]


def rollout(
    model: Target,
    prompt: torch.Tensor,
    length: int,
    temperature: torch.Tensor,
    device: str,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue prompts [B, P] to `length` tokens each: int64 [B, length]. temperature [B]; 0 is greedy. `generator`
    is one of the device."""
    batch, given = prompt.shape
    caches = model.caches(batch, length, torch.bfloat16 if device == "cuda" else torch.float32)
    tokens = torch.empty(batch, length, dtype=torch.long, device=device)
    tokens[:, :given] = prompt
    divisor = temperature.clamp_min(1e-6).unsqueeze(1)
    noisy = (temperature > 0).float().unsqueeze(1)
    with torch.no_grad(), autocast(device):
        x = prompt
        for at in range(given, length):
            hidden, _, _ = model.hidden(x, caches)
            logits = model.head(hidden[:, -1]).float()
            uniform = torch.rand(logits.shape, device=device, generator=generator).clamp_(1e-9, 1 - 1e-7)
            x = (logits + noisy * divisor * -torch.log(-torch.log(uniform))).argmax(dim=-1, keepdim=True)
            tokens[:, at : at + 1] = x
    return tokens
