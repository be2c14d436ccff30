"""Batches from a packed corpus, all of whose tokens are on the device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.train.corpus import load_tokens
from harness.train.errors import TrainError
from harness.train.sources import KINDS, Kind

__all__ = ["Batches", "manifest"]


def manifest(corpus: Path) -> dict[str, Any]:
    """The corpus's manifest.json. Raises TrainError."""
    path = corpus / "manifest.json"
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TrainError(f"{path} cannot be read: {error}; expected a folder of `corpus`") from error
    return value


class Batches:
    """Random stretches of the kinds' token streams. mixture: share of each kind."""

    def __init__(self, corpus: Path, part: str, mixture: Mapping[Kind, float], device: str) -> None:
        streams = {kind: load_tokens(corpus, part, kind) for kind in KINDS}
        self.kinds = [k for k in KINDS if mixture.get(k, 0) > 0]
        self.share = torch.tensor([mixture[k] for k in self.kinds], dtype=torch.float64)
        sizes = [len(streams[k]) for k in self.kinds]
        self.size = torch.tensor(sizes, dtype=torch.int64)
        self.start = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))], dtype=torch.int64)
        joined = np.concatenate([streams[k] for k in self.kinds]).astype(np.int32)
        self.tokens = torch.from_numpy(joined).to(device)

    def check(self, vocab: int, length: int) -> None:
        """Raises TrainError where the tokens do not fit a model of `vocab` or the streams are shorter than
        `length`."""
        if int(self.tokens.max()) >= vocab:
            raise TrainError(f"the corpus has token {int(self.tokens.max())}; the model's vocabulary is {vocab}")
        if int(self.size.min()) <= length:
            raise TrainError(f"a kind of the corpus has {int(self.size.min())} tokens; a sequence takes {length}")

    def draw(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """int64 [count, length]; `generator` is a CPU generator."""
        kind = torch.multinomial(self.share, count, replacement=True, generator=generator)
        room = self.size[kind] - length
        at = (torch.rand(count, dtype=torch.float64, generator=generator) * room).long() + self.start[kind]
        index = at.to(self.tokens.device).unsqueeze(1) + torch.arange(length, device=self.tokens.device)
        return self.tokens[index].long()
