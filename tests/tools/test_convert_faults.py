"""kdtree convert, stopped at every moment, on full disks, and with sources and targets that will not do."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chat_models
import numpy as np
import pytest
import raw_safetensors
import tiny_models
from command import ARGV, assert_refused, environment, kdtree

from kdtree_engine import Engine, EngineError, kdtr
from kdtree_engine.convert import convert

PARTS = 200_000  # bytes of a shard: a few of them


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_models.write_folder(tmp_path_factory.mktemp("faults") / "source")


def digest(path: Path) -> dict[str, str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- stopped in the middle -----------------------------------------------------------------------------------------

# Runs a conversion again and again, killed at its n-th call of the system that changes something, until one gets
# through; after each death the target must not load, and another run must finish with the bytes of an undisturbed one.
KILLER = """
import hashlib, json, os, shutil, signal, sys
from pathlib import Path
from kdtree_engine import Engine, EngineError
from kdtree_engine.convert import convert

source, work, suffix, step = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
calls = ("ftruncate", "posix_fallocate", "pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "mkdir")

def run(target, kill_at):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    left = [kill_at]
    def counted(real):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)
        return call
    for name in calls:
        setattr(os, name, counted(getattr(os, name)))
    try:
        convert(source, target, shard_bytes=200_000, threads=1, scales="minmax")
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)

