"""What the Python reader hands out: read-only views of the map, types that stay known."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kdtree_engine import kdtr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "x.kdtr"
    tensors = {
        "bf16": np.asarray([[1.0, -2.5], [0.0, 3e38]], np.float32).astype(ml_dtypes.bfloat16),
        "f16": np.asarray([1.5, -65504], np.float16),
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros((0, 3), np.float64),
    }
    kdtr.write(target, tensors)
    return target


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    kdtr._bf16_dtype.cache_clear()
    yield
    kdtr._bf16_dtype.cache_clear()


def test_arrays_are_read_only_views(path: Path) -> None:
    """A writable array would be a private page that differs from the file; a copy doubles the memory."""
    arrays = kdtr.read(path)
    gc.collect()  # the map must live as long as its arrays
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        assert array.size == 0 or (array.flags.aligned and not array.flags.owndata), name
    assert arrays["f32"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["f32"].ctypes.data % 64 == 0


def test_file_is_a_lazy_mapping(path: Path) -> None:
    """Opening must not read the data: damage there shows when checksums are asked for, not before."""
    data = bytearray(path.read_bytes())
    info = kdtr.KdtrFile.open(path).info("f16")
    data[info.offset] ^= 1
    path.write_bytes(data)
    file = kdtr.KdtrFile.open(path)
    assert len(file) == 4 and "f32" in file and "f3" not in file and 3 not in file
    assert list(file) == file.names() == ["bf16", "f16", "f32", "none"]
    assert info == (info.name, "f16", (2,), info.offset, 4, info.crc)
    with pytest.raises(KeyError):
        file["missing"]
    assert file["f32"][1, 2] == 5
    with pytest.raises(kdtr.KdtrError, match=r"x\.kdtr: \[E_TENSOR_CRC\] tensor 'f16': checksum of"):
        file.verify_checksums()
    with pytest.raises(kdtr.KdtrError, match="E_TENSOR_CRC"):
        kdtr.read(path)
    assert kdtr.read(path, checksums=False)["f32"][1, 2] == 5


def test_bf16_with_ml_dtypes(path: Path) -> None:
    """bf16 that arrives as uint16 is taken for integers by the next hand."""
    array = kdtr.read(path)["bf16"]
    assert array.dtype == ml_dtypes.bfloat16 and kdtr.is_bf16(array.dtype)
    assert kdtr.bf16_bits(array).tolist() == [[0x3F80, 0xC020], [0, 0x7F62]]
    assert np.array_equal(kdtr.to_float32(array), array.astype(np.float32))


@pytest.mark.usefixtures("without_ml_dtypes")
def test_bf16_without_ml_dtypes(path: Path) -> None:
    """Without the package the type must stay known, refuse arithmetic, and be written as bf16 again."""
    array = kdtr.read(path)["bf16"]
    assert array.dtype == kdtr.BF16_BITS and kdtr.is_bf16(array.dtype)
    assert array[:1].copy().T.dtype == kdtr.BF16_BITS
    with pytest.raises(TypeError):
        np.add(array, array)
    assert kdtr.bf16_bits(array).tolist() == [[0x3F80, 0xC020], [0, 0x7F62]]
    widened = kdtr.to_float32(array)
    assert widened.dtype == np.float32 and widened[0].tolist() == [1.0, -2.5]
    again = path.with_name("again.kdtr")
    kdtr.write(again, kdtr.read(path))
    assert again.read_bytes() == path.read_bytes()


def test_widening() -> None:
    """to_float32 is exact, for NaN and subnormals too, and takes nothing that it would have to guess."""
    bits = np.asarray([0x0001, 0x8000, 0x7F80, 0x7FC1, 0xFF80], np.uint16)
    expected = bits.astype(np.uint32) << 16
    for array in (bits.view(ml_dtypes.bfloat16), bits.view(kdtr.BF16_BITS)):
        assert np.array_equal(kdtr.to_float32(array).view(np.uint32), expected)
    half = np.asarray([6e-8, 1.5, np.inf], np.float16)
    assert np.array_equal(kdtr.to_float32(half), half.astype(np.float32))
    for array in (bits, np.zeros(2), np.zeros(2, np.int32)):
        with pytest.raises(TypeError, match="expected bf16"):
            kdtr.to_float32(array)
    with pytest.raises(TypeError, match="expected a bf16 array, got dtype uint16"):
        kdtr.bf16_bits(bits)


def test_memory_that_is_no_flat_buffer() -> None:
    """Any contiguous buffer is read as bytes, whatever its element type."""
    data = np.zeros(16, np.int32)
    assert kdtr.check_bytes(data) == "E_MAGIC"
    assert kdtr.check_bytes(memoryview(b"")) == "E_HEADER_SHORT"
    assert kdtr.check_bytes(np.zeros((0, 3))) == "E_HEADER_SHORT"
