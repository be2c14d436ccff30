"""A miniature of this repository: same names, same commands, no dependencies; builds in a second."""

from __future__ import annotations

from pathlib import Path

BACKEND = '''
"""A build backend that compiles what is newer than its object, and packs a wheel."""
import hashlib, os, pathlib, subprocess, sys, zipfile
from gate import gate

def get_requires_for_build_wheel(config_settings=None):
    return []

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build = pathlib.Path(config_settings["build-dir"])
    build.mkdir(parents=True, exist_ok=True)
    gate("build")
    for source in sorted(pathlib.Path("cpp").glob("*.c")):
        target = build / (source.stem + ".o")
        if not target.exists() or target.stat().st_mtime_ns <= source.stat().st_mtime_ns:
            print("compiling", source, flush=True)
            code = subprocess.call(["cc", "-c", str(source), "-o", str(target)])
            if code:
                sys.exit(code)
    name = "kdtree_engine-0.1.0-py3-none-any.whl"
    info = "kdtree_engine-0.1.0.dist-info"
    files = {str(p.relative_to("python")): p.read_bytes() for p in sorted(pathlib.Path("python").rglob("*.py"))}
    files["kdtree_engine/objects.txt"] = "".join(
        p.name + " " + hashlib.sha256(p.read_bytes()).hexdigest() + "\\n" for p in sorted(build.glob("*.o"))).encode()
    files[info + "/METADATA"] = (b"Metadata-Version: 2.1\\nName: kdtree-engine\\nVersion: 0.1.0\\n"
                                 b"Provides-Extra: test\\n")
    files[info + "/WHEEL"] = b"Wheel-Version: 1.0\\nGenerator: mini\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    script = pathlib.Path("python/bench_cuda.py")  # what a build with CUDA brings along
    if script.exists():
        files["kdtree_engine-0.1.0.data/scripts/kdtree-bench-cuda"] = b"#!python\\n" + script.read_bytes()
    record = "".join(f"{n},,\\n" for n in files) + info + "/RECORD,,\\n"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as z:
        for n, data in files.items():
            entry = zipfile.ZipInfo(n)
            entry.external_attr = (0o100755 if "/scripts/" in n else 0o100644) << 16
            z.writestr(entry, data)
        z.writestr(info + "/RECORD", record)
    return name
'''

GATE = '''
import os, pathlib, time

def gate(name):
    """Waits while a file of this name lies in $KDT_GATES; "NAME.reached" says that it is waited for."""
    folder = pathlib.Path(os.environ["KDT_GATES"])
    if (folder / name).exists():
        (folder / (name + ".reached")).touch()
        deadline = time.monotonic() + 60
        while (folder / name).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
'''

GOLDEN = """
import pathlib, sys
from gate import gate
gate("golden")
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(exist_ok=True)
(out / "model_mini.kdtr").write_text("golden")
print("1 bundles as in the manifest in", out)
"""

MATRIX = """
import json, pathlib, sys
from gate import gate
from kdtree_engine import ANSWER
gate("matrix")
good = (pathlib.Path(sys.argv[sys.argv.index("--dir") + 1]) / "model_mini.kdtr").read_text() == "golden"
failed = int(not good or ANSWER < 0)
print("FAIL" if failed else "PASS", " model_mini  cpu  plain")
report = {"passed": 1 - failed, "failed": failed, "not_run": 1, "legs": []}
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(report))
sys.exit(failed)
"""


def write(folder: Path, answer: int = 1) -> Path:
    """The whole package. answer: what `python -c 'import kdtree_engine'` has as ANSWER, so that two releases
    can be told apart; negative: its matrix fails."""
    files = {
        "pyproject.toml": """[build-system]
requires = []
build-backend = "mini_backend"
backend-path = ["python"]
[project]
name = "kdtree-engine"
version = "0.1.0"
requires-python = ">=3.11"
optional-dependencies = { test = [] }
""",
        "CMakeLists.txt": "# marks a source tree\n",
        "README.md": "a miniature\n",
        "cpp/one.c": "int one(void) { return 1; }\n",
        "cpp/two.c": "int two(void) { return 2; }\n",
        "python/mini_backend.py": BACKEND,
        "python/gate.py": GATE,
        "python/kdtree_engine/__init__.py": f"ANSWER = {answer}\n",
        "python/kdtree_engine/cli.py": 'print(\'{"version": "0.1.0"}\')\n',
        "python/harness/__init__.py": "",
        "python/harness/golden.py": GOLDEN,
        "python/harness/matrix.py": MATRIX,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def set_answer(folder: Path, answer: int) -> None:
    """Another release of the same package."""
    (folder / "python/kdtree_engine/__init__.py").write_text(f"ANSWER = {answer}\n")


def answer_of(folder: Path) -> int:
    """The answer that the package would give."""
    return int((folder / "python/kdtree_engine/__init__.py").read_text().split("=")[1])
