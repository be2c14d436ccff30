"""What the backend refuses, and that it says what and where; memory; the choice of instruction set."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from kernel_inputs import ISAS, Batch, matrix, normal, same_bits, world

from harness.reference import quant
from kdtree_engine._native import Error, ops


def refused(call: Callable[[], object], code: str, *words: str) -> None:
    """`call` raises Error with the code, in one sentence that holds the words."""
    with pytest.raises(Error) as error:
        call()
    message = str(error.value)
    assert error.value.code == code, message
    assert "\n" not in message and not message.endswith("."), message
    for word in words:
        assert word in message, (word, message)


# ------------------------------------------------------------------------------------------------------------
# arrays


def test_arrays_are_never_converted() -> None:
    """Catches a silent copy or cast: another dtype, order or rank is a TypeError that names what was expected."""
    w = ops.Matrix.f32(np.ones((4, 8), dtype=np.float32))
    x = np.ones((2, 8), dtype=np.float32)
    for bad in (
        x.astype(np.float64),
        x.astype(np.int32),
        np.asfortranarray(np.ones((3, 8), np.float32)),
        x[0],
        x[:, ::2],
    ):
        with pytest.raises(TypeError, match="float32"):
            ops.linear(bad, w)
    read_only = np.zeros((2, 4), dtype=np.float32)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        ops.linear(x, w, out=read_only)
    refused(lambda: ops.linear(np.ones((2, 7), np.float32), w), "invalid_argument", "7", "8")


# ------------------------------------------------------------------------------------------------------------
# weights


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers(bad: float) -> None:
    """Catches a NaN that passes the load and comes out as a wrong token: refused with the row, wherever it is."""
    for at in ((0, 0), (6, 99), (3, 47)):
        w = np.ones((7, 100), dtype=np.float32)
        w[at] = bad
        refused(lambda: ops.Matrix.f32(w), "not_finite", f"row {at[0]} of 7")  # noqa: B023
        bits = np.full((7, 100), 0x3F80, dtype=np.uint16)
        bits[at] = {np.inf: 0x7F80, -np.inf: 0xFF80}.get(bad, 0x7FC1)
        refused(lambda: ops.Matrix.bf16(bits), "not_finite", f"row {at[0]} of 7")  # noqa: B023
    scales = np.ones((7, 5), dtype=np.float32)
    scales[5, 4] = bad
    words = np.zeros((7, 20), dtype=np.int32)
    refused(lambda: ops.Matrix.w4a16(words, scales), "not_finite", "row 5 of 7", "scale")


def test_scale_whose_weights_overflow() -> None:
    """Catches a finite scale whose weights are infinite: 8 * scale is beyond float32."""
    words = np.zeros((1, 4), dtype=np.int32)
    refused(lambda: ops.Matrix.w4a16(words, np.full((1, 1), 1e38, np.float32)), "not_finite", "scale")
    ops.Matrix.w4a16(words, np.full((1, 1), 4e37, np.float32))


def test_shapes_of_int4() -> None:
    """Catches a ragged last group, and scales of another matrix."""
    refused(lambda: ops.Matrix.w4a16(np.zeros((2, 5), np.int32), np.zeros((2, 2), np.float32)), "bad_model", "40", "32")
    refused(lambda: ops.Matrix.w4a16(np.zeros((2, 8), np.int32), np.zeros((3, 2), np.float32)), "invalid_argument", "3")
    refused(lambda: ops.Matrix.f32(np.zeros((0, 4), np.float32)), "bad_model", "[0, 4]")


def test_experts_of_different_shapes() -> None:
    """Catches experts that would be read past their end."""

    def make(out: int, width: int) -> ops.Matrix:
        return ops.Matrix.f32(np.ones((out, width), np.float32))

    refused(lambda: ops.Experts([make(4, 8)], [make(4, 8)], [make(8, 5)]), "bad_model", "[8, 5]", "[4, 8]")
    refused(lambda: ops.Experts([make(4, 8)] * 2, [make(4, 8)], [make(8, 4)]), "bad_model", "2 gate")
    refused(lambda: ops.Experts([], [], []), "bad_model")


# ------------------------------------------------------------------------------------------------------------
# indices: on this device a wrong one is an address


def test_indices_out_of_range() -> None:
    """Catches every index of an op that is used as an address unchecked."""
    rng = np.random.default_rng(0)
    table = ops.Matrix.f32(np.ones((5, 8), np.float32))
    for token in (-1, 5):
        refused(lambda: ops.embed(np.array([0, token], np.int32), table), "invalid_argument", str(token))  # noqa: B023
    refused(lambda: ops.gather_rows(np.ones((3, 2), np.float32), np.array([-1], np.int32), 2), "invalid_argument", "-1")
    m = matrix(rng, "f32", 4, 4).packed
    experts = ops.Experts([m] * 3, [m] * 3, [m] * 3)
    x, one = normal(rng, 1, 4), np.ones((1, 1), np.float32)
    for expert in (-1, 3):
        ids = np.array([[expert]], np.int32)
        refused(lambda: ops.experts(x, experts, ids, one, None, x.copy()), "invalid_argument", f"expert {expert} of 3")  # noqa: B023
    refused(lambda: ops.linear(x, m, live=2), "invalid_argument", "2 live rows")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefix": [129]}, ("129", "128")),
        ({"prefix": [-1]}, ("-1",)),
        ({"prefix": [0], "ancestor_count": [0]}, ("0 committed",)),
        ({"ancestor_count": [66]}, ("66",)),
        ({"ancestor_count": [-1]}, ("-1",)),
        ({"ancestors": [[65] * 65]}, ("65",)),
        ({"ancestors": [[-1] * 65]}, ("-1",)),
        ({"sequence": [1]}, ("sequence 1 of 1",)),
        ({"prefix": [100]}, ("page 1",)),  # the table has no page there
        ({"ancestor_count": [0], "position": [70]}, ("page 1",)),
    ],
)
def test_rows_that_point_outside(change: dict[str, list], words: tuple[str, ...]) -> None:
    """Catches keys read from pages or scratch rows that do not exist."""
    rng = np.random.default_rng(1)
    w = world(rng, [40], 8, 4)
    w.page_table = np.array([[int(w.page_table[0, 0]), -1]], dtype=np.int32)
    batch = Batch()
    batch.add(0, 40, [3])
    arrays = batch.arrays() | {name: np.array(value, dtype=np.int32) for name, value in change.items()}
    q = normal(rng, 1, 2, 12)
    refused(lambda: ops.attend(q, w.pages, w.scratch, w.page_table, 4, 1.0, **arrays), "invalid_argument", *words)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1.0},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": np.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": np.nan},
    ],
)
def test_sampling_parameters(params: dict[str, float]) -> None:
    """Catches parameters that select nothing, or everything, in silence."""
    x, position = np.zeros((1, 9), np.float32), np.zeros(1, np.int32)
    refused(lambda: ops.select(x, position, **({"temperature": 1.0} | params)), "invalid_argument", next(iter(params)))


def test_router_settings() -> None:
    """Catches group counts that do not divide the experts, and more experts than there are."""
    gate, x = ops.Matrix.f32(np.ones((6, 4), np.float32)), np.ones((1, 4), np.float32)
    bias = np.zeros(6, np.float32)
    for settings in ({"groups": 4}, {"groups": 3, "top_groups": 4}, {"groups": 3, "top_groups": 1, "top_k": 3}):
        full = {"top_k": 2} | settings
        refused(lambda: ops.route(x, gate, bias, "sigmoid_noaux_tc", **full), "invalid_argument")  # noqa: B023
    refused(lambda: ops.route(x, gate, None, "sigmoid_noaux_tc", 2), "invalid_argument", "bias")
    refused(lambda: ops.route(x, gate, bias, "tanh", 2), "invalid_argument", "tanh")
    refused(lambda: ops.top_k(np.zeros((1, 5), np.float32), 6), "invalid_argument", "6", "5")


# ------------------------------------------------------------------------------------------------------------
# memory


def test_memory_that_is_not_there() -> None:
    """Catches an allocation that the system grants and then kills the process for: the numbers, and the process goes
    on."""
    for size in (2**63, 2**50, 2**42):
        refused(lambda: ops.probe_allocation(size), "out_of_memory", "MiB")  # noqa: B023
    assert ops.probe_allocation(1000)[0] == 0


@pytest.mark.parametrize("size", [1, 64, 1000, 3 << 20, 40 << 20])
def test_fresh_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that is not aligned, or that tests believe poisoned and is not."""
    monkeypatch.setenv("KDTREE_POISON", "1")
    offset, first = ops.probe_allocation(size)
    assert offset == 0 and first == b"\xff" * min(size, 64)


