"""bench/int4_accuracy.py: the table of what INT4 costs, on a model whose answers depend on its experts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import chat_models
import pytest

from kdtree_engine import Engine
from kdtree_engine.convert import convert
from kdtree_engine.perplexity import perplexity

ROOT = Path(__file__).parents[2]
TEXT = "It was the best of times, it was the worst of times.\n" * 6
KINDS = ["f32", "bf16", "int4 minmax", "int4 mse"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("int4_accuracy", ROOT / "bench" / "int4_accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.write_folder(tmp_path_factory.mktemp("accuracy") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def test_each_row_is_the_model_that_it_names(
    bench: ModuleType, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches rows that were scored with another row's weights, and folders that are left behind."""
    (tmp_path / "work").mkdir()
    record = tmp_path / "record.json"
    arguments = [str(model), "--text", str(text), "--window", "64", "--dir", str(tmp_path / "work"), "--json"]
    assert bench.main([*arguments, str(record)]) == 0
    rows = {row["weights"]: row for row in json.loads(record.read_text())["rows"]}
    assert [kind for kind in rows if "rounded" not in kind] == KINDS and len(rows) == 5
    assert rows["f32"]["bits_per_byte"] == perplexity(Engine.load(model), TEXT, 64).bits_per_byte
    for rule in ("minmax", "mse"):
        report = convert(model, tmp_path / rule, to="int4", scales=rule, rest="bf16")  # type: ignore[arg-type]
        row = rows[f"int4 {rule}"]
        assert row["bits_per_byte"] == perplexity(Engine.load(tmp_path / rule), TEXT, 64).bits_per_byte
        assert row["relative_error"] == pytest.approx(report.relative_error, rel=1e-12)  # threads end in any order
    assert len({row["bits_per_byte"] for row in rows.values()}) == 5
    assert rows["int4 mse"]["relative_error"] < rows["int4 minmax"]["relative_error"]
    assert rows["int4 mse"]["weight_bytes"] < rows["bf16"]["weight_bytes"] < rows["f32"]["weight_bytes"]
    assert not list((tmp_path / "work").iterdir())
    out = capsys.readouterr().out
    assert all(kind in out for kind in rows) and f"{rows['f32']['bits_per_byte']:.6f}" in out


def test_a_model_that_is_stored_in_int4_has_a_row_of_its_own(
    bench: ModuleType, model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(model, tmp_path / "int4", to="int4", rest="f32")
    record = tmp_path / "record.json"
    assert bench.main([str(tmp_path / "int4"), "--text", str(text), "--limit", "40", "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["weights"] for row in rows][:2] == ["as stored", "f32"]
    assert rows[0]["bits_per_byte"] == rows[1]["bits_per_byte"], "code * scale is exact"


def test_what_cannot_be_read_is_told(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert bench.main([str(tmp_path), "--text", str(tmp_path / "bytes")]) == 1
    assert "UTF-8" in capsys.readouterr().err
    (tmp_path / "text").write_text("text")
    assert bench.main([str(tmp_path / "no model"), "--text", str(tmp_path / "text")]) == 1
    assert "no model does not exist" in capsys.readouterr().err
    assert bench.main([str(tmp_path / "text"), "--text", str(tmp_path / "text")]) == 1
    assert "expected a Hugging Face folder" in capsys.readouterr().err
