"""Damaged files by the hundred thousand: no crash, no hang, no memory for a lie, one verdict."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections import Counter

from test_kdtr_corpus import BAD, FILE_RULES, GOOD, corpus, specified_rules

from kdtree_engine import _native, kdtr

MUTATIONS = 200_000
crc32c = _native.kdtr.crc32c

# Values at which comparisons, sums and products tip over.
EDGES = [0, 1, 2, 7, 8, 9, 63, 64, 65, 95, 96, 97, 127, 128, 191, 192, 254, 255, 256, 257]
EDGES += [(1 << n) + d for n in (16, 20, 26, 32, 40, 62, 63) for d in (-64, -1, 0, 1, 64)]
EDGES += [(1 << 64) - d for d in (1, 2, 63, 64, 65, 128)]

HEADER_AT = [(8, 2), (10, 2), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4), (52, 2), (54, 1), (55, 1)]
RECORD_AT = [(0, 4), (4, 2), (6, 1), (7, 1), *[(8 * i, 8) for i in range(1, 11)], (88, 4), (92, 4)]


def fix_checksums(data: bytearray) -> None:
    """Make the checksums of header and index true, so that the rules behind them are reached."""
    if len(data) < 64:
        return
    index_bytes = int.from_bytes(data[32:40], "little")
    if index_bytes <= len(data) - 64:
        data[56:60] = struct.pack("<I", crc32c(bytes(data[64 : 64 + index_bytes])))
    data[60:64] = struct.pack("<I", crc32c(bytes(data[:60])))


def mutate(seed: bytes, rng: random.Random) -> bytes:
    """One to three changes: a field set to an edge or moved a little, a byte, a cut, an insertion, a swap."""
    data = bytearray(seed)
    records = max(0, len(data) - 64) // 96
    count = min(int.from_bytes(data[48:52], "little"), records, 8)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.55 and len(data) >= 64:
            if count == 0 or rng.random() < 0.35:
                at, width = rng.choice(HEADER_AT)
            else:
                at, width = rng.choice(RECORD_AT)
                at += 64 + 96 * rng.randrange(count)
            if at + width > len(data):
                continue
            old = int.from_bytes(data[at : at + width], "little")
            value = rng.choice(EDGES) if rng.random() < 0.5 else old + rng.choice((-64, -8, -1, 1, 8, 64))
            data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind < 0.80 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind < 0.87:
            del data[rng.randrange(len(data) + 1) :]
        elif kind < 0.92:
            at = rng.randrange(len(data) + 1)
            data[at:at] = bytes(rng.choice((1, 32, 64, 96)))
        elif kind < 0.96 and count > 1:
            a, b = (64 + 96 * n for n in rng.sample(range(count), 2))
            data[a : a + 96], data[b : b + 96] = data[b : b + 96], data[a : a + 96]
        else:
            data += bytes(rng.choice((1, 63, 64)))
        if len(data) >= 24 and rng.random() < 0.5:
            data[16:24] = struct.pack("<Q", len(data))  # file_bytes
    return bytes(data)


def both(data: bytes) -> str:
    """The verdict, which must be one."""
    python, native = kdtr.check_bytes(data), _native.kdtr.check_bytes(data)
    assert python == native, (python, native, data.hex())
    return native


def test_every_truncation() -> None:
    """A file cut anywhere must be refused, also by a cut that makes sizes and checksums true again."""
    data = GOOD["matrices"]
    for length in range(len(data)):
        cut = bytearray(data[:length])
        assert both(bytes(cut)) == ("E_HEADER_SHORT" if length < 64 else "E_FILE_BYTES")
        if length >= 64:
            cut[16:24] = struct.pack("<Q", length)
            fix_checksums(cut)
            assert both(bytes(cut)) not in ("ok", "E_FILE_BYTES")


def test_every_bit() -> None:
    """The format has no free byte: any single flipped bit of a file is found."""
    data = bytearray(GOOD["three"])
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert both(bytes(data)) != "ok", (at, bit)
            data[at] ^= 1 << bit


def test_every_byte_of_the_index_with_true_checksums() -> None:
    """The checksums of header and index must not be what protects a reader: with true ones, every byte of a
    record but those of the stored checksum is held by another rule."""
    data = GOOD["matrices"]
    for at in range(64, 64 + 7 * 96):
        if (at - 64) % 96 in range(88, 92):
            continue
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= change
            fix_checksums(damaged)
            assert both(bytes(damaged)) != "ok", (at, change)


def test_mutated_files() -> None:
    """Half as they are, half with true checksums so that every rule is reached; none may be slow."""
    rng = random.Random(20_250_725)
    good = [data for data in GOOD.values() if len(data) <= 2048]
    bad = [data for _, data in BAD.values() if len(data) <= 2048]
    reached: Counter[str] = Counter()
    slowest = 0.0
    for number in range(MUTATIONS):
        data = mutate(rng.choice(good if rng.random() < 0.8 else bad), rng)
        if number % 2:
            array = bytearray(data)
            fix_checksums(array)
            data = bytes(array)
        start = time.thread_time()
        reached[both(data)] += 1
        slowest = max(slowest, time.thread_time() - start)
    assert slowest < 1.0
    print(f"{MUTATIONS} files, slowest {slowest * 1e3:.1f} ms: {dict(reached.most_common())}")
    rare = [rule for rule in (set(specified_rules()) - FILE_RULES) | {"ok"} if reached[rule] < 20]
    assert not rare, f"too few mutated files reached {rare}"


def lies() -> list[bytes]:
    """Small files whose numbers ask for much."""
    result = [data for _, data in BAD.values()]
    for field, value in (
        ("tensor_count", 1 << 20),
        ("tensor_count", (1 << 32) - 1),
        ("index_bytes", 1 << 26),
        ("index_bytes", 1 << 40),
        ("file_bytes", 1 << 40),
        ("data_offset", 1 << 40),
    ):
        result.append(corpus.build([corpus.Tensor(b"a")], wrong={field: value}))
    for dims in ([1 << 40], [1 << 40, 1 << 10], [1 << 30, 1 << 30, 0]):
        shape = dims + [0] * (8 - len(dims))
        wrong = {"rank": len(dims), "dims": shape, "bytes": (1 << 42) % (1 << 64)}
        result.append(corpus.build([corpus.Tensor(b"a", corpus.F32, (), wrong)]))
    return result


def test_python_allocates_no_more_than_the_file_warrants() -> None:
    """A reader that believes a count, a size or a shape before it has compared it with the file."""
    both(GOOD["many"])  # caches are filled outside the measurement
    for data in lies():
        tracemalloc.start()
        try:
            verdict = kdtr.check_bytes(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert verdict != "ok"
        assert peak < 16_384 + 4 * len(data), (verdict, peak, len(data))


ADDRESS_SPACE = """
import resource, sys
from test_kdtr_faults import lies
from kdtree_engine import _native, kdtr
files = lies()
for check in (_native.kdtr.check_bytes, kdtr.check_bytes):
    check(files[0])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), used + (2 << 20)))
for data in files:
    for check in (_native.kdtr.check_bytes, kdtr.check_bytes):
        assert check(data) != "ok"
try:
    bytearray(4 << 20)
except MemoryError:
    print("bounded")
"""


def test_neither_reader_needs_address_space() -> None:
    """The same for C++, seen from outside: 2 MiB of address space do for files that ask for terabytes."""
    path = [str(p) for p in sys.path]
    script = f"import sys; sys.path[:] = {path!r}\n" + ADDRESS_SPACE
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "bounded"), result.stderr