def digest(path):
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return [(f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in sorted(path.iterdir())]

def whole_but_for_the_state(target):
    found = digest(target)
    if isinstance(found, list):
        found = [(name, value) for name, value in found if not name.startswith("conversion.json")]
    return found == whole

def loads(target):
    try:
        Engine.load(target)
    except EngineError:
        return False
    return True

assert run(work / f"whole{suffix}", 0) == 0
whole = digest(work / f"whole{suffix}")
deaths = []
for n in range(1, 10_000, step):
    target = work / f"target{suffix}"
    status = run(target, n)
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    deaths.append((n, loads(target), target.exists() and whole_but_for_the_state(target)))
    status = run(target, 0)
    again = digest(target) if target.exists() else None
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    left = [p.name for p in work.iterdir() if p.name not in (f"whole{suffix}", "source")]
    assert status == 0 and again == whole and not left, (n, status, left)
print(json.dumps(deaths))
"""


@pytest.mark.parametrize(("suffix", "step"), [("", 7), (".kdtr", 7)])
def test_killed_anywhere(source: Path, tmp_path: Path, suffix: str, step: int) -> None:
    """Catches a target that loads before it is whole, and a run that cannot go on, or goes on to other bytes."""
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(source), str(tmp_path), suffix, str(step)],
        capture_output=True,
        env=environment(),
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    deaths = json.loads(run.stdout)
    assert len(deaths) > 10
    assert all(whole for _, loaded, whole in deaths if loaded)
    assert not all(loaded for _, loaded, _ in deaths)


def finish_and_fail(monkeypatch: pytest.MonkeyPatch, kind: str, shards: int) -> None:
    """Let a conversion die after some shards."""
    from kdtree_engine import convert_sink

    real = getattr(convert_sink, kind).begin

    def begin(self: Any, shard: int) -> None:
        if shard == shards:
            raise RuntimeError("stopped")
        real(self, shard)

    monkeypatch.setattr(getattr(convert_sink, kind), "begin", begin)


@pytest.mark.parametrize(("name", "kind"), [("out", "FolderSink"), ("out.kdtr", "BundleSink")])
def test_a_stopped_run_is_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Catches a second run that starts anew, and a report that forgets the first one's share."""
    whole = convert(source, tmp_path / f"whole-{name}", shard_bytes=PARTS)
    with monkeypatch.context() as patch:
        finish_and_fail(patch, kind, 2)
        with pytest.raises(RuntimeError, match="stopped"):
            convert(source, tmp_path / name, shard_bytes=PARTS)
    written: list[int] = []
    from kdtree_engine import convert_sink

    real = getattr(convert_sink, kind).begin
    monkeypatch.setattr(getattr(convert_sink, kind), "begin", lambda self, k: (written.append(k), real(self, k))[1])
    report = convert(source, tmp_path / name, shard_bytes=PARTS)
    assert written == list(range(2, whole.shards)) and report.resumed == 2
    assert (report.quantised, report.bytes) == (whole.quantised, whole.bytes)
    assert report.relative_error == pytest.approx(whole.relative_error)
    if name == "out":
        assert digest(tmp_path / name) == digest(tmp_path / f"whole-{name}")
    else:
        assert (tmp_path / name).read_bytes() == (tmp_path / f"whole-{name}").read_bytes()
    assert leftovers(tmp_path) == sorted([name, f"whole-{name}"])


@pytest.mark.parametrize(("name", "kind"), [("out", "FolderSink"), ("out.kdtr", "BundleSink")])
def test_only_the_same_conversion_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Catches shards of two conversions in one target: other options, another or a changed source."""
    mine = tmp_path / "mine"
    chat_models.write_folder(mine)
    with monkeypatch.context() as patch:
        finish_and_fail(patch, kind, 1)
        with pytest.raises(RuntimeError, match="stopped"):
            convert(mine, tmp_path / name, shard_bytes=PARTS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for from_, options in ((mine, {"scales": "minmax"}), (mine, {"rest": "bf16"}), (source, {})):
        with pytest.raises(EngineError, match="unfinished conversion of another source or with other options"):
            convert(from_, tmp_path / name, shard_bytes=PARTS, **options)  # type: ignore[arg-type]
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    os.utime(mine / "model.safetensors")
    with pytest.raises(EngineError, match="remove it to start anew"):
        convert(mine, tmp_path / name, shard_bytes=PARTS)


@pytest.mark.parametrize(("name", "kind"), [("out", "FolderSink"), ("out.kdtr", "BundleSink")])
def test_two_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """Catches two runs that write the same files."""
    from kdtree_engine import convert_sink

    real = getattr(convert_sink, kind).finish
    refused: list[str] = []

    def finish(self: Any, *arguments: Any) -> None:
        with pytest.raises(EngineError, match="another conversion is writing") as caught:
            convert(source, tmp_path / name, shard_bytes=PARTS)
        refused.append(str(caught.value))
        real(self, *arguments)

    monkeypatch.setattr(getattr(convert_sink, kind), "finish", finish)
    report = convert(source, tmp_path / name, shard_bytes=PARTS)
    assert len(refused) == report.shards
    Engine.load(tmp_path / name)


def test_ctrl_c(source: Path, tmp_path: Path) -> None:
    """Catches a traceback, a half file that stays, and an exit code that says something else."""
    slow = (
        "import time; from kdtree_engine import convert_plan as p; real = p.Unit.run\n"
        "def run(self, *a):\n    time.sleep(0.02)\n    return real(self, *a)\n"
        "p.Unit.run = run\nfrom kdtree_engine.cli import main; main()\n"
    )
    arguments = ("convert", str(source), str(tmp_path / "out"), "--shard-size", str(PARTS), "--threads", "1")
    child = subprocess.Popen(
        [sys.executable, "-c", slow, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    end = time.monotonic() + 60
    state = tmp_path / "out" / "conversion.json"
    while not (state.exists() and json.loads(state.read_text())["shards"]) and time.monotonic() < end:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and out == b""
    assert err == b"the same command goes on where this one stopped\ncancelled\n"
    assert not list((tmp_path / "out").glob("*.tmp")) and not (tmp_path / "out" / "config.json").exists()
    run = kdtree(*arguments)
    assert run.code == 0 and "from an earlier run" in run.out
    Engine.load(tmp_path / "out")


# -- disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "out.kdtr"])
def test_not_enough_space(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Catches hours of work for a target that never fitted, and files that are left of it."""
    real = os.statvfs

    class Full:
        f_bavail, f_frsize = 100, 1024

    monkeypatch.setattr(os, "statvfs", lambda path: Full if Path(path).is_relative_to(tmp_path) else real(path))
    with pytest.raises(EngineError, match=rf"{name} needs 0.00 GiB more; its disk has 0.00 GiB left") as caught:
        convert(source, tmp_path / name)
    assert caught.value.code == "io" and leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["out", "out.kdtr"])
