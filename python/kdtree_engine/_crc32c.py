"""CRC-32C (Castagnoli) with numpy alone.

The register after a byte is ``T[(register ^ byte) & 255] ^ (register >> 8)``. That map is linear over GF(2),
which gives the fast path its three steps: leading zero bytes do nothing to a register of zero, so the data is
padded in front to whole lanes; all lanes run side by side, each from zero; and neighbouring lanes are joined
pairwise by the (linear) map that a lane's length of zero bytes applies to a register. A start value other
than zero is xor-ed into the first four bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_LOOP_BYTES = 2048  # below this a plain loop is faster
_BLOCK_BYTES = 1 << 22  # bounds the memory of the fast path
_MAX_LANE = 1024


def _byte_table() -> NDArray[np.uint32]:
    table: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return table


_T8 = _byte_table()
_T8_LIST: list[int] = _T8.tolist()
# _T16[x]: the register after two zero bytes, from x < 2^16.
_X = np.arange(1 << 16, dtype=np.uint32)
_X = _T8[_X & 255] ^ (_X >> 8)
_T16 = _T8[_X & 255] ^ (_X >> 8)
del _X


class _Shift:
    """The linear map "append 2^k zero bytes" on registers, as one table per byte of the register."""

    def __init__(self, columns: NDArray[np.uint32]) -> None:
        self.columns = columns  # [32]: the images of the 32 single bits
        self.tables = np.zeros((4, 256), np.uint32)
        for byte in range(4):
            for bit in range(8):
                half = 1 << bit
                self.tables[byte, half : 2 * half] = self.tables[byte, :half] ^ columns[8 * byte + bit]

    def apply(self, x: NDArray[np.uint32]) -> NDArray[np.uint32]:
        t = self.tables
        y: NDArray[np.uint32] = t[0][x & 255] ^ t[1][(x >> 8) & 255]
        y ^= t[2][(x >> 16) & 255] ^ t[3][x >> 24]
        return y


_SHIFTS: list[_Shift] = []  # [k]: 2^k zero bytes


def _shift(k: int) -> _Shift:
    if not _SHIFTS:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        _SHIFTS.append(_Shift(_T8[bits & 255] ^ (bits >> 8)))
    while len(_SHIFTS) <= k:
        last = _SHIFTS[-1]
        _SHIFTS.append(_Shift(last.apply(last.columns)))
    return _SHIFTS[k]


def _block(register: int, data: NDArray[np.uint8]) -> int:
    """The register after `data` (at least 4 bytes), starting from `register`."""
    log_lane = min(_MAX_LANE.bit_length() - 1, (len(data).bit_length() + 1) // 2)
    lane = 1 << log_lane
    lanes = -(-len(data) // lane)
    padded = np.zeros(lanes * lane, np.uint8)
    start = len(padded) - len(data)
    padded[start:] = data
    padded[start : start + 4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)

    words = np.ascontiguousarray(padded.view("<u2").reshape(lanes, lane // 2).T)
    state = np.zeros(lanes, np.uint32)
    for word in words:
        state = _T16[(state ^ word) & 0xFFFF] ^ (state >> 16)
    k = log_lane
    while len(state) > 1:
        if len(state) % 2:
            state = np.concatenate([np.zeros(1, np.uint32), state])
        state = _shift(k).apply(state[0::2]) ^ state[1::2]
        k += 1
    return int(state[0])


def crc32c(data: ReadableBuffer) -> int:
    """CRC-32C of a contiguous bytes-like object: reflected polynomial 0x82F63B78, start and final xor
    0xFFFFFFFF (RFC 3720, appendix B.4)."""
    view = memoryview(data)
    if view.nbytes == 0:  # which memoryview.cast refuses
        return 0
    view = view.cast("B")
    register = 0xFFFFFFFF
    while len(view) >= _LOOP_BYTES:
        register = _block(register, np.frombuffer(view[:_BLOCK_BYTES], np.uint8))
        view = view[_BLOCK_BYTES:]
    for byte in view:
        register = _T8_LIST[(register ^ byte) & 255] ^ (register >> 8)
    return register ^ 0xFFFFFFFF


def combine(first: int, second: int, nbytes: int) -> int:
    """CRC-32C of two pieces of data one after the other, from the CRC of each; `nbytes` is the second's size."""
    register = np.array([first], np.uint32)
    for k in range(nbytes.bit_length()):
        if nbytes >> k & 1:
            register = _shift(k).apply(register)
    return int(register[0]) ^ second
