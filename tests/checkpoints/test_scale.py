"""The names, shapes and places of all 208,550 tensors of Kimi K2.5, and loading that can be watched and stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kimi_folder
import numpy as np
import pytest
from folders import CONFIG, INT4, QUANTIZED, int4, weights, write_folder

from kdtree_engine import Engine, EngineError, _native
from kdtree_engine.checkpoint import Checkpoint, Folder, open_checkpoint
from kdtree_engine.checkpoint_audit import Item
from kdtree_engine.safetensors_file import SafetensorsFile


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi_folder.write(tmp_path_factory.mktemp("kimi"))


def expected(checkpoint: Checkpoint) -> list[tuple[str, list[int], bool]]:
    return _native.EngineBuilder(dict(checkpoint.config.fields), "cpu", 1).expected()


@pytest.fixture(scope="module")
def opened(kimi: Path) -> Iterator[tuple[Folder, list[Item], float]]:
    """The folder, its audit, and the CPU time of both: the machine may be busy."""
    started = time.process_time()
    with open_checkpoint(kimi) as checkpoint:
        assert isinstance(checkpoint, Folder)
        checkpoint.check_extent()
        items = checkpoint.audit(expected(checkpoint))
        yield checkpoint, items, time.process_time() - started


Opened = tuple[Folder, list[Item], float]


def test_every_tensor_of_kimi_k25_is_accounted_for_within_seconds(opened: Opened) -> None:
    """Work per module times modules (another loader took more than an hour) shows here, and so does a name
    that the published files have and the engine does not know."""
    checkpoint, items, seconds = opened
    assert seconds < 5
    tensors = checkpoint.tensors()
    assert len(tensors) == kimi_folder.TENSORS and len({t.file for t in tensors}) == kimi_folder.SHARDS
    assert round(sum(t.nbytes for t in tensors) / 2**30, 2) == 554.27, "GiB of the published files"
    assert sum(item.kind == "int4" for item in items) == 60 * 384 * 3
    skipped = [t for t in tensors if t.canonical is None]
    assert len(skipped) == 335, "the vision tower and its projector"
    used = sum(piece.nbytes for item in items for piece in item.pieces)
    assert used == sum(t.nbytes for t in tensors) - sum(t.nbytes for t in skipped)


class Machine:
    """A builder with so much memory, which no tensor may reach."""

    def __init__(self, checkpoint: Checkpoint, memory: int) -> None:
        self.memory_available = memory
        self.wanted = expected(checkpoint)

    def expected(self) -> list[tuple[str, list[int], bool]]:
        return self.wanted


def test_more_than_the_machine_holds_is_refused_before_a_byte_is_read(opened: Opened, monkeypatch: Any) -> None:
    """Otherwise the operating system ends the process, somewhere in the middle of 595 GB."""

    def read(self: SafetensorsFile, buffer: memoryview, offset: int) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(SafetensorsFile, "read_into", read)
    with pytest.raises(EngineError) as caught:
        opened[0].load_into(Machine(opened[0], 100 << 30))  # type: ignore[arg-type]
    assert caught.value.code == "out_of_memory"
    assert "553.4 GiB" in str(caught.value) and "100.0 GiB are left" in str(caught.value)


def test_a_shard_of_holes_is_refused_before_anything_is_used(opened: Opened) -> None:
    """The folder has headers alone, as after a download that reserved the space and stopped."""
    with pytest.raises(EngineError, match="nothing but zeros") as caught:
        opened[0].load_into(Machine(opened[0], 1 << 50))  # type: ignore[arg-type]
    assert caught.value.code == "bad_file" and "model-00001-of-000064" in str(caught.value)


# -- watching and stopping -----------------------------------------------------------------------------------


def model(tmp_path: Path) -> Path:
    config = QUANTIZED | {"quantization_config": INT4, "num_hidden_layers": 6, "n_routed_experts": 16}
    return write_folder(tmp_path, config, int4(weights(config)), shards=4)


def test_progress_ends_with_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = model(tmp_path)
    Engine.load(path, device="cpu", progress=lambda done, total: seen.append((done, total)))
    with open_checkpoint(path) as checkpoint:
        size = sum(t.nbytes for t in checkpoint.tensors())
    assert seen[-1] == (size, size) and seen == sorted(set(seen))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_progress_raises_ends_the_loading(tmp_path: Path, error: type[BaseException]) -> None:
    """Ctrl-C in the middle: no thread, no open file stays behind."""

    def stop(done: int, total: int) -> None:
        raise error

    path = model(tmp_path)
    for _ in range(3):
        with pytest.raises(error):
            Engine.load(path, device="cpu", progress=stop)
    assert not [t for t in threading.enumerate() if t.name == "kdtree-read"]
    open_files = [f for f in Path("/proc/self/fd").iterdir() if f.exists() and path in f.resolve().parents]
    assert not open_files


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """Mapped into memory it would be a SIGBUS."""
    path = model(tmp_path)
    last = max(path.glob("*.safetensors"))
    with open_checkpoint(path) as checkpoint:
        builder = _native.EngineBuilder(dict(checkpoint.config.fields), "cpu", 1)
        last.write_bytes(last.read_bytes()[:-5])
        with pytest.raises(EngineError, match=last.name) as caught:
            checkpoint.load_into(builder)
    assert caught.value.code == "io"


def test_the_order_of_tensors_in_the_files_is_of_no_account(tmp_path: Path) -> None:
    """By name (words beside their scales) or by dtype (far apart, as safetensors writes): the same model."""
    config = QUANTIZED | {"quantization_config": INT4}
    arrays = int4(weights(config))
    by_dtype = dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    backwards = dict(reversed(arrays.items()))
    scores = set()
    for i, order in enumerate((arrays, by_dtype, backwards)):
        path = write_folder(tmp_path / str(i), config, order)
        scores.add(Engine.load(path, device="cpu").session().score([1, 2, 3]).tobytes())
    assert len(scores) == 1


def test_parts_of_a_matrix_in_two_shards(tmp_path: Path) -> None:
    config = QUANTIZED | {"quantization_config": INT4}
    arrays = int4(weights(config))
    expected = Engine.load(write_folder(tmp_path / "one", config, arrays), device="cpu").session().score([1, 2])
    shards = len(arrays)  # a tensor each
    path = write_folder(tmp_path / "many", config, arrays, shards=shards)
    assert Engine.load(path, device="cpu").session().score([1, 2]).tobytes() == expected.tobytes()


# -- zeros ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.experts.3.down_proj.weight_packed",
     "model.layers.1.mlp.experts.3.down_proj.weight_scale", "model.layers.0.self_attn.kv_b_proj.weight"],
)  # fmt: skip
def test_a_tensor_of_zeros_is_named(tmp_path: Path, name: str) -> None:
    """A part of a download that was reserved and never written."""
    config = QUANTIZED | {"quantization_config": INT4}
    arrays = int4(weights(config))
    arrays[name] = np.zeros_like(arrays[name])
    with pytest.raises(EngineError, match="nothing but zeros") as caught:
        Engine.load(write_folder(tmp_path, config, arrays), device="cpu")
    assert name in str(caught.value) and caught.value.code == "bad_file"


def test_a_bias_of_zeros_is_a_bias(tmp_path: Path) -> None:
    """A model that never needed one; transformers starts with it."""
    arrays = weights(CONFIG)
    arrays["model.layers.1.mlp.gate.e_score_correction_bias"][:] = 0
    Engine.load(write_folder(tmp_path, CONFIG, arrays), device="cpu")
