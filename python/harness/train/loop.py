"""What training runs share: the clock, the log, checkpoints, and what happens to a loss that is no number."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.train.errors import TrainError
from harness.train.optimiser import Optimiser, rate_at

__all__ = ["Clock", "Run", "autocast", "choose_device", "plot"]

_FETCH = 20  # steps between looks at the loss: each look waits for the device
_SNAPSHOT = 200  # steps between copies of the weights to fall back to
_MOST_FAILURES = 3
CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


def choose_device(name: str) -> str:
    """``auto`` is the GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainError("PyTorch sees no GPU; use --device cpu")
    return name


def autocast(device: str) -> Any:
    """bf16 products on a GPU, float32 on a CPU."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


@dataclass
class Clock:
    """How far a run is: by the clock where ``minutes`` is set (counted from ``started``), else by steps."""

    minutes: float | None
    steps: int | None
    started: float
    earlier: float = 0.0  # minutes of the run that this one resumes

    def done(self, step: int) -> float:
        """The share that is over, 1 at the end."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return min(1.0, (self.elapsed / 60 + self.earlier) / (self.minutes + self.earlier))

    @property
    def elapsed(self) -> float:
        """Seconds of this process."""
        return time.monotonic() - self.started


class Run:
    """One training run in a folder: ``checkpoint.pt`` (everything to go on), ``log.jsonl`` (a line every few steps).

    `state`: what else belongs into a checkpoint; `restore` takes it back.
    """

    def __init__(
        self, folder: Path, model: Any, optimiser: Optimiser, clock: Clock, generator: torch.Generator, title: str
    ) -> None:
        self.folder, self.model, self.optimiser, self.clock, self.generator = folder, model, optimiser, clock, generator
        self.title = title
        self.step = 0
        self.tokens = 0
        self.damping = 1.0  # halved whenever the loss was no number
        self._failures = 0
        self._saved = time.monotonic()
        self._resumed = 0  # tokens of earlier runs
        self._bar = _Bar(title)
        self._losses: list[torch.Tensor] = []
        self._good: dict[str, Any] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self, settings: dict[str, Any]) -> bool:
        """Go on from the folder's checkpoint, where there is one of the same settings."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return False
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle, zip and torch raise what they like
            raise TrainError(f"{path} is no checkpoint: {error}") from error
        if saved["settings"] != settings:
            raise TrainError(f"{path} is of another run (other settings); use another --out, or remove it")
        self._restore(saved)
        self.step, self.tokens = saved["step"], saved["tokens"]
        self._resumed = self.tokens
        self.clock.earlier = saved["minutes"]
        log = self.folder / LOG
        if log.exists():  # lines of steps that the checkpoint does not hold
            lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            log.write_text("".join(line + "\n" for line in lines))
        self.say(f"resumed at step {self.step}")
        return True

    def save(self, settings: dict[str, Any]) -> None:
        """Write the checkpoint; it appears whole or not at all."""
        saved = self._copy()
        saved |= {
            "settings": settings,
            "step": self.step,
            "tokens": self.tokens,
            "minutes": self.clock.elapsed / 60 + self.clock.earlier,
        }
        part = self.folder / (CHECKPOINT + ".part")
        torch.save(saved, part)
        os.replace(part, self.folder / CHECKPOINT)
        self._saved = time.monotonic()

    def save_due(self, seconds: float) -> bool:
        """Whether it is time, and the log holds every step: a resumed run then writes the same lines."""
        return not self._losses and time.monotonic() - self._saved >= seconds

    def _copy(self) -> dict[str, Any]:
        return {
            "model": {n: t.detach().clone() for n, t in self.model.state_dict().items()},
            "optimiser": _cloned(self.optimiser.state()),
            "generator": self.generator.get_state().clone(),
            "damping": self.damping,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimiser.load(_cloned(saved["optimiser"]))
        self.generator.set_state(saved["generator"].cpu())
        self.damping = saved["damping"]

    def rate(self, warmup: float, cooldown: float) -> float:
        """The learning rates' factor now."""
        return rate_at(self.clock.done(self.step), warmup, cooldown) * self.damping

    def record(self, loss: torch.Tensor, tokens: int, more: Callable[[], dict[str, float]]) -> bool:
        """Call after every step with its loss. False: the loss was no number, the weights are those of an earlier
        step again, and the learning rate is half of what it was. Raises TrainError at the third time."""
        self.step += 1
        self.tokens += tokens
        self._losses.append(loss.detach())
        if self.step % _FETCH and self.step > 3 and self.clock.done(self.step) < 1.0:
            return True
        values = torch.stack(self._losses).float().tolist()
        self._losses.clear()
        if not all(v == v and abs(v) < 1e30 for v in values):
            self._fall_back()
            return False
        if self._good is None or self.step % _SNAPSHOT < _FETCH:
            self._good = self._copy()
        mean = sum(values) / len(values)
        entry = {
            "step": self.step,
            "seconds": round(self.clock.elapsed, 2),
            "loss": round(mean, 6),
            "tokens": self.tokens,
            "damping": self.damping,
            **{k: round(v, 5) for k, v in more().items()},
        }
        with (self.folder / LOG).open("a") as log:
            log.write(json.dumps(entry) + "\n")
        self._show(mean)
        return True

    def _fall_back(self) -> None:
        self._failures += 1
        if self._good is None or self._failures >= _MOST_FAILURES:
            raise TrainError(f"the loss is no number at step {self.step}; try lower learning rates")
        damping = 0.5 * self.damping
        self._restore(self._good)
        self.damping = damping
        self.say(f"the loss is no number at step {self.step}: back to earlier weights, half the learning rate")

    def _show(self, loss: float) -> None:
        done = self.clock.done(self.step)
        rate = (self.tokens - self._resumed) / max(self.clock.elapsed, 1e-9) / 1e3
        self._bar.show(done, f"step {self.step}, loss {loss:.4f}, {rate:.0f}k tokens/s")

    def say(self, text: str) -> None:
        """A line beside the progress."""
        self._bar.close()
        print(f"{self.title}: {text}", file=sys.stderr, flush=True)


class _Bar:
    """Progress on stderr: rich's bar on a terminal, else a line every ten seconds."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._progress: Any = None
        self._shown = -math.inf

    def show(self, done: float, text: str) -> None:
        if sys.stderr.isatty():
            self._on_terminal(done, text)
        elif done >= 1.0 or time.monotonic() - self._shown >= 10:
            self._shown = time.monotonic()
            print(f"{self.title}: {100 * done:.1f} %, {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _on_terminal(self, done: float, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self._progress is None:
            columns = TextColumn(self.title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
            self._progress = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
            self._progress.add_task(text, total=1.0)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, description=text)
        if done >= 1.0:
            self.close()


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _cloned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_cloned(v) for v in value]
    return value


def plot(folder: Path, title: str) -> bool:
    """loss.png of the log; False where there is no log, or matplotlib is not installed."""
    if not (folder / LOG).exists():
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([e["tokens"] / 1e6 for e in entries], [e["loss"] for e in entries], linewidth=0.8)
    axes.set(xlabel="million tokens", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "loss.png", dpi=110)
    pyplot.close(figure)
    return True
