"""The rules of KDTR v1, numbered as in docs/formats/kdtr-v1.md: what a reader checks, in that order."""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from ._crc32c import crc32c
from .errors import EngineError, ErrorCode

MAGIC = b"KDTR"
GUARD = b"\r\n\x1a\n"
MAJOR, MINOR = 1, 0
ALIGNMENT = 64
MAX_TENSORS = 1 << 20
MAX_INDEX_BYTES = 1 << 26
MAX_DIM = 1 << 40
MAX_TENSOR_BYTES = (1 << 63) - 1
MAX_NAME_BYTES = 255
MAX_RANK = 8

HEADER = struct.Struct("<4s4sHHIQQQQIHBBII")
HEADER_CRC_AT = 60
RECORD = struct.Struct("<IHBB8QQQII")
assert HEADER.size == 64 and RECORD.size == 96

# dtype number -> (name, bytes of an element)
DTYPES = {
    1: ("f64", 8),
    2: ("f32", 4),
    3: ("f16", 2),
    4: ("bf16", 2),
    5: ("i64", 8),
    6: ("i32", 4),
    7: ("u8", 1),
}
DTYPE_NUMBERS = {name: number for number, (name, _) in DTYPES.items()}

_CONTROL = frozenset(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))


class KdtrError(EngineError):
    """A file that breaks a rule of the format, tensors that cannot be written, or a refusal of the system.

    ``rule`` is the code of the rule (``"E_OVERLAP"``), ``code`` the engine's: ``bad_file``, ``io`` or
    ``invalid_argument``. ``str(error)`` is ``FILE: [RULE] sentence``.
    """

    rule: str

    def __init__(self, label: str, rule: str, sentence: str, code: ErrorCode = "bad_file") -> None:
        super().__init__(f"{label}: [{rule}] {sentence}")
        self.rule = rule
        self.code = code


