"""What is exported is what was trained: the engine's logits, features and drafts against the torch models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import micro
import numpy as np
import pytest
from draft_models import watch

from harness.train.errors import TrainError
from kdtree_engine import CombinedDrafter, DFlashDrafter, Engine, PlantedDrafter

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return micro.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folders(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target and drafter with a trained-looking router bias, exported."""
    from harness.train.bpe import MASK
    from harness.train.drafter_model import Drafter
    from harness.train.export import save_drafter, save_target
    from harness.train.target_model import Target

    torch.manual_seed(1)
    model = Target(micro.TARGET)
    drafter = Drafter(micro.DRAFT, micro.TARGET)
    with torch.no_grad():
        for p in [*model.parameters(), *drafter.parameters()]:
            if p.ndim == 1:
                p.add_(0.1 * torch.randn(p.shape))  # norms that are not all ones
        for layer in model.layers:
            if not layer.dense:
                layer.mlp.bias.normal_(std=0.3)
        model.embed.weight[MASK] = drafter.mask
    folder = tmp_path_factory.mktemp("models")
    save_target(model, folder / "model", corpus)
    save_drafter(drafter, folder / "draft", micro.DRAFT, micro.TARGET)
    return folder


def test_engine_has_the_logits_of_the_torch_model(folders: Path) -> None:
    """Catches a wrong name, transposition, RoPE pairing, eps, router rule or INT4 packing in model or export; past
    the original context, so that YaRN counts."""
    from harness.train.export import load_target

    engine = Engine.load(folders / "model", device="cpu", threads=2)
    tokens = [10 + (i * i) % 280 for i in range(3 * micro.TARGET.original)]
    session = engine.session()
    ours = np.concatenate([session.score(tokens[i : i + 32]) for i in range(0, len(tokens), 32)])
    with torch.no_grad():
        model = load_target(folders / "model", "cpu")
        theirs = model.head(model.hidden(torch.tensor([tokens]))[0])[0].numpy()
    assert np.abs(ours - theirs).max() < TOLERANCE * max(1.0, np.abs(theirs).max())


def test_engine_drafts_what_the_torch_drafter_drafts(folders: Path) -> None:
    """Catches anchors, positions, taps or the mask's embedding that differ between training and use."""
    from harness.train.export import load_drafter, load_target

    engine = Engine.load(folders / "model", device="cpu", threads=2, draft_model=folders / "draft")
    prompt = [20 + i for i in range(24)]
    plain = engine.session().native
    plain.append(prompt)
    plain.begin(40)
    while plain.step().finished is None:
        pass
    session = engine.session().native
    session.append(prompt)
    planted = PlantedDrafter(plain.tokens, engine.vocab_size, 4, as_paths=True)
    seen = watch(session, 40, drafter=CombinedDrafter([DFlashDrafter(), planted]), budget=16)
    assert len(seen.drafts) >= 4

    target = load_target(folders / "model", "cpu")
    drafter, shape = load_drafter(folders / "draft", target, "cpu")
    assert shape == micro.DRAFT
    text = torch.tensor([session.tokens])
    with torch.no_grad():
        streams = target.hidden(text)[1]
        feature = drafter.features([streams[i] for i in micro.DRAFT.taps])
        for draft in seen.drafts:
            at = torch.tensor([[draft.position]])
            hidden = drafter(torch.tensor([[draft.root]]), at, feature, target.embed.weight)
            logits = target.head(hidden)[0, 0].numpy()
            assert np.abs(logits - draft.logits).max() < TOLERANCE * max(1.0, np.abs(logits).max()), draft.position


def test_an_exported_folder_loads_and_saves_to_the_same_bytes(folders: Path, corpus: Path, tmp_path: Path) -> None:
    """Catches INT4 weights that are quantised a second time."""
    from harness.train.export import load_target, save_target

    save_target(load_target(folders / "model", "cpu"), tmp_path / "again", corpus)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folders / "model" / name).read_bytes()


def test_a_cached_rollout_is_the_greedy_continuation(folders: Path) -> None:
    """Catches a cache that is off by one or holds another row's keys."""
    from harness.train.export import load_target
    from harness.train.rollout import rollout

    model = load_target(folders / "model", "cpu")
    prompt = torch.arange(20, 44).view(2, 12)
    text = rollout(model, prompt, 40, torch.zeros(2), "cpu")
    with torch.no_grad():
        best = model.head(model.hidden(text)[0]).argmax(dim=-1)
    assert torch.equal(text[:, 12:], best[:, 11:-1])
    engine = Engine.load(folders / "model", device="cpu", threads=1)
    result = engine.session().generate(prompt_tokens=prompt[0].tolist(), max_tokens=28, ignore_eos=True).run()
    assert result.tokens == text[0, 12:].tolist()


def test_another_config_is_refused(folders: Path, tmp_path: Path) -> None:
    """Catches a model that is trained on with other maths than it was trained with."""
    from harness.train.export import read_shape

    config = json.loads((folders / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    with pytest.raises(TrainError, match="norm_topk_prob is False"):
        read_shape(tmp_path)
    assert read_shape(folders / "model") == micro.TARGET


def test_sizes_that_int4_cannot_hold_are_refused() -> None:
    with pytest.raises(TrainError, match="multiple of 32"):
        replace(micro.TARGET, moe_intermediate_size=40)
    with pytest.raises(TrainError, match="taps"):
        replace(micro.DRAFT, taps=(0, 3)).check(micro.TARGET)
