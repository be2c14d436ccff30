"""kdtree verify: what it compares, and that it can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import kdtree

from kdtree_engine.cli import verify


def test_planted_drafts_prove_something(folder: Path) -> None:
    """Catches a comparison that compares nothing: every count must be there and not zero."""
    run = kdtree("verify", folder, "--ignore-eos", "--max-tokens", "48", "--json")
    assert run.code == 0, run.err
    value = run.json
    assert value["verdict"] == "identical" and value["difference"] is None and value["drafter"] == "planted"
    assert [r["budget"] for r in value["runs"]] == [1, 4, 8, 16, 31, 64, "auto"]
    for r in value["runs"]:
        assert r["tokens"] == 48 and r["logits_bits"] == 48 * 272 * 32
        assert r["cache_bits"] > 0 and r["difference"] is None
    assert sum(r["accepted"] for r in value["runs"]) > 48
    assert sum(r["branching_rounds"] for r in value["runs"]) > 0
    assert value["runs"][5]["target_forwards"] < value["plain_target_forwards"] == 48


def test_report_for_people(folder: Path) -> None:
    """Catches a report without its verdict or counts."""
    run = kdtree("verify", folder, "--ignore-eos", "--max-tokens", "16", "--budget", "8")
    assert run.code == 0 and run.err == ""
    last = run.out.splitlines()[-1]
    assert last.startswith("identical: 16 tokens and ") and "branching rounds" in last


def test_sampled(folder: Path) -> None:
    """Catches settings of the sampler that reach only one of the two decodings."""
    options = ("--temperature", "0.9", "--top-p", "0.95", "--min-p", "0.01", "--seed", "3", "--budget", "31")
    run = kdtree("verify", folder, "--ignore-eos", "--json", *options)
    assert run.code == 0 and run.json["runs"][0]["accepted"] > 0


def test_nothing_tested_is_not_a_pass(bundle: Path) -> None:
    """Catches a verification that reports success without a single accepted draft."""
    run = kdtree("verify", bundle, "--drafter", "none", "--budget", "4", "--max-tokens", "8")
    assert run.code == 2 and "nothing was tested" in run.err


def decoded(**changes: Any) -> verify.Decoded:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 5)).astype(np.float32).view(np.uint32)
    cache = [rng.normal(size=(4, 6)).astype(np.float32).view(np.uint32) for _ in range(2)]
    base = dict(tokens=[7, 8, 9], stop_reason="length", logits=logits, cache=cache, stats={})
    return verify.Decoded(**(base | changes))


def flipped(bits: np.ndarray, *index: int) -> np.ndarray:
    copy = bits.copy()
    copy[index] ^= 1
    return copy


def changes() -> list[tuple[dict[str, Any], str]]:
    plain = decoded()
    return [
        ({"tokens": [7, 5, 9]}, "token 1 (position 11) is 8 plainly and 5 with trees"),
        ({"tokens": [7, 8]}, "3 tokens come plainly and 2 with trees"),
        ({"stop_reason": "stop"}, "ends by length plainly and by stop"),
        (
            {"logits": flipped(plain.logits, 2, 3)},
            "token 2 (position 12) differ in 1 of 5 entries, first in entry 3",
        ),
        (
            {"cache": [plain.cache[0], flipped(plain.cache[1], 2, 0)]},
            "cache of layer 1 differs at position 2",
        ),
        ({"cache": [plain.cache[0][:3], plain.cache[1]]}, "layer 0 holds 4 positions plainly and 3"),
    ]


@pytest.mark.parametrize(("change", "sentence"), changes())
def test_each_kind_of_difference_is_found(change: dict[str, Any], sentence: str) -> None:
    """Catches a comparison that is blind to one bit of a logit, of the cache, or to a length."""
    difference = verify.first_difference(10, decoded(), decoded(**change))
    assert difference is not None and sentence in difference


def test_equal_runs_have_no_difference() -> None:
    """Catches a comparison that cries wolf, NaN bits included (they are compared as bits)."""
    nan = np.full((3, 5), 0x7FC00001, np.uint32)
    assert verify.first_difference(10, decoded(), decoded()) is None
    assert verify.first_difference(10, decoded(logits=nan), decoded(logits=nan.copy())) is None


def test_a_difference_is_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Catches a difference that is printed but not returned: the second decoding's last logit loses a bit."""
    from kdtree_engine.cli import app

    real = verify.decode

    def damaged(engine: Any, prompt: Any, options: Any, drafter: Any, budget: Any, i: Any) -> verify.Decoded:
        result = real(engine, prompt, options, drafter, budget, i)
        if drafter is not None:
            result.logits[-1, -1] ^= 1
        return result

    monkeypatch.setattr(verify, "decode", damaged)
    code = app.run(["verify", str(folder), "--ignore-eos", "--max-tokens", "8", "--budget", "4"])
    captured = capsys.readouterr()
    assert code == 1 and "DIFFERENT" in captured.out
    assert "budget 4: the logits behind generated token 7" in captured.err
