"""A checkpoint that transformers saved, and the logits that transformers computed for it, without either at
hand.

tests/data/hf_fixture/make.py made the folder and says what its model is sensitive to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import widen

from kdtree_engine import Engine, kdtr
from kdtree_engine.checkpoint import open_checkpoint
from kdtree_engine.safetensors_file import SafetensorsFile

FIXTURE = Path(__file__).parents[1] / "data" / "hf_fixture"
EXPECTED = kdtr.read(FIXTURE / "expected.kdtr")
TEXT = (FIXTURE / "text.txt").read_text(encoding="utf-8")
TOLERANCE = 1e-5 * max(1.0, float(np.abs(EXPECTED["logits"]).max()))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(FIXTURE, device="cpu")


def agrees(logits: np.ndarray) -> bool:
    rows = logits[EXPECTED["positions"]]
    close = float(np.abs(rows - EXPECTED["logits"]).max()) <= TOLERANCE
    return close and bool((logits.argmax(-1) == EXPECTED["argmax"]).all())


def test_logits_are_those_of_transformers_at_every_position(engine: Engine) -> None:
    tokens = engine.encode(TEXT)
    assert tokens == EXPECTED["tokens"].tolist() and len(tokens) > 256
    logits = engine.session().score(tokens)
    difference = np.abs(logits[EXPECTED["positions"]] - EXPECTED["logits"]).max()
    assert difference <= TOLERANCE, f"{difference:g} over {TOLERANCE:g}"
    assert (logits.argmax(-1) == EXPECTED["argmax"]).all()


def test_greedy_tokens_are_those_of_transformers(engine: Engine) -> None:
    greedy = EXPECTED["greedy"].tolist()
    result = engine.session().generate(TEXT, max_tokens=len(greedy), ignore_eos=True).run()
    assert result.tokens == greedy and result.stop_reason == "length"
    assert result.prompt_tokens == EXPECTED["tokens"].tolist()


def test_one_prompt_chunk_or_many_and_generation_afterwards(engine: Engine) -> None:
    """Prefill and scoring compute the same rows: the logits behind the first new token have the same bits."""
    session = engine.session()
    result = session.generate(TEXT, max_tokens=3, ignore_eos=True, logprobs=1).run()
    first = session.native.logits()[0]
    assert result.tokens == EXPECTED["greedy"].tolist()[:3]
    assert first.tobytes() == engine.session().score(EXPECTED["tokens"].tolist())[-1].tobytes()


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The fixture with another config.json."""
    path = tmp_path / "model"
    shutil.copytree(FIXTURE, path)
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def old_spelling(config: dict[str, Any]) -> None:
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config["model_type"] = "kimi_k2"
    del config["rope_interleave"], config["head_dim"], config["qk_head_dim"]
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def test_the_spelling_of_the_published_models_is_the_same_model(tmp_path: Path) -> None:
    path = edited(tmp_path, old_spelling)
    assert agrees(Engine.load(path, device="cpu").session().score(EXPECTED["tokens"].tolist()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 1e-6),
        ("routed_scaling_factor", 2.8),
        ("norm_topk_prob", False),
        ("num_experts_per_tok", 2),
        ("rope_interleave", False),
        ("rope_parameters.rope_theta", 10000.0),
        ("rope_parameters.factor", 8.0),
        ("rope_parameters.beta_fast", 1.0),
        ("rope_parameters.beta_slow", 5.0),
        ("rope_parameters.mscale", 1.2),
        ("rope_parameters.mscale_all_dim", 0.8),
        ("rope_parameters.original_max_position_embeddings", 128),
    ],
)
def test_each_number_of_the_config_reaches_the_logits(tmp_path: Path, field: str, value: Any) -> None:
    """The comparison above is worth as much as what it would notice: every number, a little off, must fail
    it."""

    def edit(config: dict[str, Any]) -> None:
        *outer, key = field.split(".")
        target = config[outer[0]] if outer else config
        assert target[key] != value
        target[key] = value

    path = edited(tmp_path, edit)
    assert not agrees(Engine.load(path, device="cpu").session().score(EXPECTED["tokens"].tolist()))


def test_the_eps_of_the_latent_norms_reaches_the_logits() -> None:
    engine = Engine.load(FIXTURE, device="cpu", latent_norm_eps=1e-5)
    assert not agrees(engine.session().score(EXPECTED["tokens"].tolist()))


def test_bf16_has_the_bits_of_the_widened_model(engine: Engine, tmp_path: Path) -> None:
    """bf16 weights are widened element by element, exactly: a float32 copy of the model gives the same
    bits."""
    from folders import write_folder

    config = json.loads((FIXTURE / "config.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    for path in FIXTURE.glob("*.safetensors"):
        file = SafetensorsFile(path)
        for name, entry in file.tensors.items():
            raw = bytearray(entry.nbytes)
            file.read_into(memoryview(raw), entry.offset)
            array = np.frombuffer(raw, np.uint16 if entry.dtype == "BF16" else np.float32).reshape(entry.shape)
            arrays[name] = widen(array) if entry.dtype == "BF16" else array
        file.close()
    wide = Engine.load(write_folder(tmp_path, config, arrays), device="cpu")
    assert wide.weight_bytes > engine.weight_bytes
    tokens = EXPECTED["tokens"].tolist()
    assert wide.session().score(tokens).tobytes() == engine.session().score(tokens).tobytes()


def test_a_bundle_of_the_checkpoint_is_the_same_model(engine: Engine, tmp_path: Path) -> None:
    """Both doors lead to the same weights and the same config."""

    class Everything:
        def __init__(self) -> None:
            self.arrays: dict[str, np.ndarray] = {}

        def expected(self) -> list[tuple[str, list[int], bool]]:
            with open_checkpoint(FIXTURE) as checkpoint:
                return [(t.name, list(t.shape), True) for t in checkpoint.tensors()]

        def add(self, name: str, array: np.ndarray) -> None:
            self.arrays[name] = array.view(kdtr.BF16_BITS).copy() if array.dtype == np.uint16 else array.copy()

        def add_w4a16(self, module: str, qw: np.ndarray, sc: np.ndarray) -> None:
            raise AssertionError

    everything = Everything()
    with open_checkpoint(FIXTURE) as checkpoint:
        checkpoint.load_into(everything)
        fields = checkpoint.config.fields
    config = {f"config.{key}": np.array(value, np.float64) for key, value in fields.items()}
    path = tmp_path / "model.kdtr"
    kdtr.write(path, config | everything.arrays)
    bundle = Engine.load(path, device="cpu")
    tokens = EXPECTED["tokens"].tolist()
    assert bundle.session().score(tokens).tobytes() == engine.session().score(tokens).tobytes()
    assert bundle.weight_bytes == engine.weight_bytes
