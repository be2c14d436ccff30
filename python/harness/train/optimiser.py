"""Muon for matrices, AdamW for the rest, and a schedule by the clock.

Muon (Keller Jordan, 2024): the momentum of a matrix is orthogonalised by five Newton-Schulz steps, so that every
direction learns at the same rate. Stacks of experts [E, out, in] are so many matrices, and matrices of one shape go
through the steps together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Optimiser", "rate_at"]


def rate_at(done: float, warmup: float, cooldown: float) -> float:
    """The factor of the learning rate when the share `done` of the time is over: a ramp, a plateau, a ramp to 0."""
    if done < warmup:
        return done / warmup
    return min(1.0, max(0.0, (1.0 - done) / cooldown))


def orthogonalised(g: torch.Tensor) -> torch.Tensor:
    """Nearly the nearest matrices with equal singular values, of g [N, out, in]: the quintic of Muon, in bf16 on a
    GPU."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x if wide else x.mT


class Optimiser:
    """``matrices`` get Muon; ``others`` get AdamW, and so do ``slow`` ones (routers), at 0.3 of its rate."""

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        matrix_rate: float,
        other_rate: float,
        weight_decay: float,
        slow: Sequence[torch.Tensor] = (),
    ) -> None:
        self.matrix_rate, self.other_rate, self.decay = matrix_rate, other_rate, weight_decay
        self.groups: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for p in matrices:
            self.groups[(p.shape[-2], p.shape[-1])].append(p)
        self.momentum = {shape: [torch.zeros_like(p) for p in group] for shape, group in self.groups.items()}
        groups = [{"params": list(p), "scale": s} for p, s in ((others, 1.0), (slow, 0.3)) if p]
        self.adam = torch.optim.AdamW(groups, lr=other_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self.parameters = [*matrices, *others, *slow]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self, factor: float, momentum: float = 0.95) -> None:
        """`factor` scales both learning rates."""
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * factor * group["scale"]
        self.adam.step()
        with torch.no_grad():
            for shape, group in self.groups.items():
                self._muon(shape, group, self.matrix_rate * factor, momentum)

    def _muon(self, shape: tuple[int, int], group: list[torch.Tensor], rate: float, momentum: float) -> None:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in group]
        held = self.momentum[shape]
        torch._foreach_lerp_(held, grads, 1 - momentum)
        update = torch._foreach_lerp(grads, held, momentum)  # Nesterov
        stacked = torch.cat([u.reshape(-1, *shape) for u in update])
        direction = orthogonalised(stacked)
        # A step changes the outputs by the same size whatever the shape.
        scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
        at = 0
        for p in group:
            count = p.numel() // (shape[0] * shape[1])
            p.mul_(1 - rate * self.decay)
            p.add_(direction[at : at + count].reshape(p.shape).to(p.dtype), alpha=-scale)
            at += count

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"adam": self.adam.state_dict(), "momentum": list(self.momentum.values())}

    def load(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        self.adam.load_state_dict(state["adam"])
        for held, saved in zip(self.momentum.values(), state["momentum"], strict=True):
            for mine, other in zip(held, saved, strict=True):
                mine.copy_(other)
