"""Deploys that go well: what is sent, built, switched, kept, fetched and shown."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import mini
import pytest
from box import Box


def digest(box: Box) -> str:
    return (box.root / "current").readlink().name


def test_a_second_deploy_sends_and_builds_nothing(box: Box) -> None:
    """Catches a digest or a transfer that depends on times, and a release that is built twice."""
    before = (box.root / "releases" / digest(box) / "release.json").stat().st_mtime_ns
    done = box.deploy()
    assert done.code == 0 and done.sent() == []
    assert (done.record["commit"], done.record["dirty"]) == (None, None)  # the miniature is in no repository
    stages = [step["name"] for step in done.record["steps"]]
    assert "build" not in stages and "install" not in stages and "matrix" in stages
    assert (box.root / "releases" / digest(box) / "release.json").stat().st_mtime_ns == before


def test_one_changed_file_is_sent_and_compiled_alone(box: Box) -> None:
    """Catches a transfer of everything, and a build folder that does not stay."""
    path = box.source / "cpp/one.c"
    path.write_text(path.read_text() + "/* changed */\n")
    before = digest(box)
    done = box.recovers()
    assert done.sent() == ["cpp/one.c"] and digest(box) != before
    assert done.err.count("compiling cpp/one.c") == 1 and "compiling cpp/two.c" not in done.err


def test_an_older_file_with_other_bytes_is_compiled(box: Box) -> None:
    """Catches times that are kept in transfer: a clone with old times deploys after a newer build, and the
    compiler never sees its file. Same size, so that rsync's quick check would skip it too."""
    path = box.source / "cpp/two.c"
    text = path.read_text()
    other = text.replace("return 2", "return 7")
    assert len(other) == len(text) and other != text
    path.write_text(other)
    subprocess.run(["touch", "-d", "2001-01-01", path], check=True)
    done = box.recovers()
    assert done.sent() == ["cpp/two.c"] and "compiling cpp/two.c" in done.err


