"""Good and bad KDTR files, made byte by byte from docs/formats/kdtr-v1.md.

Imports nothing of the package: a third implementation of the layout, so that a mistake that reader and writer
share still shows. ``python make_corpus.py DIR`` writes all files into DIR (seeds for the fuzzers).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

F64, F32, F16, BF16, I64, I32, U8 = range(1, 8)
SIZE = {F64: 8, F32: 4, F16: 2, BF16: 2, I64: 8, I32: 4, U8: 1}
HEADER = "<4s4sHHIQQQQIHBBII"
HEADER_FIELDS = [
    "magic", "guard", "major", "minor", "header_bytes", "file_bytes", "index_offset", "index_bytes",
    "data_offset", "tensor_count", "alignment", "compatible", "incompatible", "index_crc", "header_crc",
]  # fmt: skip


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@dataclass
class Tensor:
    """A tensor, and the record fields that shall say something else than the truth."""

    name: bytes
    dtype: int = F32
    shape: tuple[int, ...] = ()
    wrong: dict[str, Any] = field(default_factory=dict)

    def data(self) -> bytes:
        n = SIZE.get(self.dtype, 1)
        for dim in self.shape:
            n *= dim
        return bytes((7 * i + len(self.name)) % 251 for i in range(n)) if n < 1 << 20 else b""


def build(
    tensors: list[Tensor],
    *,
    wrong: dict[str, Any] | None = None,
    extra_names: bytes = b"",
    index_pad: int = 0,
    tail: bytes = b"",
    cut: int = 0,
    pad: int = 0,
) -> bytes:
    """A file with these tensors in this order. `wrong` replaces header fields; checksums still match, unless
    replaced themselves. `tail` is appended and `cut` bytes are removed before file_bytes is counted."""
    names = b"".join(t.name for t in tensors) + extra_names
    index_bytes = 96 * len(tensors) + len(names)
    position = data_offset = -(-(64 + index_bytes) // 64) * 64
    records = b""
    body = bytes([index_pad]) * (data_offset - 64 - index_bytes)
    name_offset = 0
    for t in tensors:
        data = t.data()
        dims = [*t.shape, *[0] * (8 - len(t.shape))]
        f: dict[str, Any] = {
            "name_offset": name_offset, "name_bytes": len(t.name), "dtype": t.dtype, "rank": len(t.shape),
            "dims": dims, "offset": position, "bytes": len(data), "crc": crc32c(data), "reserved": 0,
        }  # fmt: skip
        f.update(t.wrong)
        records += struct.pack("<IHBB", f["name_offset"], f["name_bytes"], f["dtype"], f["rank"])
        records += struct.pack("<8QQQII", *f["dims"], f["offset"], f["bytes"], f["crc"], f["reserved"])
        name_offset += len(t.name)
        body += data + bytes([pad]) * (-len(data) % 64)
        position += len(data) + -len(data) % 64
    index = records + names
    rest = index + body + tail
    rest = rest[: len(rest) - cut]
    h: dict[str, Any] = {
        "magic": b"KDTR", "guard": b"\r\n\x1a\n", "major": 1, "minor": 0, "header_bytes": 64,
        "file_bytes": 64 + len(rest), "index_offset": 64, "index_bytes": index_bytes,
        "data_offset": data_offset, "tensor_count": len(tensors), "alignment": 64, "compatible": 0,
        "incompatible": 0, "index_crc": crc32c(index), "header_crc": 0,
    }  # fmt: skip
    h.update(wrong or {})
    header = struct.pack(HEADER, *(h[name] for name in HEADER_FIELDS))[:60]
    crc = h["header_crc"] if wrong and "header_crc" in wrong else crc32c(header)
    return header + struct.pack("<I", crc) + rest


def _three() -> list[Tensor]:
    return [Tensor(b"a", F32, (2, 3)), Tensor(b"b.weight", I32, (5,)), Tensor(b"c", U8, (70,))]


def _with(number: int, **wrong: Any) -> bytes:
    """Three tensors, with wrong record fields in one of them."""
    tensors = _three()
    tensors[number].wrong = wrong
    return build(tensors)


def good() -> Iterator[tuple[str, bytes]]:
    yield "empty", build([])
    yield "three", build(_three())
    yield "scalars", build([Tensor(f"config.{n}".encode(), n) for n in range(1, 8)])
    yield "matrices", build([Tensor(f"m{n}".encode(), n, (3, 5)) for n in range(1, 8)])
    yield "rank8", build([Tensor(b"t", U8, (1, 2, 1, 3, 1, 2, 1, 2))])
    yield "zero_dims", build([Tensor(b"a", F32, (0,)), Tensor(b"b", F64, (3, 0, 2)), Tensor(b"c", U8, (1,))])
    yield "zero_dim_last", build([Tensor(b"a", U8, (64,)), Tensor(b"b", F64, (0, 0))])
    yield "zero_dim_beside_large", build([Tensor(b"a", U8, (1 << 40, 1 << 20, 0))])
    yield "data_of_whole_lines", build([Tensor(b"a", U8, (64,)), Tensor(b"b", F32, (32,))])
    yield "index_of_whole_lines", build([Tensor(b"n" * 32, U8, (3,))])
    yield "name_of_one_byte", build([Tensor(b"\x20", U8)])
    yield "name_of_255_bytes", build([Tensor(b"n" * 255, U8)])
    yield (
        "names_of_utf8",
        build([Tensor(t.encode(), U8) for t in ("a.b-c d", "\xa0", "é", "漢字", "\U0010ffff")]),
    )
    yield (
        "names_that_start_alike",
        build([Tensor(n, U8) for n in (b"a", b"a\x20", b"a.", b"a.b", b"ab", b"b")]),
    )
    yield "minor_7", build(_three(), wrong={"minor": 7})
    yield "unknown_compatible_flags", build(_three(), wrong={"compatible": 0xA5})
    yield "many", build([Tensor(f"t{n:03d}".encode(), 1 + n % 7, (n % 5, 3)) for n in range(100)])


def bad() -> Iterator[tuple[str, str, bytes]]:
    """(rule, what is wrong, file)."""
    three = build(_three())

    def header(rule: str, case: str, **wrong: Any) -> tuple[str, str, bytes]:
        return rule, case, build(_three(), wrong=wrong)

    yield "E_HEADER_SHORT", "no_bytes", b""
    yield "E_HEADER_SHORT", "63_bytes", three[:63]
    yield "E_MAGIC", "other", b"GGUF" + three[4:]
    yield "E_MAGIC", "zeros", bytes(4096)
    yield "E_GUARD", "crlf_to_lf", three.replace(b"\r\n", b"\n", 1)
    yield "E_GUARD", "lf_to_crlf", three[:4] + b"\r\r\n\x1a\r\n" + three[8:]
    yield header("E_VERSION", "major_0", major=0)
    yield header("E_VERSION", "major_2", major=2)
    yield header("E_HEADER_CRC", "zero", header_crc=0)
    yield "E_HEADER_CRC", "one_bit", three[:40] + bytes([three[40] ^ 1]) + three[41:]
    yield header("E_HEADER_BYTES", "128", header_bytes=128)
    yield header("E_HEADER_BYTES", "0", header_bytes=0)
    yield header("E_FLAGS", "one_bit", incompatible=0x10)
    yield header("E_ALIGNMENT", "0", alignment=0)
    yield header("E_ALIGNMENT", "32", alignment=32)
    yield "E_FILE_BYTES", "cut_by_one", three[:-1]
    yield "E_FILE_BYTES", "cut_by_64", three[:-64]
    yield "E_FILE_BYTES", "one_more", three + b"\0"
    yield header("E_FILE_BYTES", "all_ones", file_bytes=(1 << 64) - 1)
    yield header("E_COUNT", "one_too_many", tensor_count=(1 << 20) + 1)
    yield header("E_COUNT", "all_ones", tensor_count=(1 << 32) - 1)
    yield header("E_INDEX_OFFSET", "0", index_offset=0)
    yield header("E_INDEX_OFFSET", "all_ones", index_offset=(1 << 64) - 1)
    yield header("E_INDEX_BYTES", "past_the_end", index_bytes=len(three) - 63)
    yield header("E_INDEX_BYTES", "all_ones", index_bytes=(1 << 64) - 1)
    yield header("E_INDEX_BYTES", "wraps", index_bytes=(1 << 64) - 64)
    yield header("E_INDEX_COUNT", "one_more", tensor_count=4)
    yield header("E_INDEX_COUNT", "2_20", tensor_count=1 << 20)
    yield header("E_DATA_OFFSET", "64_early", data_offset=320)
    yield header("E_DATA_OFFSET", "64_late", data_offset=448)
    yield header("E_DATA_OFFSET", "not_rounded", data_offset=362)
    yield header("E_DATA_OFFSET", "all_ones", data_offset=(1 << 64) - 1)
    yield "E_DATA_OFFSET", "past_the_end", build([Tensor(b"a", U8, (0,))], cut=31)
    yield header("E_INDEX_CRC", "zero", index_crc=0)
    yield "E_INDEX_CRC", "one_bit", three[:64] + bytes([three[64] ^ 1]) + three[65:]

    yield "E_NAME_LENGTH", "0", build([Tensor(b"", U8)])
    yield "E_NAME_LENGTH", "256", build([Tensor(b"n" * 256, U8)])
    yield "E_NAME_LENGTH", "all_ones", _with(1, name_bytes=0xFFFF)
    yield "E_NAME_RANGE", "overlap", _with(1, name_offset=0)
    yield "E_NAME_RANGE", "gap", _with(1, name_offset=2)
    yield "E_NAME_RANGE", "all_ones", _with(0, name_offset=(1 << 32) - 1)
    yield "E_NAME_RANGE", "past_the_end", _with(2, name_bytes=2)
    for case, name in {
        "lone_continuation": b"a\x80", "cut_short": b"a\xe6\xbc", "overlong_2": b"\xc0\xaf",
        "overlong_3": b"\xe0\x80\xaf", "overlong_4": b"\xf0\x80\x80\xaf", "surrogate": b"\xed\xa0\x80",
        "past_10ffff": b"\xf4\x90\x80\x80", "f5": b"\xf5\x80\x80\x80", "ff": b"\xff",
        "not_a_continuation": b"\xc3a", "and_a_slash": b"/\xff",
    }.items():  # fmt: skip
        yield "E_NAME_UTF8", case, build([Tensor(name, U8)])
    for case, name in {
        "nul": b"a\0b", "newline": b"a\nb", "unit_separator": b"\x1f", "delete": b"\x7f",
        "c1_first": b"\xc2\x80", "c1_last": b"\xc2\x9f", "slash": b"a/b", "backslash": b"a\\b",
        "dots": b"a..b", "dots_alone": b"..",
    }.items():  # fmt: skip
        yield "E_NAME_CHARACTER", case, build([Tensor(name, U8)])
    yield "E_NAME_DUPLICATE", "twice", build([Tensor(b"a", U8), Tensor(b"a", U8)])
    yield "E_NAME_ORDER", "descending", build([Tensor(b"b", U8), Tensor(b"a", U8)])
    yield "E_NAME_ORDER", "prefix_last", build([Tensor(b"ab", U8), Tensor(b"a", U8)])
    yield "E_NAME_ORDER", "signed_bytes", build([Tensor("é".encode(), U8), Tensor(b"z", U8)])
    yield "E_NAME_ORDER", "apart", build([Tensor(b"a", U8), Tensor(b"b", U8), Tensor(b"a", U8)])

    for dtype in (0, 8, 255):
        yield "E_DTYPE", str(dtype), _with(1, dtype=dtype)
    for rank in (9, 255):
        yield "E_RANK", str(rank), _with(1, rank=rank)
    big = 1 << 40
    yield (
        "E_DIM",
        "one_too_many",
        _with(2, dims=[big + 1] + [0] * 7, bytes=big + 1),
    )
    yield "E_DIM", "all_ones", _with(2, dims=[(1 << 64) - 1] + [0] * 7)
    yield "E_DIM", "beside_zero", build([Tensor(b"a", U8, (0, big + 1))])
    yield "E_DIM_UNUSED", "last", _with(1, dims=[5, 0, 0, 0, 0, 0, 0, 1])
    yield "E_DIM_UNUSED", "of_a_scalar", _with(1, rank=0, bytes=4)
    yield "E_OVERFLOW", "2_63", _with(1, dtype=U8, rank=2, dims=[big, 1 << 23] + [0] * 6, bytes=1 << 63)
    yield "E_OVERFLOW", "wraps_to_zero", _with(1, dtype=U8, rank=2, dims=[big, 1 << 24] + [0] * 6, bytes=0)
    yield "E_OVERFLOW", "by_element", _with(1, dtype=F64, rank=2, dims=[big, 1 << 20] + [0] * 6, bytes=0)
    yield "E_OVERFLOW", "2_320", _with(1, rank=8, dims=[big] * 8, bytes=0)
    yield "E_OVERFLOW", "beside_zero", build([Tensor(b"a", U8, (0, big, 1 << 23))])
    yield "E_BYTES", "one_more", _with(2, bytes=71)
    yield "E_BYTES", "elements", _with(1, bytes=5)
    yield "E_BYTES", "of_a_zero_dim", _with(1, dims=[0] * 8)
    yield "E_BYTES", "all_ones", _with(2, bytes=(1 << 64) - 1)

    start = 384  # of the data of three tensors
    yield "E_OFFSET_ALIGN", "by_one", _with(1, offset=start + 65)
    yield "E_OFFSET_ALIGN", "by_32", _with(1, offset=start + 32)
    yield "E_OVERLAP", "with_the_first", _with(1, offset=start)
    yield "E_OVERLAP", "with_the_header", _with(0, offset=0)
    yield "E_OVERLAP", "with_the_index", _with(0, offset=start - 64)
    yield "E_GAP", "of_64", _with(1, offset=start + 128)
    yield "E_GAP", "all_ones", _with(1, offset=(1 << 64) - 64)
    yield "E_BOUNDS", "by_one_line", _with(2, dims=[129] + [0] * 7, bytes=129)
    yield "E_BOUNDS", "by_one_byte", build([Tensor(b"a", U8, (70,))], cut=59)
    yield "E_BOUNDS", "2_40", _with(2, dims=[big] + [0] * 7, bytes=big)
    yield "E_BOUNDS", "start_past_the_end", build([Tensor(b"a", U8, (70,)), Tensor(b"b", U8, (0,))], cut=30)
    yield "E_RESERVED", "one", _with(1, reserved=1)

    yield "E_NAME_TABLE", "one_byte_more", build(_three(), extra_names=b"x")
    yield "E_NAME_TABLE", "no_tensor", build([], extra_names=b"hidden")
    yield "E_TRAILING", "64_bytes_more", build(_three(), tail=bytes(64))
    yield "E_TRAILING", "no_padding", build([Tensor(b"a", U8, (70,))], cut=58)
    yield "E_TRAILING", "no_tensor", build([], tail=b"x" * 64)
    yield "E_PADDING", "after_the_index", build(_three(), index_pad=1)
    yield "E_PADDING", "after_a_tensor", build(_three(), pad=0x80)
    yield "E_PADDING", "last_byte", three[:-1] + b"\1"
    yield "E_TENSOR_CRC", "stored", _with(1, crc=0)
    yield "E_TENSOR_CRC", "data", three[:start] + bytes([three[start] ^ 0x40]) + three[start + 1 :]
    yield "E_TENSOR_CRC", "no_bytes", build([Tensor(b"a", U8, (0,), {"crc": 1})])


def main(folder: str) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name, data in good():
        (path / f"good_{name}.kdtr").write_bytes(data)
    for rule, case, data in bad():
        (path / f"{rule}_{case}.kdtr").write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
