"""The writers: the same bytes in both languages, and a file that appears whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kdtr_corpus import GOOD, ROOT, corpus

from kdtree_engine import _native, kdtr

NUMBERS = {"f64": 1, "f32": 2, "f16": 3, "bf16": 4, "i64": 5, "i32": 6, "u8": 7}


def dtype_number(array: np.ndarray) -> int:
    return NUMBERS["bf16" if kdtr.is_bf16(array.dtype) else f"{array.dtype.kind}{8 * array.dtype.itemsize}"]


def native_write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The C++ writer, given the tensors in the order of the mapping."""
    entries = [(name, dtype_number(a), list(a.shape), a.tobytes()) for name, a in tensors.items()]
    _native.kdtr.write(str(path), entries)


WRITERS = {"python": kdtr.write, "native": native_write}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
Write = Callable[[Path, dict[str, np.ndarray]], None]

letters = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\")
names = st.text(letters, min_size=1, max_size=20)
shapes = st.lists(st.integers(0, 5), max_size=8).map(tuple)
dtypes = st.sampled_from(["<f8", "<f4", "<f2", ml_dtypes.bfloat16, "<i8", "<i4", "u1"])


@settings(max_examples=150, deadline=None)
@given(
    specs=st.dictionaries(names.filter(lambda n: ".." not in n), st.tuples(dtypes, shapes), max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_writers_write_the_bytes_of_the_specification(
    tmp_path_factory: pytest.TempPathFactory, specs: dict[str, Any], seed: int
) -> None:
    """Writers that drift apart, or together away from the specification (make_corpus.py shares no code)."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (dtype, shape) in specs.items():
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        tensors[name] = random.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)
    folder = tmp_path_factory.mktemp("bytes")
    kdtr.write(folder / "python.kdtr", tensors)
    native_write(folder / "native.kdtr", tensors)

    expected = []
    for name in sorted(tensors, key=str.encode):
        array = tensors[name]
        entry = corpus.Tensor(name.encode(), dtype_number(array), array.shape)
        entry.data = array.tobytes
        expected.append(entry)
    assert (folder / "python.kdtr").read_bytes() == corpus.build(expected)
    assert (folder / "native.kdtr").read_bytes() == corpus.build(expected)

    back = kdtr.read(folder / "python.kdtr")
    assert list(back) == sorted(tensors, key=str.encode)
    for name, array in back.items():
        assert array.dtype == tensors[name].dtype and array.shape == tensors[name].shape
        assert array.tobytes() == tensors[name].tobytes()


@writers
def test_order_of_the_tensors_does_not_matter(write: Write, tmp_path: Path) -> None:
    """Bytes that depend on the order of a dictionary would make bundles differ from run to run."""
    tensors = {n: np.arange(i, dtype=np.int32) for i, n in enumerate(["b", "a", "é", "a.b", "Z"])}
    write(tmp_path / "1", tensors)
    write(tmp_path / "2", dict(reversed(tensors.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@writers
def test_the_frozen_file(write: Write, tmp_path: Path) -> None:
    """A change of the format that changes writers, readers and corpus alike: files that exist must stay
    readable, and the same tensors must keep the same bytes."""
    frozen = ROOT / "tests" / "data" / "kdtr" / "frozen_v1.kdtr"
    tensors = {
        "config.layers": np.asarray(6, np.int64),
        "config.eps": np.asarray(1e-6, np.float64),
        "weight": (np.arange(12, dtype=np.float32) / 8 - 0.5).reshape(3, 4),
        "weight.bf16": np.arange(-3, 4).astype(ml_dtypes.bfloat16),
        "weight.f16": np.arange(5, dtype=np.float16),
        "weight.qw": np.asarray([[0x76543210, -1]], np.int32),
        "bytes": np.frombuffer("größe".encode(), np.uint8),
        "none": np.zeros((2, 0), np.float32),
    }
    write(tmp_path / "now.kdtr", tensors)
    assert (tmp_path / "now.kdtr").read_bytes() == frozen.read_bytes()
    for name, array in kdtr.read(frozen).items():
        assert array.tobytes() == tensors[name].tobytes()


def test_arrays_in_any_layout(tmp_path: Path) -> None:
    """Transposed, strided, big-endian and zero-dimensional arrays: memory unlike the file."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors: dict[str, Any] = {
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "big_endian": base.astype(">f4"),
        "fortran": np.asfortranarray(base),
        "scalar": np.float32(2.5),
        "int": 7,
        "float": 0.1,
        "list": [[1, 2], [3, 4]],
        "bf16_strided": base.astype(ml_dtypes.bfloat16)[:, ::2],
        "bf16_scalar": ml_dtypes.bfloat16(1.5),
        "bf16_bits": base.astype(ml_dtypes.bfloat16).view(np.uint16).view(kdtr.BF16_BITS).T,
    }
    kdtr.write(tmp_path / "x.kdtr", tensors)
    back = kdtr.read(tmp_path / "x.kdtr")
    for name in ("transposed", "strided", "big_endian", "fortran", "scalar", "int", "float", "list"):
        expected = np.asarray(tensors[name])
        assert back[name].shape == expected.shape, name
        assert np.array_equal(back[name], expected), name
    assert back["int"].dtype == np.int64 and back["float"].dtype == np.float64
    assert np.array_equal(back["bf16_strided"], base[:, ::2].astype(ml_dtypes.bfloat16))
    assert back["bf16_scalar"].shape == () and back["bf16_scalar"] == 1.5
    assert np.array_equal(back["bf16_bits"], base.T.astype(ml_dtypes.bfloat16))


REFUSED: list[tuple[str, str, Any]] = [
    ("E_NAME_LENGTH", "", 1),
    ("E_NAME_LENGTH", "n" * 256, 1),
    ("E_NAME_LENGTH", "é" * 128, 1),
    ("E_NAME_CHARACTER", "a\nb", 1),
    ("E_NAME_CHARACTER", "a/b", 1),
    ("E_NAME_CHARACTER", "..", 1),
    ("E_NAME_UTF8", "\ud800", 1),
    ("E_DTYPE", "bool", True),
    ("E_DTYPE", "u32", np.zeros(3, np.uint32)),
    ("E_DTYPE", "complex", np.zeros(3, np.complex64)),
    ("E_DTYPE", "text", "text"),
    ("E_DTYPE", "object", np.asarray([None], object)),
    ("E_DTYPE", "large", 1 << 70),
    ("E_DTYPE", "other16", np.zeros(3, [("x", "<u2")])),
    ("E_RANK", "rank9", np.zeros((1,) * 9, np.float32)),
    ("E_DIM", "dim", np.zeros((0, (1 << 40) + 1), np.uint8)),
]


@pytest.mark.parametrize(("rule", "name", "value"), REFUSED)
def test_python_writer_refuses(rule: str, name: str, value: Any, tmp_path: Path) -> None:
    """A tensor that no reader would take back, or that would silently become another type."""
    path = tmp_path / "x.kdtr"
    with pytest.raises(kdtr.KdtrError) as error:
        kdtr.write(path, {"fine": 1.0, name: value})
    assert (error.value.rule, error.value.code) == (rule, "invalid_argument")
    assert str(error.value).startswith(f"{path}: [{rule}] ")
    assert list(tmp_path.iterdir()) == []


NATIVE_REFUSED: list[tuple[str, list[Any]]] = [
    ("E_NAME_LENGTH", [("", 2, [], bytes(4))]),
    ("E_NAME_LENGTH", [("n" * 256, 2, [], bytes(4))]),
    ("E_NAME_CHARACTER", [("a\\b", 2, [], bytes(4))]),
    ("E_NAME_DUPLICATE", [("a", 2, [], bytes(4)), ("b", 2, [], bytes(4)), ("a", 7, [1], bytes(1))]),
    ("E_DTYPE", [("a", 0, [], bytes(4))]),
    ("E_DTYPE", [("a", 8, [], bytes(4))]),
    ("E_RANK", [("a", 2, [1] * 9, bytes(4))]),
    ("E_DIM", [("a", 2, [-1], bytes(4))]),
    ("E_DIM", [("a", 7, [0, (1 << 40) + 1], b"")]),
    ("E_OVERFLOW", [("a", 1, [0, 1 << 40, 1 << 20], b"")]),
    ("E_BYTES", [("a", 2, [2], bytes(4))]),
]


@pytest.mark.parametrize(("rule", "entries"), NATIVE_REFUSED)
def test_native_writer_refuses(rule: str, entries: list[Any], tmp_path: Path) -> None:
    """The same for C++, where shape and bytes can also contradict each other."""
    path = tmp_path / "x.kdtr"
    with pytest.raises(_native.Error) as error:
        _native.kdtr.write(str(path), entries)
    assert error.value.code == "invalid_argument"
    assert str(error.value).startswith(f"{path}: [{rule}] ")
    assert list(tmp_path.iterdir()) == []


def _refuses(write: Write, path: Path, tensors: dict[str, np.ndarray], rule: str) -> None:
    with pytest.raises((kdtr.KdtrError, _native.Error)) as error:
        write(path, tensors)
    assert f"{path}: [{rule}] " in str(error.value)
    assert error.value.code == "io"


@writers
def test_targets_that_are_no_files(write: Write, tmp_path: Path) -> None:
    """A writer that renames over a device or a pipe destroys it; one that fails must leave nothing."""
    tensors = {"x": np.zeros(3, np.float32)}
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    _refuses(write, folder, tensors, "E_NOT_REGULAR")
    _refuses(write, tmp_path / "pipe", tensors, "E_NOT_REGULAR")
    _refuses(write, Path("/dev/null"), tensors, "E_NOT_REGULAR")
    _refuses(write, tmp_path / "missing" / "x.kdtr", tensors, "E_WRITE")
    _refuses(write, tmp_path / ("n" * 300), tensors, "E_WRITE")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "pipe"]
    assert list(folder.iterdir()) == []