def test_strangers_in_the_source_folder_go(box: Box, tmp_path: Path) -> None:
    """Catches leftovers that would become part of a wheel, a changed file there that stays changed, and a link
    that is followed instead of removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    there = box.root / "source"
    (there / "python/kdtree_engine/stray.py").touch()
    (there / "python/stray").mkdir()
    (there / "python/stray/deep.py").touch()
    (there / "cpp/link").symlink_to(outside)
    (there / "cpp/one.c").write_text("not what was sent")
    (box.source / "python/gone.py").touch()
    box.recovers()
    (box.source / "python/gone.py").unlink()
    done = box.recovers()
    files = {str(p.relative_to(there)) for p in there.rglob("*") if not p.is_dir()}
    assert files == {str(p.relative_to(box.source)) for p in box.source.rglob("*.*") if "reports" not in p.parts}
    assert (outside / "precious").exists() and not (there / "python/stray").exists()
    assert (there / "cpp/one.c").read_text() == (box.source / "cpp/one.c").read_text()
    assert "others removed" in done.err


def test_going_back_needs_no_build(box: Box) -> None:
    """Catches a release that cannot be returned to: an older tree deployed again only moves `current`."""
    first = digest(box)
    old = box.answer
    box.new_answer()
    box.recovers()
    assert digest(box) != first
    mini.set_answer(box.source, old)
    done = box.deploy()
    assert done.code == 0 and digest(box) == first and box.current() == old
    assert "build" not in [step["name"] for step in done.record["steps"]]


def test_releases_beyond_keep_go_and_strangers_stay(box: Box) -> None:
    """Catches a disk that fills up, a release in use that is removed, and a deletion of what is not ours."""
    notes = box.root / "releases" / "notes"
    notes.mkdir()
    for _ in range(3):
        box.new_answer()
        box.recovers()
    done = box.deploy("--keep", "1")
    assert done.code == 0
    left = {p.name for p in (box.root / "releases").iterdir()}
    assert len(left) == 3 and {"notes", digest(box)} <= left
    notes.rmdir()
    for kind, key in (("build", "build"), ("build-env", "build_env"), ("packages", "packages_key")):
        used = {
            json.loads((box.root / "releases" / name / "release.json").read_text())[key] for name in left - {"notes"}
        }
        assert {p.name for p in (box.root / kind).iterdir()} == used
    assert box.deploy("--keep", "0").code == 0
    assert [p.name for p in (box.root / "releases").iterdir()] == [digest(box)]


def test_a_broken_release_is_built_anew(box: Box) -> None:
    """Catches a finished release whose Python is gone, as after an upgrade of the system, and that stays so."""
    (box.root / "current/venv/bin/python").unlink()
    done = box.recovers()
    assert "built anew" in done.err


def test_what_the_build_depends_on_is_part_of_the_release(box: Box) -> None:
    """Catches `--cuda OFF` or `--arch` that find the release, or the build folder, of other options."""
    plain = digest(box)
    folders = {p.name for p in (box.root / "build").iterdir()}
    for options in (("--cuda", "OFF"), ("--cuda", "off", "--arch", "90,120a-real")):
        done = box.deploy(*options)
        assert done.code == 0 and digest(box) != plain and "compiling cpp/two.c" in done.err
    assert len({p.name for p in (box.root / "build").iterdir()} - folders) == 2
    box.recovers()
    assert digest(box) == plain


def test_results_come_back(box: Box) -> None:
    """Catches results that stay there, and a report that does not say what was run."""
    done = box.deploy()
    assert done.report is not None and done.report.parent == box.source / "reports" / "box"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", done.report.name)
    names = {p.name for p in done.report.iterdir()}
    assert names == {"deploy.json", "doctor.json", "log.txt", "matrix.json", "release.json"}
    assert json.loads((done.report / "matrix.json").read_text())["passed"] == 1
    record = done.record
    assert (record["host"], record["code"], record["current"]) == ("box", 0, record["digest"])
    assert record["digest"] == digest(box) and record["attempts"] == 1
    assert "== matrix" in (done.report / "log.txt").read_text()


def test_output_is_live_prefixed_and_tame(box: Box) -> None:
    """Catches output that comes only at the end, lines without their host, and control characters of the other
    side that drive this terminal."""
    matrix = box.source / "python/harness/matrix.py"
    text = matrix.read_text()
    matrix.write_text(text.replace('gate("matrix")', 'print("\\x1b[2Jevil\\rline", flush=True); gate("matrix")'))
    box.hold("matrix")
    process = box.start()
    assert process.stderr is not None
    seen = []
    while "evil" not in (line := process.stderr.readline()):  # while it still waits at the gate
        seen.append(line)
        assert line, seen
    assert line == "[box matrix] \\x1b[2Jevil\\rline\n"
    box.release("matrix")
    done = box.finish(process)
    assert done.code == 0
    lines = [line for line in seen + done.err.splitlines() if not line.startswith("box: ")]
    assert all(line.startswith("[box") for line in lines)
    rows = done.out.splitlines()
    assert len(rows) == 2 and rows[0].split()[:2] == ["host", "release"] and rows[1].split()[0] == "box"
    assert "1 passed, 1 not run" in rows[1] and rows[1].endswith(" 0")
    matrix.write_text(text)
    box.recovers()


def test_several_hosts_side_by_side(box: Box, tmp_path: Path) -> None:
    """Catches hosts that wait for each other, and rows or reports that are mixed up: one of two fails, and both
    must reach the gate before either may pass."""
    hosts = tmp_path / "hosts.toml"
    base = tmp_path / "there"
    hosts.write_text(
        "".join(f'[{name}]\nhost = "box"\nroot = "{base}/{name}"\ncuda = "OFF"\n' for name in ("one", "two"))
    )
    (base / "two").mkdir(parents=True)
    (base / "two" / "stranger").touch()  # no folder to deploy to
    argv = [a for a in box.argv(host="one") if a not in ("--root", str(box.root))]
    argv[argv.index("one") : argv.index("one") + 1] = ["one", "two", "--hosts", str(hosts)]
    box.hold("matrix")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    box.reached("matrix", process)
    box.release("matrix")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:]}
    assert rows == {"one": "0", "two": "1"}
    assert "[one matrix] PASS" in err and "stranger" in err and "[two] error" in err
    assert (base / "two" / "stranger").exists() and [p.name for p in (base / "two").iterdir()] == ["stranger"]
    shutil.rmtree(base)


def test_phases_and_benchmarks_run_there(box: Box) -> None:
    """Catches chosen tests or benchmarks that do not run, run from another phase, or are passed over in silence.
    pytest comes with the package's extra there, as in this repository."""
    project = box.source / "pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace("{ test = [] }", '{ test = ["pytest", "pytest-benchmark"] }'))
    backend = box.source / "python/mini_backend.py"
    code = backend.read_text()
    extra = "Provides-Extra: test\\n"
    requires = "".join(f"Requires-Dist: {name}; extra=='test'\\n" for name in ("pytest", "pytest-benchmark"))
    backend.write_text(code.replace(extra, extra + requires))
    assert backend.read_text() != code
    done = box.deploy("--bench", "--phase", "3")
    assert done.code == 2 and "NOT RUN" in done.err  # nothing was there to run
    for kind, phase, body in (
        ("bench", 1, "def test_one(benchmark):\n    benchmark(lambda: 1)\n"),
        ("bench", 2, "def test_two():\n    raise SystemExit('another phase')\n"),
        ("tests", 1, "def test_three():\n    import kdtree_engine\n"),
    ):
        folder = box.source / kind / f"phase{phase}_x"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"test_{kind}{phase}.py").write_text(body)
    done = box.deploy("--bench", "--tests", "--phase", "1")
    assert done.code == 0, done.err
    assert done.report is not None
    benchmarks = json.loads((done.report / "bench.json").read_text())["benchmarks"]
    assert [b["name"] for b in benchmarks] == ["test_one"]
    assert 'tests="1"' in (done.report / "tests.xml").read_text()
    (box.source / "tests/phase1_x/test_tests1.py").write_text("def test_three():\n    assert False\n")
    done = box.deploy("--tests")
    assert done.code == 1 and "tests failed" in done.err
    for kind in ("bench", "tests"):
        shutil.rmtree(box.source / kind)
    project.write_text(text)
    backend.write_text(code)
    box.recovers()