class TensorInfo(NamedTuple):
    """One entry of a file's index: ``dtype`` is one of f64 f32 f16 bf16 i64 i32 u8, ``offset`` and ``nbytes``
    place the data in the file, ``crc`` is its CRC-32C."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc: int


def align_up(value: int) -> int:
    return (value + ALIGNMENT - 1) & -ALIGNMENT


def name_rule(name: bytes) -> str | None:
    """Rules 19, 21 and 22: the rule that a name breaks."""
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        return "E_NAME_LENGTH"
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        return "E_NAME_UTF8"
    if "/" in text or "\\" in text or ".." in text or not _CONTROL.isdisjoint(text):
        return "E_NAME_CHARACTER"
    return None


def tensor_bytes(dims: tuple[int, ...], element: int) -> tuple[str | None, int]:
    """Rules 27, 29 and 30: the rule that fails, or the bytes of a tensor with these dims."""
    product = element
    empty = False
    for dim in dims:
        if not 0 <= dim <= MAX_DIM:
            return "E_DIM", 0
        if dim:
            product *= dim
        else:
            empty = True
    if product > MAX_TENSOR_BYTES:  # at most 8 factors of 2^40: a small number for Python
        return "E_OVERFLOW", 0
    return None, 0 if empty else product


def parse(file: memoryview, label: str) -> list[TensorInfo]:
    """Apply rules 4 to 38 to the bytes of a file (a flat memoryview) and return its index.

    Raises KdtrError naming the first rule that fails. Allocates a copy of the index and what is returned.
    """

    def refuse(rule: str, sentence: str) -> NoReturn:
        raise KdtrError(label, rule, sentence)

    # ---- header: rules 4 to 18
    size = len(file)
    if size < HEADER.size:
        refuse("E_HEADER_SHORT", f"{size} bytes, a header has {HEADER.size}")
    header = bytes(file[: HEADER.size])
    (
        magic, guard, major, minor, header_bytes, file_bytes, index_offset, index_bytes, data_offset,
        count, alignment, _compatible, incompatible, index_crc, header_crc,
    ) = HEADER.unpack(header)  # fmt: skip
    if magic != MAGIC:
        refuse("E_MAGIC", "not a KDTR file: the first four bytes are not 'KDTR'")
    if guard != GUARD:
        refuse("E_GUARD", "guard bytes are damaged, as by a transfer in text mode")
    if major != MAJOR:
        refuse("E_VERSION", f"version {major}.{minor}, this reader knows version {MAJOR}")
    crc = crc32c(header[:HEADER_CRC_AT])
    if header_crc != crc:
        refuse("E_HEADER_CRC", f"header checksum is {crc:08x}, stored is {header_crc:08x}")
    if header_bytes != HEADER.size:
        refuse("E_HEADER_BYTES", f"header_bytes is {header_bytes}, must be {HEADER.size}")
    if incompatible != 0:
        refuse("E_FLAGS", f"needs features 0x{incompatible:02x}, this reader knows none")
    if alignment != ALIGNMENT:
        refuse("E_ALIGNMENT", f"alignment is {alignment}, must be {ALIGNMENT}")
    if file_bytes != size:
        refuse("E_FILE_BYTES", f"file has {size} bytes, its header says {file_bytes}")
    if count > MAX_TENSORS:
        refuse("E_COUNT", f"tensor_count is {count}, at most {MAX_TENSORS}")
    if index_offset != HEADER.size:
        refuse("E_INDEX_OFFSET", f"index_offset is {index_offset}, must be {HEADER.size}")
    index_end = HEADER.size + index_bytes
    if index_bytes > MAX_INDEX_BYTES or index_end > size:
        refuse(
            "E_INDEX_BYTES",
            f"index_bytes is {index_bytes}, at most {MAX_INDEX_BYTES} and inside the file of {size} bytes",
        )
    records_bytes = count * RECORD.size
    if records_bytes > index_bytes:
        refuse(
            "E_INDEX_COUNT",
            f"{count} records of {RECORD.size} bytes do not fit an index of {index_bytes} bytes",
        )
    data = align_up(index_end)
    if data_offset != data or data > size:
        refuse(
            "E_DATA_OFFSET",
            f"data_offset is {data_offset}, must be {data} and inside the file of {size} bytes",
        )
    index = bytes(file[HEADER.size : index_end])
    crc = crc32c(index)
    if index_crc != crc:
        refuse("E_INDEX_CRC", f"index checksum is {crc:08x}, stored is {index_crc:08x}")

    # ---- records: rules 19 to 35
    tensors: list[TensorInfo] = []
    name_end = records_bytes  # of the names so far, in the index
    end = data  # of the data so far, in the file
    previous = b""
    for number in range(count):
        record = RECORD.unpack_from(index, number * RECORD.size)
        name_offset, name_bytes, dtype, rank = record[:4]
        dims = record[4:12]
        offset, nbytes, crc, reserved = record[12:]
        if not 1 <= name_bytes <= MAX_NAME_BYTES:
            refuse(
                "E_NAME_LENGTH",
                f"tensor {number}: name of {name_bytes} bytes, must be 1 to {MAX_NAME_BYTES}",
            )
        if name_offset != name_end - records_bytes or name_bytes > index_bytes - name_end:
            refuse(
                "E_NAME_RANGE",
                f"tensor {number}: name at {name_offset} of {name_bytes} bytes, must be at "
                f"{name_end - records_bytes} and inside {index_bytes - records_bytes} bytes of names",
            )
        raw_name = index[name_end : name_end + name_bytes]
        if rule := name_rule(raw_name):
            what = "is not UTF-8" if rule == "E_NAME_UTF8" else r"holds a control character, '/', '\' or '..'"
            refuse(rule, f"tensor {number}: name of {name_bytes} bytes {what}")
        name = raw_name.decode("utf-8")
        if number > 0:
            if raw_name == previous:
                refuse("E_NAME_DUPLICATE", f"tensor '{name}' occurs twice")
            if raw_name < previous:
                refuse("E_NAME_ORDER", f"tensor '{name}' follows '{previous.decode()}': not sorted")

        if dtype not in DTYPES:
            refuse("E_DTYPE", f"tensor '{name}': dtype {dtype}, must be 1 to 7")
        dtype_name, element = DTYPES[dtype]
        if rank > MAX_RANK:
            refuse("E_RANK", f"tensor '{name}': rank {rank}, at most {MAX_RANK}")
        shape = dims[:rank]
        shape_rule, expected = tensor_bytes(shape, element)
        if shape_rule == "E_DIM":
            axis = next(i for i, dim in enumerate(shape) if dim > MAX_DIM)
            refuse("E_DIM", f"tensor '{name}': dimension {axis} is {dims[axis]}, at most {MAX_DIM}")
        if any(dims[rank:]):
            axis = next(i for i in range(rank, MAX_RANK) if dims[i])
            refuse(
                "E_DIM_UNUSED",
                f"tensor '{name}': dimension {axis} is {dims[axis]} at rank {rank}, must be 0",
            )
        if shape_rule is not None:
            refuse(
                shape_rule,
                f"tensor '{name}': its {rank} dimensions and {element} bytes an element multiply to "
                "2^63 or more",
            )
        if nbytes != expected:
            refuse("E_BYTES", f"tensor '{name}': {nbytes} bytes, its shape needs {expected}")

        if offset % ALIGNMENT:
            refuse("E_OFFSET_ALIGN", f"tensor '{name}': offset {offset} is no multiple of {ALIGNMENT}")
        if offset < end:
            refuse(
                "E_OVERLAP",
                f"tensor '{name}': offset {offset} is before {end}, the end of what comes before it",
            )
        start = align_up(end)
        if offset != start:
            refuse("E_GAP", f"tensor '{name}': offset {offset} is past {start}, where it must start")
        if offset + nbytes > size:
            refuse(
                "E_BOUNDS",
                f"tensor '{name}': {nbytes} bytes at {offset} end past the file's {size} bytes",
            )
        if reserved != 0:
            refuse("E_RESERVED", f"tensor '{name}': reserved field is {reserved}, must be 0")
        tensors.append(TensorInfo(name, dtype_name, shape, offset, nbytes, crc))
        name_end += name_bytes
        end = offset + nbytes
        previous = raw_name

    # ---- the whole: rules 36 to 38
    if name_end != index_bytes:
        refuse(
            "E_NAME_TABLE",
            f"names end after {name_end - records_bytes} of {index_bytes - records_bytes} bytes",
        )
    if align_up(end) != size:
        refuse("E_TRAILING", f"data ends at {align_up(end)}, the file at {size}")
    for last in [index_end, *(t.offset + t.nbytes for t in tensors)]:
        padding = bytes(file[last : align_up(last)])
        if padding.strip(b"\0"):
            at = last + len(padding) - len(padding.lstrip(b"\0"))
            refuse("E_PADDING", f"padding byte at {at} is not 0")
    return tensors
