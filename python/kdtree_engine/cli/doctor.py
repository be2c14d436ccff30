"""`kdtree doctor`: what this build and this machine can do."""

from __future__ import annotations

import json as json_module
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from kdtree_engine import _native
from kdtree_engine.cli import console, exits, machine
from kdtree_engine.cli.version import package_version

# Instruction sets that the CPU backend has paths for, and the flags of /proc/cpuinfo that each needs.
_PATHS = {"avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"), "avx2": ("avx2", "fma"), "portable": ()}
_OPTIONAL = {
    "safetensors": "Hugging Face folders",
    "tokenizers": "text in and out",
    "tiktoken": "Kimi's tokenizer",
    "jinja2": "chat templates",
    "ml_dtypes": "bfloat16 arrays of .kdtr files in numpy",
    "torch": "tests against the reference implementation",
    "transformers": "tests against the reference implementation",
}


def execute(as_json: bool) -> int:
    """Prints the report."""
    report = collect()
    if as_json:
        print(json_module.dumps(report, indent=2))
    else:
        for line in _lines(report):
            print(line)
    return exits.OK


def collect() -> dict[str, Any]:
    """The whole report as plain data."""
    cpu = cpu_report()
    gpu = dict(_native.gpu_report())
    usable = next((i for i, g in enumerate(gpu["gpus"]) if g["compiled_for"]), None)
    return {
        "version": package_version(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "native": {"path": _native.__file__, "build": dict(_native.build_info())},
        "cpu": cpu,
        "gpu": gpu,
        "memory": _memory(),
        "machine": [asdict(finding) for finding in machine.collect()],
        "packages": {name: _package_version(name) for name in _OPTIONAL},
        "environment": {
            name: os.environ[name]
            for name in ("KDTREE_CPU_ISA", "KDTREE_POISON", "NO_COLOR")
            if name in os.environ
        },
        "uses": {
            "device": "cpu" if usable is None else f"cuda:{usable}",
            "instruction_set": os.environ.get("KDTREE_CPU_ISA") or cpu["paths"][0],
            "threads": cpu["usable_cores"],
        },
    }


def cpu_report() -> dict[str, Any]:
    model, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    except OSError:
        pass  # not Linux: the portable path is all that can be promised
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "model": model,
        "usable_cores": cores,
        "cores": os.cpu_count(),
        "paths": [name for name, needed in _PATHS.items() if flags.issuperset(needed)],
    }


def _memory() -> dict[str, int | None]:
    """In bytes: the machine's, what is free for new programs, and the limit of a container, if one is set."""
    total = available = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "MemTotal":
                total = int(value.split()[0]) * 1024
            elif key == "MemAvailable":
                available = int(value.split()[0]) * 1024
    except OSError:
        pass
    limit = None
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            bound = int(Path(name).read_text())
        except (OSError, ValueError):  # "max": no limit
            continue
        if total is None or bound < total:
            limit = bound
        break
    return {"total": total, "available": available, "limit": limit}


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu_lines(gpu: dict[str, Any], size: Callable[[int | None], str]) -> list[str]:
    if gpu["problem"]:
        return [f"GPU            none: {gpu['problem']}"]
    lines = [f"CUDA           driver {gpu['driver']}, built with {gpu['runtime']} for {gpu['architectures']}"]
    for i, g in enumerate(gpu["gpus"]):
        fits = "" if g["compiled_for"] else "; this build has no code for it"
        lines.append(
            f"GPU {i}          {g['name']}, compute capability {g['compute_capability']}, "
            f"{g['multiprocessors']} SMs, {size(g['memory'])}{fits}"
        )
    return lines


def _lines(report: dict[str, Any]) -> list[str]:
    native, cpu, memory, uses = (report[key] for key in ("native", "cpu", "memory", "uses"))
    build = native["build"]

    def size(count: int | None) -> str:
        return "unknown" if count is None else console.byte_text(count)

    lines = [
        f"kdtree-engine  {report['version']}, Python {report['python']['version']}, {report['platform']}",
        f"native module  {native['path']}",
        f"build          {build['compiler']}; CUDA backend: {build['cuda_reason']}",
        f"CPU            {cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable",
        f"code paths     {', '.join(cpu['paths'])}",
        f"memory         {size(memory['total'])}, {size(memory['available'])} available"
        + (f", limited to {size(memory['limit'])}" if memory["limit"] is not None else ""),
        *_gpu_lines(report["gpu"], size),
        f"will use       {uses['device']}"
        + (f", {uses['instruction_set']}, {uses['threads']} threads" if uses["device"] == "cpu" else ""),
    ]
    for finding in report["machine"]:
        mark = {"ok": "ok", "look": "LOOK", "unknown": "?"}[finding["state"]]
        advice = f": {finding['advice']}" if finding["advice"] else ""
        lines.append(console.visible(f"{finding['topic']:14} {mark:4} {finding['text']}{advice}", keep_lines=False))
    for name, purpose in _OPTIONAL.items():
        lines.append(f"{name:14} {report['packages'][name] or 'not installed'} ({purpose})")
    lines += [f"environment    {name}={value}" for name, value in report["environment"].items()]
    return lines
