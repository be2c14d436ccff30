"""How many distinct experts the rows of a draft tree need: on the demo model's own trees, not by a formula.

    python bench/distinct_experts.py --corpus DIR [--json RECORD] [--curve FILE] [--prompts 6]

Decodes held-out prompts with the drafter, takes every eighth round's whole tree, and asks the router of every layer for
the experts of each node behind its own ancestors (PyTorch; the engine's logits agree with it). Rows are the root and
the first nodes in pop order, as a verify of that width would run them. "independent": E (1 - (1 - k / E)^N), rows that
choose without regard to each other. FILE is a curve as `python -m harness.scale --routing FILE` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from demo_model import prompts
from harness.train.export import load_target
from harness.train.sources import KINDS
from harness.train.target_model import Cache, Target
from kdtree_engine import Engine, demo_model

ROWS = (1, 2, 3, 5, 9, 17, 33, 64)
EVERY = 8  # rounds


class Recorder:
    """Takes down whom the routers chose: per expert layer a bool [T, experts] of the last forward."""

    def __init__(self, model: Target) -> None:
        self.layers = [layer.mlp for layer in model.layers if not layer.dense]
        self.chosen: list[torch.Tensor] = [torch.empty(0)] * len(self.layers)
        for i, experts in enumerate(self.layers):
            self._wrap(i, experts)

    def _wrap(self, i: int, experts: Any) -> None:
        plain = experts.route

        def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weight, load = plain(x)
            self.chosen[i] = weight > 0
            return weight, load

        experts.route = route


def experts_of_nodes(model: Target, seen: Recorder, before: list[int], trace: dict[str, Any]) -> torch.Tensor:
    """bool [nodes, layers, experts]; the root first, nodes in pop order. before: the tokens before the root."""
    nodes, depths, parents = trace["tokens"], trace["depths"], trace["parents"]
    out = torch.zeros(len(nodes), len(seen.layers), model.shape.n_routed_experts, dtype=torch.bool)
    caches = model.caches(1, len(before) + max(depths) + 1, torch.float32)
    model.hidden(torch.tensor([before]), caches)
    order = [0]
    for depth in range(max(depths) + 1):
        level = [i for i, d in enumerate(depths) if d == depth]
        if depth:
            rows = torch.tensor([order.index(parents[i]) for i in level])
            caches = [Cache(c.keys[rows], c.values[rows], c.filled) for c in caches]
        model.hidden(torch.tensor([[nodes[i]] for i in level]), caches)
        for layer, chosen in enumerate(seen.chosen):
            out[level, layer] = chosen
        order = level
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--prompts", type=int, default=6)
    args = parser.parse_args()
    folders = demo_model()
    engine = Engine.load(folders.target, device="cpu", draft_model=folders.draft)
    model = load_target(folders.target, "cpu")
    seen = Recorder(model)
    total, top = model.shape.n_routed_experts, model.shape.num_experts_per_tok
    record: dict[str, Any] = {"independent": {n: total * (1 - (1 - top / total) ** n) for n in ROWS}}
    pooled = torch.zeros(len(ROWS), len(seen.layers))
    for kind in KINDS:
        sums, trees = torch.zeros(len(ROWS), len(seen.layers)), 0
        for prompt in prompts(args.corpus, kind, args.prompts):
            rounds: list[dict[str, Any]] = []
            result = engine.session().generate(
                prompt_tokens=prompt, max_tokens=128, ignore_eos=True, drafter="dflash", budget=63,
                on_round=rounds.append, temperature=0.7, seed=1,
            ).run()  # fmt: skip
            text = [*prompt, *result.tokens]
            for trace in rounds[::EVERY]:
                if len(trace["tokens"]) < max(ROWS):
                    continue
                assert text[trace["position"]] == trace["tokens"][0]
                with torch.no_grad():
                    chosen = experts_of_nodes(model, seen, text[: trace["position"]], trace)
                sums += torch.stack([chosen[:n].any(dim=0).sum(dim=-1) for n in ROWS])
                trees += 1
        mean = sums / trees
        pooled += mean / len(KINDS)
        record[kind] = {"trees": trees, "mean": dict(zip(ROWS, mean.mean(dim=1).tolist(), strict=True)),
                        "by_layer": {n: row.tolist() for n, row in zip(ROWS, mean, strict=True)}}  # fmt: skip
        print(kind, trees, [round(v, 2) for v in mean.mean(dim=1).tolist()], file=sys.stderr, flush=True)
    record["all"] = dict(zip(ROWS, pooled.mean(dim=1).tolist(), strict=True))
    text_ = json.dumps(record, indent=1) + "\n"
    if args.json:
        args.json.write_text(text_)
    else:
        print(text_, end="")
    if args.curve:
        curve = {"experts": total, "top_k": top, "source": "demo model, trees of its drafter, temperature 0.7",
                 "points": [[n, round(v, 4)] for n, v in record["all"].items()]}  # fmt: skip
        args.curve.write_text(json.dumps(curve) + "\n")


if __name__ == "__main__":
    main()
