"""The training loop: what is learned, resumed, balanced and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import micro
import pytest

from harness.train.errors import TrainError
from harness.train.shapes import Training

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

TRAINING = Training(batch=4, length=64, mixture={"code": 0.5, "prose": 0.5})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return micro.write_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus: Path, out: Path, steps: int = 60, training: Training = TRAINING) -> dict[str, Any]:
    import time

    from harness.train.loop import Clock
    from harness.train.target import train_target

    clock = Clock(None, steps, time.monotonic())
    return train_target(corpus, out, micro.TARGET, training, clock, "cpu", say=lambda _: None)


def losses(out: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(e["step"], e["loss"]) for e in entries]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run(corpus, out)
    return out


def test_a_target_learns_and_is_measured(straight: Path, corpus: Path) -> None:
    """Catches an optimiser that goes nowhere, and bits per byte that are not those of the folder."""
    from harness.train.evaluate import bits_per_byte
    from harness.train.export import load_target

    curve = losses(straight)
    assert curve[-1][1] < 0.8 * curve[0][1]
    report = json.loads((straight / "report.json").read_text())
    model = load_target(straight / "model", "cpu")
    assert report["heldout"]["code"]["int4"] == round(bits_per_byte(model, corpus, "code", "cpu"), 4)
    assert report["heldout"]["code"]["int4"] < 1.02 * report["heldout"]["code"]["bf16"]


def test_an_interrupted_run_goes_on_with_the_same_losses(
    straight: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a checkpoint without the optimiser, the random numbers or the router's bias."""
    from harness.train import target
    from harness.train.loop import Run

    monkeypatch.setattr(target, "_CHECKPOINT_EVERY", 0.0)
    plain = Run.record

    def interrupted(self: Run, *args: Any) -> bool:
        if self.step == 50:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(Run, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path)
    monkeypatch.setattr(Run, "record", plain)
    run(corpus, tmp_path)
    assert losses(tmp_path) == losses(straight)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
        straight / "model" / "model.safetensors"
    ).read_bytes()


def test_a_checkpoint_of_other_settings_is_refused(straight: Path, corpus: Path) -> None:
    with pytest.raises(TrainError, match="other settings"):
        run(corpus, straight, training=replace(TRAINING, batch=5))


def test_a_loss_that_is_no_number_goes_back_and_halves_the_rate(tmp_path: Path) -> None:
    """Catches weights that stay NaN, and a run that tries for ever."""
    import time

    from harness.train.loop import Clock, Run
    from harness.train.target import new_optimiser
    from harness.train.target_model import Target

    model = Target(micro.TARGET)
    optimiser = new_optimiser(model, TRAINING)
    loop = Run(tmp_path, model, optimiser, Clock(None, 10**6, time.monotonic()), torch.Generator(), "test")
    assert loop.record(torch.tensor(1.0), 1, dict)
    good = {n: t.clone() for n, t in model.state_dict().items()}
    for damping in (0.5, 0.25):
        with torch.no_grad():
            model.embed.weight.fill_(math.nan)
        for _ in range(40):
            if not loop.record(torch.tensor(math.nan), 1, dict):
                break
        assert loop.damping == damping
        assert all(torch.equal(t, good[n]) for n, t in model.state_dict().items())
    with pytest.raises(TrainError, match="no number"):
        for _ in range(40):
            loop.record(torch.tensor(math.inf), 1, dict)


def test_the_bias_moves_towards_equal_loads_and_counts_for_the_choice_alone() -> None:
    """Catches a bias with the wrong sign, one that drifts, and one that leaks into the weights."""
    from harness.train.target_model import Target

    torch.manual_seed(2)
    model = Target(micro.TARGET)
    experts = model.layers[1].mlp
    x = torch.randn(256, micro.TARGET.hidden_size)
    x += 2 * experts.router[0].detach() / experts.router[0].norm() ** 2  # expert 0 is everybody's
    _, before = experts.route(x)
    assert before[0] == before.max()
    for _ in range(300):
        _, load = experts.route(x)
        model.balance([load] * 2, 0.01)
    assert experts.bias[0] < 0 and abs(float(experts.bias.mean())) < 1e-6
    weight, after = experts.route(x)
    assert after.max() / after.mean() < 1.15 < before.max() / before.mean()
    assert torch.equal((weight > 0).sum(dim=1), torch.full((256,), micro.TARGET.num_experts_per_tok))
    score = torch.sigmoid(x @ experts.router.t())
    chosen = torch.where(weight > 0, score, 0.0)
    wanted = chosen / chosen.sum(dim=1, keepdim=True) * micro.TARGET.routed_scaling_factor
    torch.testing.assert_close(weight, wanted)


def test_learning_rates_follow_the_clock() -> None:
    from harness.train.optimiser import rate_at

    assert [rate_at(d, 0.1, 0.5) for d in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]


def test_muon_steps_are_nearly_orthogonal() -> None:
    """Catches a momentum that is applied as it is."""
    from harness.train.optimiser import orthogonalised

    g = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 16).unsqueeze(1)
    for shape in (g, g.mT):
        values = torch.linalg.svdvals(orthogonalised(shape))
        assert values.min() > 0.3 and values.max() < 1.3


def test_rounds_are_walked_from_the_first_token() -> None:
    """Catches a mean over all positions, which counts easy stretches too often."""
    from harness.train.evaluate import walk

    right = torch.zeros(14, 3, dtype=torch.bool)
    right[2] = torch.tensor([True, True, False])
    right[5] = torch.tensor([False, True, True])  # the first draft is wrong: nothing counts
    right[6] = True
    assert walk(right, 2) == [3, 1, 4]


def test_a_drafter_learns_what_its_target_writes(straight: Path, corpus: Path, tmp_path: Path) -> None:
    """Catches drafts at the wrong positions: the loss then stays where it began."""
    import time

    from harness.train.drafter import DraftTraining, train_drafter
    from harness.train.loop import Clock
    from kdtree_engine import Engine

    training = DraftTraining(
        pool=16, rounds=2, length=64, prompts=(8, 20), batch=8, anchors=6, report_prompts=4,
        mixture={"code": 1.0},
    )  # fmt: skip
    clock = Clock(None, 80, time.monotonic())
    train_drafter(corpus, straight / "model", tmp_path, micro.DRAFT, training, clock, "cpu", say=lambda _: None)
    curve = losses(tmp_path)
    assert curve[-1][1] < 0.75 * curve[0][1]
    engine = Engine.load(tmp_path / "model", device="cpu", threads=1, draft_model=tmp_path / "draft")
    session = engine.session()
    result = session.generate(prompt="the cat saw", max_tokens=40, drafter="dflash", budget=5, ignore_eos=True).run()
    lengths = result.stats["accepted_lengths"]
    assert sum(lengths) / len(lengths) > 1.2
