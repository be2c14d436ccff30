"""CRC-32C twice: numpy lanes and C++ tables must agree, or no file written by one opens in the other."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_engine import _native
from kdtree_engine._crc32c import crc32c

# RFC 3720, appendix B.4, and the check value of the algorithm's catalogue entry.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS, ids=range(len(VECTORS)))
def test_published_vectors(data: bytes, expected: int) -> None:
    """A wrong polynomial, start value or bit order: both sides could agree on it."""
    assert crc32c(data) == expected
    assert _native.kdtr.crc32c(data) == expected


def test_every_length_and_the_borders_of_lanes_and_blocks() -> None:
    """An off-by-one where the fast path pads to lanes, joins lanes or passes from one block to the next."""
    data = np.random.default_rng(1).integers(0, 256, (1 << 23) + 2200, dtype=np.uint8).tobytes()
    block = 1 << 22
    lengths = [*range(80), *range(2040, 2060), 4095, 4096, 4097, 70001]
    lengths += [n * block + d for n in (1, 2) for d in (-1, 0, 1, 2, 3, 4, 5, 2047, 2048)]
    for length in lengths:
        piece = data[:length]
        assert crc32c(piece) == _native.kdtr.crc32c(piece), length
