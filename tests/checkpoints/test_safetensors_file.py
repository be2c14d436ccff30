"""The .safetensors reader: every rule has a bad file, and on all of them the verdict is that of the
library."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import raw_safetensors, safetensors_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine import EngineError
from kdtree_engine.safetensors_file import SafetensorsFile

safetensors = pytest.importorskip("safetensors")

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.uint16),
    "empty": np.zeros((0, 5), np.float32),
    "scalar": np.array(3.5, np.float64),
}


def entry(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [begin, end],
    }


def verdict(path: Path) -> str | None:
    """What our reader says, None where it is content."""
    try:
        SafetensorsFile(path).close()
    except EngineError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        assert error.code == "bad_file", error
        return str(error)
    return None


def library_accepts(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(ARRAYS))
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        e = file.tensors[name]
        assert e.shape == array.shape and e.nbytes == array.nbytes
        raw = bytearray(e.nbytes)
        file.read_into(memoryview(raw), e.offset)
        assert bytes(raw) == array.tobytes()
    file.close()


BAD = {
    "zero-length": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": struct.pack("<Q", 100) + b"{}",
    "header length 2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header over the cap": struct.pack("<Q", 100_000_001) + b"{}",
    "not JSON": raw_safetensors(b"{]", b""),
    "not an object": raw_safetensors(b"[]", b""),
    "not UTF-8": raw_safetensors(b'{"\xff": 1}', b""),
    "same name twice": raw_safetensors(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"\0" * 8
    ),
    "entry not an object": raw_safetensors({"a": 3}, b""),
    "entry without shape": raw_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"\0" * 4),
    "unknown dtype": raw_safetensors({"a": entry(0, 4, dtype="F33")}, b"\0" * 4),
    "dtype not text": raw_safetensors({"a": entry(0, 4, dtype=["F32"])}, b"\0" * 4),
    "negative size": raw_safetensors({"a": entry(0, 4, (-1,))}, b"\0" * 4),
    "two negative sizes": raw_safetensors({"a": entry(0, 4, (-1, -1))}, b"\0" * 4),
    "fractional size": raw_safetensors({"a": entry(0, 4, (1.0,))}, b"\0" * 4),
    "boolean size": raw_safetensors({"a": entry(0, 4, (True,))}, b"\0" * 4),
    "shape not a list": raw_safetensors({"a": entry(0, 4, "1")}, b"\0" * 4),
    "product wraps 64 bits to 4 bytes": raw_safetensors({"a": entry(0, 4, (2**62 + 1,))}, b"\0" * 4),
    "offsets swapped": raw_safetensors({"a": entry(4, 0)}, b"\0" * 4),
    "three offsets": raw_safetensors({"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}}, b"\0" * 8),
    "offsets disagree with the shape": raw_safetensors({"a": entry(0, 8)}, b"\0" * 8),
    "hole": raw_safetensors({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12),
    "overlap": raw_safetensors({"a": entry(0, 8, (2,)), "b": entry(4, 12, (2,))}, b"\0" * 12),
    "overlap and hole of one size": raw_safetensors(
        {"a": entry(0, 8, (2,)), "b": entry(4, 12, (2,)), "c": entry(16, 20)}, b"\0" * 20
    ),
    "hole in front": raw_safetensors({"a": entry(4, 8)}, b"\0" * 8),
    "bytes behind": raw_safetensors({"a": entry(0, 4)}, b"\0" * 5),
    "one byte short": raw_safetensors({"a": entry(0, 4)}, b"\0" * 3),
    "offset past the end": raw_safetensors({"a": entry(2**62, 2**62 + 4)}, b"\0" * 4),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_here_and_by_the_library(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD[what])
    assert verdict(path) is not None
    # The one rule on which we are stricter: JSON leaves the meaning of a repeated key open.
    assert what == "same name twice" or not library_accepts(BAD[what])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A file that is cut short anywhere must not pass: what is missing would be read as zeros or garbage."""
    data = safetensors_bytes(ARRAYS)
    path = tmp_path / "x.safetensors"
    for n in range(len(data)):
        path.write_bytes(data[:n])
        assert verdict(path) is not None, n


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_get_the_library_s_verdict(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Accepting what the library refuses is an unchecked field. (The library may accept what we refuse.)"""
    good = bytearray(safetensors_bytes(ARRAYS))
    header = 8 + struct.unpack("<Q", good[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, header - 1))] = data.draw(
            st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789,:[]{}"'))
        )
    path = tmp_path_factory.mktemp("m") / "x.safetensors"
    path.write_bytes(good)
    assert verdict(path) is not None or library_accepts(bytes(good))


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to hangs forever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EngineError, match="regular file"):
        SafetensorsFile(tmp_path / "pipe")
    with pytest.raises(EngineError, match="regular file"):
        SafetensorsFile(tmp_path)
    with pytest.raises(EngineError) as caught:
        SafetensorsFile(tmp_path / "absent")
    assert caught.value.code == "io"


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    """A server that tries a bad model again and again must not run out of descriptors."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD["hole"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert verdict(path) is not None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Mapped, it would end the process with SIGBUS."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": np.zeros(10_000, np.float32)}))
    file = SafetensorsFile(path)
    os.truncate(path, 5000)
    raw = bytearray(40_000)
    with pytest.raises(EngineError, match="ended at byte 5000") as caught:
        file.read_into(memoryview(raw), file.tensors["a"].offset)
    assert caught.value.code == "io"
    file.close()


def test_a_header_of_many_tensors_is_read_in_linear_time(tmp_path: Path) -> None:
    """A K2 checkpoint has 200,000 tensors: anything quadratic in them hangs."""
    header = {f"t{i}": entry(4 * i, 4 * i + 4) for i in range(100_000)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_safetensors(json.dumps(header).encode(), b"\0" * 400_000))
    file = SafetensorsFile(path)
    assert len(file.tensors) == 100_000
    file.close()
