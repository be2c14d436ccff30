"""One deploy on the other side, from the request to the last event."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from harness.deploy.remote.link import LOST, Failed, Link, Lost, Stage, disk_note
from harness.deploy.remote.release import Installer
from harness.deploy.remote.root import RELEASE, Root, real_folder, remove_tree

KEPT_RESULTS = 10  # of each release


class Deploy:
    """The request, its root, its stages."""

    def __init__(self, link: Link, request: Mapping[str, Any]) -> None:
        if not RELEASE.fullmatch(request["digest"]):
            raise Failed(70, "the request's digest is none")
        self.link = link
        self.request = request
        self.digest: str = request["digest"]
        self.root = Root(request["root"])
        self.installer = Installer(link, self.root, request)
        self.code = 0

    def execute(self) -> None:
        """Everything, in order."""
        rsync = shutil.which("rsync")
        if rsync is None:
            raise Failed(1, "there is no rsync on the other side; Debian and Ubuntu: apt-get install rsync")
        version = subprocess.run([rsync, "--version"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
        self.root.lock(self.request["token"], self.request["by"])
        real_folder(self.root.at("source"))
        self.link.emit(
            "ready",
            root=self.root.path,
            python=platform.python_version(),
            system=platform.platform(),
            rsync=version.stdout.decode("ascii", "replace").split("\n")[0],
            current=self.root.current(),
        )
        self.link.wait("synced")
        with Stage(self.link, "source") as stage:
            removed = self.verify_source()
            stage.note(f"{len(self.request['manifest'])} files as announced, {removed} others removed")
        self.installer.install()
        results = self.results_folder()
        self.checks(results)
        shutil.copy(os.path.join(self.installer.release, "release.json"), results)
        sizes = {name: os.path.getsize(os.path.join(results, name)) for name in sorted(os.listdir(results))}
        self.link.emit("results", files=sizes)
        self.link.wait("fetched")
        with Stage(self.link, "prune") as stage:
            stage.note(f"{self.root.prune(self.digest, self.request['keep'])} releases removed")
        self.link.emit("done", code=self.code, current=self.root.current())

    def verify_source(self) -> int:
        """source/ is what was announced; whatever else lies there is deleted. Returns how many files were."""
        source, manifest = self.root.at("source"), self.request["manifest"]
        wrong = []
        for path, (digest, executable) in manifest.items():
            full = os.path.join(source, path)
            try:
                with open(full, "rb") as f:
                    ok = hashlib.sha256(f.read()).hexdigest() == digest
                    ok = ok and bool(os.fstat(f.fileno()).st_mode & 0o100) == executable
            except OSError:
                ok = False
            if not ok or os.path.islink(full):
                wrong.append(path)
        if wrong:
            text = f"{len(wrong)} files are not as announced, among them {wrong[0]}: were they changed meanwhile?"
            raise Failed(1, text)
        removed = 0
        for folder, folders, files in os.walk(source, topdown=False):
            for name in files + [d for d in folders if os.path.islink(os.path.join(folder, d))]:
                full = os.path.join(folder, name)
                if os.path.relpath(full, source) not in manifest:
                    os.unlink(full)
                    removed += 1
            if folder != source and not os.listdir(folder):
                os.rmdir(folder)
        return removed

    def results_folder(self) -> str:
        """results/DATE of the release; the oldest ones go."""
        folder = real_folder(os.path.join(self.installer.release, "results"))
        for old in sorted(os.listdir(folder))[: 1 - KEPT_RESULTS]:
            if old != self.request["date"]:
                remove_tree(os.path.join(folder, old))
        return real_folder(os.path.join(folder, self.request["date"]))

    def checks(self, results: str) -> None:
        """Golden bundles and the matrix; `current` moves only if both pass. Then what was asked for."""
        python = os.path.join(self.installer.release, "venv/bin/python")
        bundles = os.path.join(self.installer.release, "bundles")
        matrix = [python, "-m", "harness.matrix", "--dir", bundles, "--json", os.path.join(results, "matrix.json")]
        doctor = [python, "-m", "kdtree_engine.cli", "doctor", "--json"]
        self.check("doctor", doctor, os.path.join(results, "doctor.json"))
        self.check("golden", [python, "-m", "harness.golden", "--check", "--out", bundles])
        self.check("matrix", matrix)
        if self.code:
            return
        with Stage(self.link, "current") as stage:
            before = self.root.current()
            stage.note("as before" if before == self.digest else f"was {before or 'nothing'}")
            self.root.switch(self.digest)
        if self.request["tests"]:
            self.pytest("tests", [], python, results)
        if self.request["bench"]:
            options = ["-o", "addopts=", "--benchmark-only", "--benchmark-json=" + os.path.join(results, "bench.json")]
            self.pytest("bench", options, python, results)
            self.bench_cuda(results)

    def bench_cuda(self, results: str) -> None:
        """The ops of the CUDA backend, beside the benchmarks of phase 1 (kernels): where the release was built with
        CUDA and the doctor found a GPU that it runs on."""
        program = os.path.join(self.installer.release, "venv/bin/kdtree-bench-cuda")
        try:
            with open(os.path.join(results, "doctor.json")) as f:
                device = str(json.load(f)["uses"]["device"])
        except (ValueError, KeyError, TypeError):
            device = "unknown"
        if self.request["phases"] and 1 not in self.request["phases"]:
            return
        if not os.path.isfile(program) or not device.startswith("cuda"):
            with Stage(self.link, "bench-cuda") as stage:
                stage.note("NOT RUN (no GPU that this release runs on)")
            return
        self.check("bench-cuda", [program, "--out", os.path.join(results, "bench-cuda.json")])

    def check(self, name: str, argv: list[str], output: str | None = None) -> None:
        """One check; the first failure becomes the deploy's exit code. output: a file for what it prints."""
        with Stage(self.link, name) as stage:
            code, lines = self.installer.run(argv, self.root.at("source"), quiet=output is not None)
            if output is not None:
                with open(output, "w") as f:
                    f.write("\n".join(lines) + "\n")
            if code:
                stage.note(f"exit code {code}{disk_note(self.root.path)}")
            stage.code = code
            self.code = self.code or code

    def pytest(self, kind: str, options: list[str], python: str, results: str) -> None:
        """tests/phaseN_* or bench/phaseN_* of the chosen phases; where there are none, that is exit code 2."""
        base, folders = self.root.at("source", kind), []
        for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
            match = re.fullmatch(r"phase([0-9]+)(_.*)?", name)
            if match and (not self.request["phases"] or int(match.group(1)) in self.request["phases"]):
                folders.append(os.path.join(kind, name))
        if not folders:
            with Stage(self.link, kind) as stage:
                stage.note(f"NOT RUN (this source has no {kind}/phaseN_* for it)")
                stage.code = 2
            self.code = self.code or 2
            return
        record = "--junitxml=" + os.path.join(results, kind + ".xml")
        self.check(kind, [python, "-m", "pytest", "-p", "no:cacheprovider", record, *options, *folders])


def serve(link: Link, request: Mapping[str, Any]) -> None:
    """Lost where nobody listens; every other end is an event."""
    try:
        Deploy(link, request).execute()
        return
    except Failed as error:
        failed = error
    except OSError as error:
        failed = Failed(1, f"{error}{disk_note()}")
    link.emit("failed", code=failed.code, text=str(failed))


def main() -> None:
    """Ends the process. Exit code 0 whatever became of the deploy, which is an event; LOST where nobody
    listens."""
    link = Link()

    def stop(*_: object) -> None:
        threading.Thread(target=link.lose, args=("ended by a signal",), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    code = LOST
    line = sys.stdin.buffer.readline()
    if line:
        link.start()
        try:
            serve(link, json.loads(line.decode()))
            code = 0
        except Lost:
            pass
        except BaseException:
            traceback.print_exc()
            code = 70
    os._exit(code)  # the thread that reads would not let the interpreter end
