"""Accepted length against budget, from traces.

The n-node tree is the prefix of any larger one (pop order), so a round that verified n nodes tells what every smaller
budget would have emitted at the same root: the accepted rows up to that budget, and the target's next token. A budget
counts the rounds that verified at least so many nodes; with `--budget auto` those are the rounds whose drafts looked
good, so that only a trace with a fixed budget gives an unbiased curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.rounds import Round

BUDGETS = (0, 1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 31, 32, 47, 64)
FEWEST = 5  # rounds behind a point


@dataclass(frozen=True)
class Accepted:
    budget: int
    mean: float  # tokens emitted a round
    rounds: int


def curve(rounds: Sequence[Round]) -> list[Accepted]:
    """One point for each budget that enough rounds verified."""
    points = []
    for budget in BUDGETS:
        # cut by a stop or by max_tokens: such a round emitted less than its path, and says nothing about the drafts
        seen = [r for r in rounds if r.nodes >= budget and len(r.emitted) == len(r.path)]
        if len(seen) >= FEWEST:
            tokens = sum(sum(row <= budget for row in r.path) for r in seen)  # the root is one of them
            points.append(Accepted(budget, tokens / len(seen), len(seen)))
    return points


def fixed(rounds: Sequence[Round]) -> bool:
    """Whether all rounds verified the same number of nodes, as far as their trees had them."""
    most = max(r.nodes for r in rounds)
    return all(r.nodes == min(most, len(r.tokens) - 1) for r in rounds)
