"""The stage that trains a target."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from harness.train import evaluate, tensors
from harness.train.data import Batches, manifest
from harness.train.errors import TrainError
from harness.train.export import load_target, save_target
from harness.train.loop import Clock, Run, autocast, plot
from harness.train.optimiser import Optimiser
from harness.train.shapes import TargetShape, Training
from harness.train.target_model import Target

__all__ = ["new_optimiser", "train_target"]

_EXPORT_EVERY = 100.0  # seconds
_CHECKPOINT_EVERY = 150.0
_LONGEST_COMPILE = 80.0
_MOST_OFF = 0.3  # of the gradient's length: bf16 sends a few tokens to other experts


def new_optimiser(model: Target, training: Training) -> Optimiser:
    """Muon for the matrices of the layers; AdamW for embedding, head, routers and norms."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    routers: list[torch.Tensor] = []
    for name, p in model.named_parameters():
        inside = name.startswith("layers.") and p.ndim >= 2
        (routers if name.endswith("router") else matrices if inside else others).append(p)
    t = training
    return Optimiser(matrices, others, t.matrix_rate, t.other_rate, t.weight_decay, slow=routers)


def _compiled(model: Target, batch: torch.Tensor, device: str, say: Callable[[str], None]) -> None:
    """Put compiled layers in place, or leave the plain ones where compiling or running them fails."""
    begun = time.monotonic()
    previous = signal.signal(signal.SIGALRM, _too_slow)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_COMPILE)
    try:
        wanted, gradient = _loss_and_gradient(model, batch, device)
        model.run = [torch.compile(layer, dynamic=False) for layer in model.layers]
        loss, other = _loss_and_gradient(model, batch, device)
        off = float((other - gradient).norm() / gradient.norm())
        say(f"compiled: loss {loss:.5f} for {wanted:.5f}, gradient off by {off:.4f}")
        if not (abs(loss - wanted) < 0.01 * wanted and off < _MOST_OFF):
            raise RuntimeError("the compiled layers compute something else")
        say(f"layers compiled in {time.monotonic() - begun:.1f} s")
    except Exception as error:  # whatever a compiler may raise: the plain layers always work
        model.run = list(model.layers)
        say(f"layers are not compiled ({type(error).__name__}: {str(error).splitlines()[:1]})")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    for p in model.parameters():
        p.grad = None


def _loss_and_gradient(model: Target, batch: torch.Tensor, device: str) -> tuple[float, torch.Tensor]:
    for p in model.parameters():
        p.grad = None
    loss, _ = loss_of(model, batch, device)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"more than {_LONGEST_COMPILE:.0f} s")


def loss_of(model: Target, batch: torch.Tensor, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Mean negative log-likelihood (nats per token) of batch [B, S + 1], and the experts' loads."""
    with autocast(device):
        hidden, _, loads = model.hidden(batch[:, :-1])
        logits = model.head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()), loads


def train_target(
    corpus: Path,
    out: Path,
    shape: TargetShape,
    training: Training,
    clock: Clock,
    device: str,
    compile_layers: bool = False,
    start_from: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, and write the checkpoint folder ``OUT/model`` every now and then and at the end; what `evaluate` says
    of it. `start_from`: an earlier such folder, whose INT4 values become the weights. Raises TrainError."""
    torch.manual_seed(training.seed)
    if shape.vocab_size != manifest(corpus)["vocab"]:
        raise TrainError(f"the corpus has {manifest(corpus)['vocab']} tokens, the model {shape.vocab_size}")
    if training.length > shape.context:
        raise TrainError(f"sequences of {training.length} tokens; the model has {shape.context} positions")
    if start_from is None:
        model = Target(shape).to(device)
    else:
        model = load_target(start_from, device)
        if model.shape != shape:
            raise TrainError(f"{start_from} has another shape than the one asked for")
        for layer in model.layers:
            if not layer.dense:
                layer.mlp.quantized = True
    optimiser = new_optimiser(model, training)
    generator = torch.Generator().manual_seed(training.seed)
    run = Run(out, model, optimiser, clock, generator, "target")
    settings = {"shape": asdict(shape), "training": asdict(training)}
    run.resume(settings)
    batches = Batches(corpus, "train", training.mixture, device)  # type: ignore[arg-type]
    batches.check(shape.vocab_size, training.length + 1)
    size = sum(p.numel() for p in model.parameters())
    run.say(f"{size / 1e6:.1f} M parameters, {len(batches.tokens) / 1e6:.1f} M tokens")
    if compile_layers:
        first = batches.draw(training.batch, training.length + 1, torch.Generator().manual_seed(0))
        _compiled(model, first, device, run.say)

    exported = time.monotonic()
    while clock.done(run.step) < 1.0:
        batch = batches.draw(training.batch, training.length + 1, generator)
        loss, loads = loss_of(model, batch, device)
        optimiser.zero_grad()
        loss.backward()
        factor = run.rate(training.warmup, training.cooldown)
        optimiser.step(factor)
        model.balance(loads, training.balance * min(1.0, 2 * factor))

        def more(loads: list[torch.Tensor] = loads, factor: float = factor) -> dict[str, float]:
            worst = max((float((load.max() / load.mean()).item()) for load in loads), default=1.0)
            return {"rate": factor, "busiest_expert": worst}

        run.record(loss, batch[:, 1:].numel(), more)
        if run.save_due(_CHECKPOINT_EVERY):
            run.save(settings)
        if time.monotonic() - exported > _EXPORT_EVERY:
            save_target(model, out / "model", corpus)
            exported = time.monotonic()
    if run.step == 0:
        raise TrainError("the time was over before the first step")
    run.save(settings)
    save_target(model, out / "model", corpus)
    model.run = list(model.layers)
    plot(out, "target")
    report = {
        "steps": run.step,
        "tokens": run.tokens,
        "minutes": round(clock.elapsed / 60 + clock.earlier, 2),
        "seed": training.seed,
        "settings": settings,
        "heldout": evaluate.target_report(model, out / "model", corpus, device),
    }
    tensors.write_text(out / "report.json", json.dumps(report, indent=1) + "\n")
    say(json.dumps(report["heldout"]))
    return report
