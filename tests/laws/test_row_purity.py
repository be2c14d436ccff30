"""Law 1: row i of an output is a function of row i's inputs, weights and constants, bit for bit.

Each op gets a pool of rows of every magnitude, some with NaN or infinities in them. What a row gives alone, on one
thread, is compared with what it gives in batches of every size, at random places, among random others.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_inputs import ISAS, ROW_COUNTS, same_bits_or_nan
from row_ops import POOL, ROW_OPS, Arrays, Outputs, RowOp


def take(op: RowOp, rows: np.ndarray) -> Arrays:
    return {name: np.ascontiguousarray(values[rows]) for name, values in op.rows.items()}


def alone(op: RowOp, **how: object) -> list[Outputs]:
    """Outputs of every row of the pool, each run by itself."""
    return [op.run(take(op, np.array([i])), **how) for i in range(POOL)]


def assert_rows(outputs: Outputs, rows: np.ndarray, expected: list[Outputs], where: str) -> None:
    for output, number in zip(outputs, range(len(outputs)), strict=True):
        for j, i in enumerate(rows):
            want, got = expected[i][number][0], output[j]
            same = same_bits_or_nan(got, want) if got.dtype == np.float32 else np.array_equal(got, want)
            assert same, f"{where}: row {i} at place {j} of {len(rows)}, output {number}"


def pad(rows: Arrays, live: int) -> Arrays:
    """The rows past `live` as nobody must read them: NaN, and integers far out of every range."""
    padded = {name: values.copy() for name, values in rows.items()}
    for values in padded.values():
        values[live:] = np.nan if values.dtype == np.float32 else 10**9
    return padded


@pytest.fixture(scope="module", params=list(ROW_OPS))
def op(request: pytest.FixtureRequest) -> RowOp:
    return ROW_OPS[request.param]()


def test_rows_do_not_know_their_neighbours(op: RowOp) -> None:
    """Catches a sum whose order depends on row count or place, a tile or chunk that lets a NaN or an infinity of one
    row into another, a vote of several rows on a maximum or a skip, and work that threads split along a sum."""
    rng = np.random.default_rng(0)
    expected = alone(op, threads=1)
    for count in ROW_COUNTS:
        for threads in (1, 2):
            rows = rng.permutation(POOL)[:count]
            assert_rows(op.run(take(op, rows), threads=threads), rows, expected, f"{count} rows, {threads} threads")


def test_rows_past_live_are_not_there(op: RowOp, request: pytest.FixtureRequest) -> None:
    """Catches padding rows that are read (they are NaN and out of every range), that choose experts or that write."""
    rng = np.random.default_rng(1)
    expected = alone(op, threads=1)
    name = request.node.callspec.params["op"]
    for count in ROW_COUNTS:
        live = int(rng.integers(0, count))
        rows = rng.permutation(POOL)[:count]
        inputs = pad(take(op, rows), live)
        outputs = op.run(inputs, live=live, threads=1 + count % 2)
        assert_rows(tuple(o[:live] for o in outputs), rows[:live], expected, f"{live} of {count} rows")
        in_place = name.startswith("experts") or name == "linear_accumulate"
        for output in outputs:
            untouched = inputs["y"][live:] if in_place else np.full_like(output[live:].view(np.int32), -1)
            assert output[live:].tobytes() == untouched.tobytes(), f"{live} of {count} rows"


@pytest.mark.skipif(len(ISAS) < 2, reason="this machine has one instruction set")
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_give_the_same_bits(op: RowOp, isa: str) -> None:
    """Catches an instruction set whose kernel sums, rounds, compares or breaks ties in another way, for 1 row and for
    sizes that fill and do not fill its tiles."""
    rng = np.random.default_rng(2)
    for count in (1, 2, 3, 4, 7, 65):
        rows = take(op, rng.permutation(POOL)[:count])
        reference = op.run(rows, isa=ISAS[0])
        for output, want in zip(op.run(rows, isa=isa, threads=2), reference, strict=True):
            same = same_bits_or_nan(output, want) if output.dtype == np.float32 else np.array_equal(output, want)
            assert same, f"{isa} differs from {ISAS[0]} at {count} rows"
