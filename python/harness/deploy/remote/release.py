"""releases/DIGEST: a wheel built from source/, in a virtual environment of its own.

`pip install .` in two halves. The wheel is built in a virtual environment that stays (build-env/KEY) and in a
build folder that stays (build/KEY): with pip's build isolation the paths of nanobind and of the interpreter
would be new each time, and so would be every object file. Then the wheel is installed into the release; what
it depends on is installed once for all releases of the same dependencies (packages/KEY) and seen from each
through a .pth file, which pip counts as installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Mapping
from typing import Any

from harness.deploy.remote.link import Failed, Link, Stage, disk_note
from harness.deploy.remote.root import Root, read_json, real_folder, remove_tree, write_atomically

# What pip would ask the backend for if it built in isolation: ninja or cmake where the system has none that will do.
EXTRA_REQUIRES = """
import importlib, json, sys, tomllib
with open("pyproject.toml", "rb") as f:
    table = tomllib.load(f)["build-system"]
sys.path[:0] = table.get("backend-path", [])
name, _, attributes = table["build-backend"].partition(":")
backend = importlib.import_module(name)
for attribute in filter(None, attributes.split(".")):
    backend = getattr(backend, attribute)
hook = getattr(backend, "get_requires_for_build_wheel", None)
print(json.dumps(hook() if hook else []))
"""
PROBE = """
import ensurepip, json, os, sys, sysconfig, venv
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps([sys.version_info[:3], os.path.realpath(sys.executable), headers]))
"""
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
PACKAGES = """
from importlib.metadata import distributions
print("\\n".join(sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()})))
"""
VERSION = "import sys; print(sys.version.split()[0], sys.implementation.cache_tag)"


def short_hash(value: Any) -> str:
    """16 hexadecimal digits that name a folder."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Installer:
    """Everything between a verified source/ and a finished release."""

    def __init__(self, link: Link, root: Root, request: Mapping[str, Any]) -> None:
        self.link = link
        self.root = root
        self.request = request
        self.release = root.at("releases", request["digest"])
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
            **request["environment"],
        }
        for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"):
            self.environment.pop(name, None)
        self.environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))

    def run(self, argv: list[str], cwd: str | None = None, quiet: bool = False) -> tuple[int, list[str]]:
        """See Link.run; in ROOT unless said otherwise."""
        return self.link.run(argv, cwd or self.root.path, self.environment, self.root.lock_file, quiet)

    def must(self, what: str, argv: list[str], cwd: str | None = None, quiet: bool = False) -> list[str]:
        """Runs a command that has to succeed; otherwise its exit code becomes the deploy's."""
        code, lines = self.run(argv, cwd, quiet)
        if code:
            for text in lines[-20:] if quiet else []:
                self.link.emit("line", text=text)
            raise Failed(code, f"{what} failed with exit code {code}{disk_note(self.root.path)}")
        return lines

    def find_python(self) -> tuple[str, str]:
        """The interpreter to make virtual environments with, and its version and real path."""
        major, minor = self.request["python_floor"]
        names = ["python3"] + [f"python{major}.{n}" for n in range(minor + 9, minor - 1, -1)]
        if self.request["python"]:
            names = [self.request["python"]]
        objections = []
        for name in names:
            path = shutil.which(name)
            if path is None:
                if name == names[0]:
                    objections.append(f"{name} was not found")
                continue
            code, lines = self.run([path, "-I", "-c", PROBE], quiet=True)
            try:
                version, real, headers = json.loads(lines[-1])
            except (IndexError, ValueError):
                why = lines[-1] if lines else f"exit code {code}"
                objections.append(f"{name} makes no virtual environments ({why}); apt-get install python3-venv")
                continue
            dotted = ".".join(map(str, version))
            if version[:2] < [major, minor]:
                objections.append(f"{name} is Python {dotted}")
            elif not headers:
                objections.append(f"{name} has no Python.h; apt-get install python3-dev")
            else:
                return path, f"{dotted} {real}"
        raise Failed(1, f"Python {major}.{minor} or later is needed: {'; '.join(objections)}")

    def install(self) -> None:
        """Leaves a finished release, built now unless it was there."""
        real_folder(self.root.at("releases"))
        with Stage(self.link, "release") as stage:
            python, identity = self.find_python()
            stage.note(f"Python {identity}")
            state = read_json(os.path.join(self.release, "release.json"))
            if state is not None and self.works(state):
                stage.note("was built before")
                return
            if os.path.lexists(self.release):
                stage.note("an unfinished or broken one is built anew")
                remove_tree(self.release)
        previous = read_json(self.root.at("current", "release.json")) or {}
        need = int(previous.get("bytes") or 0) or 2 * int(self.request["source_bytes"])
        free = shutil.disk_usage(self.root.path).free
        if free < need:
            text = f"{free >> 20} MiB are free at {self.root.path}, a release needs about {need >> 20} MiB"
            raise Failed(1, text)
        try:
            os.mkdir(self.release)
            self.build(python, identity)
        except BaseException:
            shutil.rmtree(self.release, ignore_errors=True)  # gives the space back; the build folder stays
            raise

    def works(self, state: Mapping[str, Any]) -> bool:
        """Whether a finished release still runs: its Python may have been upgraded away."""
        python = os.path.join(self.release, "venv/bin/python")
        try:
            code, lines = self.run([python, "-I", "-c", VERSION], quiet=True)
        except Failed:
            return False
        return code == 0 and lines == [state.get("python_version")]

    def builder(self, python: str, identity: str) -> tuple[str, str]:
        """The python that builds, kept while interpreter and requirements stay, and its folder's name."""
        requires = list(self.request["build_requires"])
        key = short_hash([identity, requires])
        folder = os.path.join(real_folder(self.root.at("build-env")), key)
        inside = os.path.join(folder, "bin", "python")
        if not os.path.isfile(os.path.join(folder, "ready")):
            if os.path.lexists(folder):
                remove_tree(folder)
            self.must("making a virtual environment", [python, "-m", "venv", folder])
            install = [inside, "-m", "pip", "install"]
            if requires:
                self.must("installing what builds", install + requires)
            lines = self.must("the build backend", [inside, "-c", EXTRA_REQUIRES], self.root.at("source"), True)
            extra = json.loads(lines[-1])
            if extra:
                self.must("installing what builds", install + extra)
            write_atomically(os.path.join(folder, "ready"), identity + "\n")
        return inside, key

    def packages(self, pip: list[str], python: str, identity: str, wheel: str) -> tuple[str, str]:
        """packages/KEY for what a wheel depends on, never changed once it is ready, and the path that a release
        adds to its own."""
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            lines = archive.read(name).decode("utf-8", "replace").splitlines()
        wanted = sorted(line for line in lines if line.startswith(("Requires-Dist:", "Provides-Extra:")))
        own = next(line.partition(":")[2].strip() for line in lines if line.startswith("Name:"))
        key = short_hash([identity, wanted])
        folder = os.path.join(real_folder(self.root.at("packages")), key)
        inside = os.path.join(folder, "bin", "python")
        if not os.path.isfile(os.path.join(folder, "ready")):
            if os.path.lexists(folder):
                remove_tree(folder)
            self.must("making a virtual environment", [python, "-m", "venv", "--without-pip", folder])
            pip = [*pip, "--python", inside]
            self.must("installing the dependencies", [*pip, "install", wheel + "[test]"])
            self.must("installing the dependencies", [*pip, "uninstall", "--yes", own])
            write_atomically(os.path.join(folder, "ready"), "".join(line + "\n" for line in wanted))
        return key, self.must("the packages' Python", [inside, "-I", "-c", SITE], quiet=True)[-1]

    def build(self, python: str, identity: str) -> None:
        """A new release, release.json last."""
        wheels, venv = os.path.join(self.release, "wheel"), os.path.join(self.release, "venv")
        inside = os.path.join(venv, "bin", "python")
        with Stage(self.link, "build"):
            builder, env_key = self.builder(python, identity)
            key = short_hash([env_key, self.request["environment"]])
            folder = os.path.join(real_folder(self.root.at("build")), key)
            pip = [builder, "-m", "pip"]
            argv = [*pip, "wheel", "--no-build-isolation", "--no-deps", "-v", "--wheel-dir", wheels]
            before = self.environment.get("PATH", os.defpath)
            self.environment["PATH"] = os.path.dirname(builder) + os.pathsep + before  # its cmake, its ninja
            try:
                self.must("the build", [*argv, "--config-settings", "build-dir=" + folder, self.root.at("source")])
            finally:
                self.environment["PATH"] = before
            (name,) = (name for name in os.listdir(wheels) if name.endswith(".whl"))
            wheel = os.path.join(wheels, name)
        with Stage(self.link, "install"):
            packages_key, packages = self.packages(pip, python, identity, wheel)
            self.must("making a virtual environment", [python, "-m", "venv", "--without-pip", venv])
            lines = self.must("the release's Python", [inside, "-I", "-c", SITE], quiet=True)
            write_atomically(os.path.join(lines[-1], "kdtree-packages.pth"), packages + "\n")
            pip = [*pip, "--python", inside]
            self.must("the installation", [*pip, "install", wheel + "[test]"])
            frozen = self.must("listing the packages", [inside, "-I", "-c", PACKAGES], quiet=True)
            version = self.must("the release's Python", [inside, "-I", "-c", VERSION], quiet=True)
            size = sum(os.lstat(os.path.join(d, f)).st_blocks * 512 for d, _, fs in os.walk(self.release) for f in fs)
            state = {
                "digest": self.request["digest"],
                "build": key,
                "build_env": env_key,
                "packages_key": packages_key,
                "python": identity,
                "python_version": version[-1],
                "packages": frozen,
                "bytes": size,
                "finished": time.time(),
            }
            write_atomically(os.path.join(self.release, "release.json"), json.dumps(state, indent=1) + "\n")