def test_files_that_may_not_grow(source: Path, tmp_path: Path, name: str) -> None:
    """Catches a write that fails and is taken for done; here the system itself says no."""
    run = subprocess.run(
        [*ARGV, "convert", str(source), str(tmp_path / name)],
        capture_output=True,
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        check=False,
    )
    assert run.returncode == 1 and run.stdout == b""
    assert b"writing" in run.stderr and b"File too large" in run.stderr and run.stderr.count(b"\n") == 1
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["out", "out.kdtr"])
def test_a_disk_that_fills_up(source: Path, tmp_path: Path, name: str) -> None:
    """Catches a full disk that is not told as one, after the sum had been done and somebody else took the space;
    with room again, the conversion goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        from kdtree_engine import convert_sink

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert_sink, "_check_space", lambda *_: None)
            (disk / "other").write_bytes(bytes(1_700_000))
            with pytest.raises(EngineError, match="No space left on device") as caught:
                convert(source, disk / name, shard_bytes=PARTS)
            assert caught.value.code == "io"
            (disk / "other").unlink()
        report = convert(source, disk / name, shard_bytes=PARTS)
        assert report.shards > 2
        Engine.load(disk / name)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_targets_that_are_something_else(source: Path, tmp_path: Path) -> None:
    """Catches a conversion that writes over, or into, what somebody has."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "b.kdtr").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for target, message in (
        (tmp_path / "full", "exists and is not empty"),
        (tmp_path / "b.kdtr", "exists; choose another name"),
        (source, "is the source itself"),
        (tmp_path / "file", "failed: Not a directory"),
        (tmp_path / "file" / "x", "failed: Not a directory"),
        (tmp_path / "nowhere" / "b.kdtr", "failed: No such file"),
    ):
        with pytest.raises(EngineError, match=message):
            convert(source, target)
    assert leftovers(tmp_path) == ["b.kdtr", "empty", "file", "full"]
    convert(source, tmp_path / "empty")
    Engine.load(tmp_path / "empty")


def test_sources_that_will_not_do(source: Path, tmp_path: Path) -> None:
    """Catches a broken source whose faults are found half way, or carried over."""
    tensors = tiny_models.weights()
    missing = {name: array for name, array in tensors.items() if "experts.3.up" not in name}
    dense = {**tiny_models.CONFIG, "first_k_dense_replace": 3}
    narrow = {**tiny_models.CONFIG, "moe_intermediate_size": 24}
    expert = "model.layers.2.mlp.experts.5.down_proj.weight"
    broken = {**tensors, expert: np.where(np.arange(32) == 9, np.nan, tensors[expert]).astype(np.float32)}
    huge = {**tensors, "model.norm.weight": np.full(64, 3.4e38, np.float32)}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
        ("missing", tiny_models.CONFIG, missing, "int4", "tensors are missing"),
        ("dense", dense, tiny_models.weights(dense), "int4", "no routed experts, so there is nothing to quantise"),
        ("narrow", narrow, tiny_models.weights(narrow), "int4", "has 24 inputs, which are no multiple"),
        ("broken", tiny_models.CONFIG, broken, "int4", f"{expert} holds a NaN or an infinity in row 0"),
        ("broken16", tiny_models.CONFIG, broken, "bf16", f"{expert} holds a NaN, or a weight that is none in BF16"),
        ("huge", tiny_models.CONFIG, huge, "bf16", "model.norm.weight holds a NaN, or a weight that is none in BF16"),
    ]
    for name, config, weights, to, message in cases:
        folder = tiny_models.write_folder(tmp_path / name, config, weights, tokenizer=False)
        for target in (tmp_path / "out", tmp_path / "out.kdtr"):
            with pytest.raises(EngineError, match=message):
                convert(folder, target, to=to)  # type: ignore[arg-type]
            assert not target.exists()
    assert leftovers(tmp_path) == sorted(case[0] for case in cases)


