"""Compares the registers, spills and stack of every kernel with the committed budget.

usage: resource_usage.py BUILD_LOG [--update]

BUILD_LOG is the output of a build with -Xptxas=-v. A kernel that is missing from the budget or from the log,
or that needs more than its budget fails the check. Registers are handed out in steps of 8, and ptxas takes a few more
or fewer when so little as a path changes: one step is allowed. A budget is a number of registers, or [registers, bytes
spilled] for the few kernels at the limit of registers that park a few loop invariants in memory; 32 bytes more are
allowed to those, none to the others. --update writes the budget anew.
Shared memory is dynamic, and every launch is checked against the limit of sm_120 (cpp/backend/cuda/launch.h).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

STEP = 8  # registers of a thread: the grain in which the hardware hands them out
SPILL_SLACK = 32  # bytes, stores and loads together
SPILL_MOST = 256  # a kernel that wants more is to be rewritten
BUDGET = Path(__file__).with_name("resource_budget.json")
ENTRY = re.compile(
    r"Compiling entry function '(\S+)' for '(sm_\d+)'\n"
    r"(?:ptxas info.*\n)?\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r"ptxas info\s*: Used (\d+) registers"
)


def plain_names(mangled: list[str]) -> list[str]:
    """Readable kernel names: no namespaces, no arguments, no hash of a file."""
    text = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = []
    for line in text.splitlines():
        name = re.sub(r"_GLOBAL__N__[0-9a-f]+_\d+_\w+::", "", line)
        name = re.sub(r"\(kdt::WeightKind\)0", "f32", name)
        name = re.sub(r"\(kdt::WeightKind\)1", "bf16", name)
        name = re.sub(r"\(kdt::WeightKind\)2", "w4a16", name)
        name = re.sub(r"\((?:int|bool)\)", "", name)
        name = name.replace("kdt::cuda::", "").replace("(anonymous namespace)::", "").removeprefix("void ")
        names.append(re.sub(r"\((?!.*<).*$", "", name))
    return names


def measured(log: str) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {architecture: {registers, spill_bytes, stack_bytes}}} of a build log."""
    found = ENTRY.findall(log)
    usage: dict[str, dict[str, dict[str, int]]] = {}
    for name, (_, arch, stack, stores, loads, registers) in zip(
        plain_names([entry[0] for entry in found]), found, strict=True
    ):
        usage.setdefault(name, {})[arch] = {
            "registers": int(registers),
            "spill_bytes": int(stores) + int(loads),
            "stack_bytes": int(stack),
        }
    return usage


def budgeted(used: dict[str, int]) -> int | list[int]:
    if used["spill_bytes"] > SPILL_MOST:
        raise SystemExit(f"{used['spill_bytes']} bytes spilled are too many for any budget")
    return [used["registers"], used["spill_bytes"]] if used["spill_bytes"] else used["registers"]


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    usage = measured(Path(sys.argv[1]).read_text())
    if not usage:
        print(f"{sys.argv[1]} has no resource usage; was it built with -Xptxas=-v?")
        return 1
    if "--update" in sys.argv[2:]:
        budget = {k: {a: budgeted(u) for a, u in sorted(v.items())} for k, v in sorted(usage.items())}
        BUDGET.write_text(json.dumps(budget, indent=2) + "\n")
    budget = json.loads(BUDGET.read_text())
    bad = []
    for name in sorted(budget.keys() | usage.keys()):
        for arch in sorted(budget.get(name, {}).keys() | usage.get(name, {}).keys()):
            allowed, used = budget.get(name, {}).get(arch), usage.get(name, {}).get(arch)
            if allowed is None:
                bad.append(f"{name} ({arch}) is not in {BUDGET.name}")
            elif used is None:
                bad.append(f"{name} ({arch}) is in {BUDGET.name} and was not built")
            else:
                registers, spills = allowed if isinstance(allowed, list) else (allowed, 0)
                limit = spills + SPILL_SLACK if spills else 0
                if used["registers"] > registers + STEP or used["spill_bytes"] > limit or (
                    used["stack_bytes"] > 0 and not spills
                ):
                    bad.append(
                        f"{name} ({arch}): {used['registers']} registers of {registers}, {used['spill_bytes']} bytes "
                        f"spilled of {spills}, {used['stack_bytes']} bytes of stack"
                    )
    kernels = sum(len(v) for v in usage.values())
    spilling = sum(u["spill_bytes"] > 0 for v in usage.values() for u in v.values())
    print("\n".join(bad) if bad else f"{kernels} kernels within their budgets; {spilling} of them spill a little")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