def test_the_benchmark_of_cuda_ops_runs_where_a_gpu_is(box: Box) -> None:
    """Catches a --bench that leaves the GPU out, or fails for want of one. The miniature's doctor says what there
    is."""
    script, doctor = box.source / "python/bench_cuda.py", box.source / "python/kdtree_engine/cli.py"
    before = doctor.read_text()
    phase = box.source / "bench/phase1_x"
    phase.mkdir(parents=True)
    (phase / "ops.txt").write_text("")
    script.write_text("import sys\nopen(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"replays\": 1}')\n")
    for device, ran in (("cpu", False), ("cuda:0", True)):
        doctor.write_text(f"print('{{\"uses\": {{\"device\": \"{device}\"}}}}')\n")
        done = box.deploy("--bench")
        steps = {step["name"]: step["code"] for step in done.record["steps"]}
        assert steps["bench-cuda"] == 0, done.err
        assert done.report is not None and (done.report / "bench-cuda.json").exists() is ran
        assert ("NOT RUN (no GPU" in done.err) is not ran
    done = box.deploy("--bench", "--phase", "3")
    assert "bench-cuda" not in [step["name"] for step in done.record["steps"]]
    script.unlink()
    shutil.rmtree(box.source / "bench")
    doctor.write_text(before)
    box.recovers()


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_addresses_and_ports(box: Box, address: str, tmp_path: Path) -> None:
    """Catches an IPv6 address that ssh wants bare and rsync in brackets, and a port that only one of them gets."""
    config = tmp_path / "config"
    text = box.server.config.read_text().replace("Host box\n", "Host *\n")
    config.write_text(re.sub(r" +(HostName|Port) .*\n", "", text))
    hosts = tmp_path / "hosts.toml"
    user = re.search(r"User (\S+)", text)
    assert user is not None
    hosts.write_text(f'[box]\nhost = "{user[1]}@{address}"\nport = {box.server.port}\n')
    done = box.deploy("--hosts", str(hosts), "--ssh-config", str(config))
    assert done.code == 0, done.err
