"""Both readers on the shared corpus: one verdict, one sentence, and the rule that the specification names."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kdtree_engine import _native, kdtr

ROOT = Path(__file__).resolve().parents[2]


def _load_corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_corpus", ROOT / "tests" / "data" / "kdtr" / "make_corpus.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


corpus = _load_corpus()
GOOD = dict(corpus.good())
BAD = {f"{rule}-{case}": (rule, data) for rule, case, data in corpus.bad()}
FILE_RULES = {"E_OPEN", "E_NOT_REGULAR", "E_MAP"}


def specified_rules() -> list[str]:
    """The codes of the numbered rules of the specification, in order."""
    text = (ROOT / "docs" / "formats" / "kdtr-v1.md").read_text()
    found = re.findall(r"^\| (\d+) \| `(E_[A-Z0-9_]+)`", text, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [code for _, code in found]


def test_every_rule_has_a_bad_file() -> None:
    """A rule that nobody ever saw fail is a rule that may not be checked."""
    rules = specified_rules()
    assert len(rules) == 39
    assert {rule for rule, _ in BAD.values()} | FILE_RULES == set(rules)


@pytest.mark.parametrize("name", GOOD)
def test_good_file(name: str, tmp_path: Path) -> None:
    """A reader that is stricter than the specification, or that disagrees with the other on what it read."""
    data = GOOD[name]
    path = tmp_path / "good.kdtr"
    path.write_bytes(data)
    assert kdtr.check_bytes(data) == _native.kdtr.check_bytes(data) == "ok"
    assert kdtr.check(path) == _native.kdtr.check(str(path)) == "ok"

    arrays = kdtr.read(path)
    native = _native.kdtr.load(str(path))
    assert list(arrays) == [entry[0] for entry in native]
    infos = kdtr.KdtrFile.open(path).infos()
    for info, (_, dtype, shape, content) in zip(infos, native, strict=True):
        array = arrays[info.name]
        assert (info.dtype, info.shape) == (dtype, shape)
        assert array.dtype == kdtr.numpy_dtype(dtype) and array.shape == shape
        assert array.tobytes() == content
        assert data[info.offset : info.offset + info.nbytes] == content


@pytest.mark.parametrize("name", BAD)
def test_bad_file(name: str, tmp_path: Path) -> None:
    """A check that is missing, made too late or under another code, in either language."""
    rule, data = BAD[name]
    path = tmp_path / "bad.kdtr"
    path.write_bytes(data)
    assert kdtr.check_bytes(data) == rule
    assert _native.kdtr.check_bytes(data) == rule
    assert kdtr.check(path) == rule
    assert _native.kdtr.check(str(path)) == rule

    with pytest.raises(kdtr.KdtrError) as python:
        kdtr.read(path)
    with pytest.raises(_native.Error) as native:
        _native.kdtr.load(str(path))
    assert python.value.rule == rule
    assert python.value.code == native.value.code == "bad_file"
    assert str(python.value) == str(native.value)
    assert str(python.value).startswith(f"{path}: [{rule}] ")
    assert str(python.value).isprintable()


def test_checksums_of_tensors_are_left_out_on_demand() -> None:
    """A lazy reader must not touch the data; an eager one must not forget it."""
    rule, data = BAD["E_TENSOR_CRC-data"]
    assert kdtr.check_bytes(data, checksums=False) == "ok"
    assert _native.kdtr.check_bytes(data, checksums=False) == "ok"
    assert kdtr.check_bytes(data) == rule


def _both(path: Path | str) -> tuple[str, str]:
    return kdtr.check(path), _native.kdtr.check(str(path))


@pytest.mark.timeout(30)
def test_files_that_are_none(tmp_path: Path) -> None:
    """A pipe without a writer must not hang, a device must not be read, a folder is not damaged."""
    assert _both(tmp_path / "missing.kdtr") == ("E_OPEN", "E_OPEN")
    assert _both("") == ("E_OPEN", "E_OPEN")
    assert kdtr.check("a\0b") == "E_OPEN"
    assert _both(tmp_path) == ("E_NOT_REGULAR", "E_NOT_REGULAR")
    assert _both("/dev/zero") == ("E_NOT_REGULAR", "E_NOT_REGULAR")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert _both(pipe) == ("E_NOT_REGULAR", "E_NOT_REGULAR")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert _both(tmp_path / "socket") == ("E_OPEN", "E_OPEN")
    for raises, read in ((kdtr.KdtrError, kdtr.read), (_native.Error, _native.kdtr.load)):
        with pytest.raises(raises) as error:
            read(str(tmp_path / "missing.kdtr"))
        assert error.value.code == "io"
        assert "No such file" in str(error.value)


def test_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    """Out of address space: a typed error, not a crash on a null map."""
    path = tmp_path / "huge.kdtr"
    with path.open("wb") as file:
        file.write(GOOD["three"])
        file.truncate(64 << 30)  # sparse
    script = (
        "import resource, sys\n"
        "from kdtree_engine import _native, kdtr\n"
        "resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))\n"
        "print(kdtr.check(sys.argv[1]), _native.kdtr.check(sys.argv[1]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["E_MAP", "E_MAP"]


def test_index_larger_than_the_cap(tmp_path: Path) -> None:
    """The cap itself: an index of more than 64 MiB that does lie inside the file is not read."""
    path = tmp_path / "index.kdtr"
    size = (1 << 26) + 4096
    header = corpus.build(
        [],
        wrong={
            "file_bytes": size,
            "index_bytes": (1 << 26) + 1,
            "data_offset": (1 << 26) + 128,
            "tensor_count": 1 << 19,
        },
    )
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)  # sparse
    assert _both(path) == ("E_INDEX_BYTES", "E_INDEX_BYTES")


def test_values_are_not_judged() -> None:
    """NaN and infinity are data."""
    tensor = corpus.Tensor(b"x", corpus.F32, (3,))
    tensor.data = lambda: np.array([np.nan, np.inf, -np.inf], "<f4").tobytes()
    data = corpus.build([tensor])
    assert kdtr.check_bytes(data) == _native.kdtr.check_bytes(data) == "ok"
    assert np.isnan(kdtr.KdtrFile(data)["x"][0])