@writers
def test_replacing_a_file(write: Write, tmp_path: Path) -> None:
    """Whoever mapped the old file keeps it; a link is replaced, its target stays; the mode obeys umask."""
    path, link = tmp_path / "x.kdtr", tmp_path / "link.kdtr"
    write(path, {"x": np.zeros(3, np.float32)})
    link.symlink_to(path)
    old = kdtr.KdtrFile.open(path)
    write(link, {"x": np.ones(3, np.float32)})
    assert not link.is_symlink()
    assert kdtr.read(path)["x"].tolist() == [0, 0, 0]
    write(path, {"x": np.full(3, 2, np.float32)})
    assert kdtr.read(path)["x"].tolist() == [2, 2, 2]
    assert old["x"].tolist() == [0, 0, 0]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.kdtr", "x.kdtr"]


SCRIPT = """
import os, resource, sys
import numpy as np
from test_kdtr_writer import WRITERS
for n in range(int(sys.argv[4])):
    open(os.path.join(os.path.dirname(sys.argv[2]), f".kdtr-{os.getpid()}-{n}.tmp"), "w").write("stale")
limit = int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    WRITERS[sys.argv[1]](sys.argv[2], {"x": np.ones(100_000, np.float32), "y": np.ones(7, np.uint8)})
    print("written")
except Exception as error:
    print(error)
"""