# ------------------------------------------------------------------------------------------------------------
# instruction sets, threads


def test_choice_of_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a misspelt or unavailable set that is replaced by another in silence: the check that compares them would
    compare a path with itself."""
    for isa in ISAS:
        assert isa in ops.description(1, isa)
        monkeypatch.setenv("KDTREE_CPU_ISA", isa)
        assert isa in ops.description(1, "") and isa in ops.description(1, "auto")
        assert ISAS[0] in ops.description(1, ISAS[0])  # the argument wins
    monkeypatch.setenv("KDTREE_CPU_ISA", "auto")
    assert ISAS[-1] in ops.description(1)
    monkeypatch.setenv("KDTREE_CPU_ISA", "sse9")
    refused(lambda: ops.description(1), "invalid_argument", "KDTREE_CPU_ISA", "sse9", "portable, avx2 or avx512")
    monkeypatch.delenv("KDTREE_CPU_ISA")
    refused(lambda: ops.description(1, "AVX2"), "invalid_argument", "isa", "AVX2")
    for isa in {"avx2", "avx512"} - set(ISAS):
        refused(lambda: ops.description(1, isa), "unsupported", isa)  # noqa: B023


def test_number_of_threads() -> None:
    """Catches thread counts that are taken as something else."""
    for threads in (-1, 100000):
        refused(lambda: ops.description(threads), "invalid_argument", str(threads))  # noqa: B023
    assert "1 thread" in ops.description(1) and "3 threads" in ops.description(3)
    assert f"{len(os.sched_getaffinity(0))} thread" in ops.description(0)


@pytest.mark.skipif(sys.platform != "linux", reason="fesetround of the C library")
@pytest.mark.parametrize(("mode", "threads"), [(0x400, 5), (0x800, 6), (0xC00, 7)])  # downward, upward, toward zero
def test_callers_rounding_mode_does_not_matter_and_stays(mode: int, threads: int) -> None:
    """Catches results that depend on what another library did to the floating-point mode of the calling thread, which
    new threads inherit (no other test uses these thread counts), and a mode that is not put back."""
    libm = ctypes.CDLL("libm.so.6")
    rng = np.random.default_rng(2)
    w = matrix(rng, "f32", 1200, 400).packed
    x = normal(rng, 3, 400)
    plain = ops.linear(x, w, threads=2)
    libm.fesetround(mode)
    try:
        fresh, used = ops.linear(x, w, threads=threads), ops.linear(x, w, threads=2)
        kept = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert same_bits(fresh, plain) and same_bits(used, plain) and kept == mode


def test_callers_on_several_threads() -> None:
    """Catches scratch that two callers share: eight threads use one backend at once."""
    rng = np.random.default_rng(3)
    w = matrix(rng, "w4_f32", 400, 320).packed
    inputs = [normal(rng, 5, 320) for _ in range(8)]
    logits = normal(rng, 4, 5000)
    position = np.arange(4, dtype=np.int32)
    expected = [ops.linear(x, w, threads=2) for x in inputs]
    tokens = ops.select(logits, position, temperature=1.0, top_p=0.9, threads=2)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            if not same_bits(ops.linear(inputs[i], w, threads=2), expected[i]):
                wrong.append(i)
            if not same_bits(ops.select(logits, position, temperature=1.0, top_p=0.9, threads=2), tokens):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


FORK = """
import os
import numpy as np
from kdtree_engine._native import ops
w = ops.Matrix.f32(np.ones((600, 700), np.float32))
x = np.ones((4, 700), np.float32)
before = ops.linear(x, w, threads=2)
child = os.fork()
if child == 0:
    same = ops.linear(x, w, threads=2).tobytes() == before.tobytes()
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_child_of_a_fork_computes_too() -> None:
    """Catches a child process that waits for ever for worker threads that fork did not copy."""
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "0"


def test_int4_helpers_agree() -> None:
    """The oracle's own dequantisation against the tests' construction: both must mean (nibble - 8) * scale."""
    m = matrix(np.random.default_rng(4), "w4_f32", 3, 64)
    codes = np.arange(128).reshape(2, 64) % 16 - 8
    words = quant.pack(codes)
    assert np.array_equal(quant.dequantize(words, np.ones((2, 2), np.float32)), codes)
    assert m.values.shape == (3, 64)