def test_a_shape_that_says_something_else(source: Path, tmp_path: Path) -> None:
    """Catches a weight_shape that is corrected in silence."""
    convert(source, tmp_path / "int4")
    stored: dict[str, Any] = dict(raw_safetensors.read(tmp_path / "int4"))
    name = "model.layers.1.mlp.experts.0.up_proj.weight_shape"
    stored[name] = np.array([64, 32], np.int32)
    raw_safetensors.write(tmp_path / "int4" / "model.safetensors", stored)
    with pytest.raises(EngineError, match=r"up_proj.weight_shape is \[64, 32\]; expected \[32, 64\]") as caught:
        convert(tmp_path / "int4", tmp_path / "again")
    assert caught.value.code == "bad_model" and not (tmp_path / "again").exists()


def test_bundles_that_will_not_do(tmp_path: Path) -> None:
    """Catches shapes that only the engine would have checked, and numbers that a config.json cannot say."""
    tensors = tiny_models.weights()
    name = "model.layers.1.self_attn.o_proj.weight"
    wrong = tiny_models.write_bundle(tmp_path / "w.kdtr", tensors={**tensors, name: tensors[name].T.copy()})
    with pytest.raises(EngineError, match=rf"{name} is f32 \[80, 64\]; expected f32 or bf16 or f16 \[64, 80\]"):
        convert(wrong, tmp_path / "out")
    other = dict(kdtr.read(tiny_models.write_bundle(tmp_path / "b.kdtr")))
    other["config.latent_norm_eps"] = np.float64(1e-5)
    kdtr.write(tmp_path / "eps.kdtr", other)
    with pytest.raises(EngineError, match=r"latent_norm_eps is 1e-05, which a config\.json cannot say"):
        convert(tmp_path / "eps.kdtr", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int8"}, "to is 'int8'; expected one of int4, bf16, f32, same"),
        ({"scales": "max"}, "scales is 'max'"),
        ({"rest": "f16"}, "rest is 'f16'"),
        ({"to": "bf16", "rest": "bf16"}, "rest is 'bf16', which goes with int4"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"threads": -1}, "threads is -1"),
    ],
)
def test_arguments(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Catches words that are not known and are taken for something else."""
    with pytest.raises(EngineError, match=message) as caught:
        convert(source, tmp_path / "out", **options)
    assert caught.value.code == "invalid_argument" and leftovers(tmp_path) == []


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command(source: Path, tmp_path: Path) -> None:
    """Catches options that do not arrive, and a report that is not the conversion's."""
    options = ("--scales", "minmax", "--rest", "bf16", "--shard-size", "100 KiB", "--threads", "2")
    run = kdtree("convert", source, tmp_path / "out", *options, "--json")
    assert run.code == 0 and run.err == ""
    report = run.json
    same = convert(source, tmp_path / "same", scales="minmax", rest="bf16", shard_bytes=100 << 10)
    for key in ("tensors", "bytes", "shards", "quantised", "relative_error"):
        assert report[key] == pytest.approx(getattr(same, key))
    assert digest(tmp_path / "out") == digest(tmp_path / "same")
    text = kdtree("convert", tmp_path / "out", tmp_path / "x.kdtr", "--to", "same")
    assert text.code == 0 and "x.kdtr: " in text.out and "quantised" not in text.out


def test_refusals_of_the_command(source: Path, tmp_path: Path) -> None:
    """Catches tracebacks, and usage errors that are told after the work."""
    out = tmp_path / "out"
    assert_refused(kdtree("convert", source), "TARGET", code=2)
    assert_refused(kdtree("convert", source, out, "--to", "int8"), "--to is 'int8'", code=2)
    assert_refused(kdtree("convert", source, out, "--scales", "x"), "--scales is 'x'", code=2)
    assert_refused(kdtree("convert", source, out, "--to", "f32", "--rest", "bf16"), "--rest goes with", code=2)
    for size in ("0", "4 parsecs", "-1", "", "99999999GiB"):
        assert_refused(kdtree("convert", source, out, "--shard-size", size), "--shard-size", code=2)
    assert_refused(kdtree("convert", tmp_path / "nothing", out), "does not exist")
    assert_refused(kdtree("convert", source / "config.json", out), "neither a folder nor a .kdtr bundle")
    assert_refused(kdtree("convert", source, source), "is the source itself")
    assert leftovers(tmp_path) == []