def _write_in_a_process(
    language: str, path: Path, *, limit: int = 0, stale: int = 0, prefix: tuple[str, ...] = ()
) -> str:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [*prefix, sys.executable, "-c", SCRIPT, language, str(path), str(limit), str(stale)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("language", WRITERS)
@pytest.mark.parametrize("limit", [1, 64, 200, 4096, 300_000, 400_448])
def test_file_size_limit(language: str, limit: int, tmp_path: Path) -> None:
    """Failure at the first byte, in the header, in the index, in the data, and short writes."""
    path = tmp_path / "x.kdtr"
    path.write_bytes(GOOD["three"])
    printed = _write_in_a_process(language, path, limit=limit)
    if limit >= 400_448:  # 64 + 194, rounded to 320, + 400,000, + 64 of y
        assert printed.strip() == "written"
        assert kdtr.check(path) == "ok" and path.stat().st_size == 400_384
    else:
        assert printed.startswith(f"{path}: [E_WRITE] ")
        assert "File too large" in printed
        assert path.read_bytes() == GOOD["three"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("language", WRITERS)
def test_disk_full(language: str, tmp_path: Path) -> None:
    """A full file system, which may answer only after some of the data is written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=131072 none "$DISK" && "$@"; code=$?; ls -A "$DISK"; exit $code'
    unshare = ("unshare", "--user", "--map-root-user", "--mount")
    prefix = (*unshare, "env", f"DISK={disk}", "sh", "-c", mount, "sh")
    try:
        subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets no test mount a file system of its own")
    printed = _write_in_a_process(language, disk / "x.kdtr", prefix=prefix)
    assert printed.startswith(f"{disk}/x.kdtr: [E_WRITE] ")
    assert "No space left on device" in printed
    assert len(printed.splitlines()) == 1  # `ls` found nothing


@pytest.mark.parametrize("language", WRITERS)
def test_leftovers_of_a_killed_process(language: str, tmp_path: Path) -> None:
    """Temporary files of an earlier process of this number neither stop the writer nor are overwritten."""
    assert _write_in_a_process(language, tmp_path / "x.kdtr", stale=5).strip() == "written"
    assert kdtr.check(tmp_path / "x.kdtr") == "ok"
    left = sorted(tmp_path.glob(".kdtr-*"))
    assert [path.read_text() for path in left] == ["stale"] * 5


@pytest.mark.parametrize("step", ["open", "write", "fsync", "close", "rename"])
@pytest.mark.parametrize("error", [OSError(5, "I/O error"), KeyboardInterrupt()], ids=["EIO", "Ctrl-C"])
def test_failure_of_any_step(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose failure is not noticed, or after which the temporary file stays."""
    path = tmp_path / "x.kdtr"
    path.write_bytes(GOOD["three"])
    real = getattr(os, step)
    pending = [error]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if step == "close":  # a descriptor is gone even where close reports an error
            real(*args, **kwargs)
        if pending:
            raise pending.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(os, step, failing)
    with pytest.raises((kdtr.KdtrError, KeyboardInterrupt)) as caught:
        kdtr.write(path, {"x": np.zeros(3, np.float32)})
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert isinstance(caught.value, kdtr.KdtrError) and caught.value.rule == "E_WRITE"
    assert path.read_bytes() == GOOD["three"]
    assert list(tmp_path.iterdir()) == [path]
