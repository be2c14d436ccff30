"""Every architecture against what transformers computed for it, with neither transformers nor torch at hand.

tests/data/arch_fixtures/make.py made the folders. tests/checkpoints/test_fixture.py does the same for a
DeepSeek V3 model with its tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtree_engine import Engine, EngineError, kdtr

FIXTURES = Path(__file__).parents[1] / "data" / "arch_fixtures"
NAMES = ["deepseek_v2", "glm4_moe_lite", "kimi_k25", "deepseek_v3_fp8"]
LAST_LAYER = 1


def folder(tmp_path: Path, name: str) -> Path:
    """A copy without what the tests compare with."""
    path = tmp_path / name
    shutil.copytree(FIXTURES / name, path, ignore=shutil.ignore_patterns("expected.kdtr"))
    return path


def expected(name: str) -> dict[str, np.ndarray]:
    return kdtr.read(FIXTURES / name / "expected.kdtr")


def agrees(ours: np.ndarray, theirs: np.ndarray) -> bool:
    bound = 1e-5 * max(1.0, float(np.abs(theirs).max()))
    return float(np.abs(ours.astype(np.float64) - theirs).max()) <= bound


def scores(path: Path, name: str, **options: Any) -> np.ndarray:
    tokens = expected(name)["tokens"].tolist()
    return Engine.load(path, device="cpu", **options).session().score(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_cache(tmp_path: Path, name: str) -> None:
    """RoPE rotates pairs in place here; transformers' V3 and GLM write them as two halves, its V2 does not."""
    wanted = expected(name)
    tokens, at = wanted["tokens"].tolist(), wanted["positions"]
    assert len(tokens) > 256
    engine = Engine.load(folder(tmp_path, name), device="cpu")
    session = engine.session()
    logits = session.score(tokens)
    assert agrees(logits[at], wanted["logits"])
    assert (logits.argmax(-1) == wanted["argmax"]).all()
    cache = session.native.cache(LAST_LAYER)[at]
    width = wanted["rope"].shape[1]
    rope = cache[:, -width:]
    if name != "deepseek_v2":
        rope = rope[:, [*range(0, width, 2), *range(1, width, 2)]]
    assert agrees(cache[:, :-width], wanted["latent"]) and agrees(rope, wanted["rope"])


def test_int4_both_rules(tmp_path: Path) -> None:
    """The exact products by default, as everybody's bf16 dequantisation on request."""
    wanted, path = expected("kimi_k25"), folder(tmp_path, "kimi_k25")
    at = wanted["positions"]
    rounded = scores(path, "kimi_k25", rounding="bf16")[at]
    assert agrees(rounded, wanted["bf16.logits"]) and not agrees(rounded, wanted["logits"])


def test_media_tokens_are_refused(tmp_path: Path) -> None:
    """Their embeddings are an image's in the whole model, and noise here."""
    session = Engine.load(folder(tmp_path, "kimi_k25"), device="cpu").session()
    for use in (session.score, lambda tokens: session.append(tokens=tokens)):
        with pytest.raises(EngineError, match="token 127 stands for an image") as caught:
            use([1, 127])
        assert caught.value.code == "unsupported"
    with pytest.raises(EngineError, match="token 127"):
        session.generate(prompt_tokens=[1, 127], max_tokens=1)
    assert session.tokens == []


CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "routed_scaling_factor": 1.01, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1,
        "rope_parameters.mscale_all_dim": 0.0, "rope_parameters.mscale": 1.0, "rope_parameters.factor": 32.0,
    },
    "glm4_moe_lite": {
        "routed_scaling_factor": 1.81, "rms_norm_eps": 1e-6, "norm_topk_prob": False, "rope_interleave": False,
        "rope_parameters.rope_theta": 1e5,
    },
    "kimi_k25": {
        "text_config.rope_scaling.beta_fast": 1.0, "text_config.rope_scaling.factor": 64.0,
        "text_config.rope_scaling.mscale_all_dim": 1.0, "text_config.rms_norm_eps": 1e-6,
        "text_config.routed_scaling_factor": 2.5,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in CHANGES.items() for field in fields])
def test_each_number_reaches_the_logits(tmp_path: Path, name: str, field: str) -> None:
    """The comparison is worth as much as what it would notice."""
    path, wanted = folder(tmp_path, name), expected(name)
    config = json.loads((path / "config.json").read_text())
    *outer, key = field.split(".")
    at = config
    for part in outer:
        at = at[part]
    assert at[key] != CHANGES[name][field]
    at[key] = CHANGES[name][field]
    (path / "config.json").write_text(json.dumps(config))
    assert not agrees(scores(path, name)[wanted["positions"]], wanted["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_the_eps_of_the_latent_norms_is_an_option(tmp_path: Path, name: str) -> None:
    wanted, path = expected(name), folder(tmp_path, name)
    assert not agrees(scores(path, name, latent_norm_eps=1e-5)[wanted["positions"]], wanted["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_trees_give_the_tokens_of_plain_decoding(tmp_path: Path, name: str) -> None:
    """Law 2 on every architecture and on quantised weights: with logits bit for bit."""
    engine = Engine.load(folder(tmp_path, name), device="cpu")
    prompt = expected(name)["tokens"].tolist()[:100]
    runs = []
    for drafter in ("none", "planted"):
        session = engine.session()
        result = session.generate(
            prompt_tokens=prompt, max_tokens=32, ignore_eos=True, drafter=drafter, budget=16, logprobs=1
        ).run()
        runs.append((result.tokens, session.native.logits().tobytes(), session.native.cache(LAST_LAYER).tobytes()))
    assert runs[0] == runs[1] and result.stats["accepted"] > 0
