"""What to look at first when a machine is slow: links, clocks, power, memory errors, where memory lies.

Everything is read from /sys and /proc and from nvidia-smi, where there is one; nothing is changed. A finding is
`ok`, `look` (it costs speed, or may) or `unknown` (this machine does not say).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "look", "unknown"]
Smi = Callable[[list[str]], str | None]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what there is, and where it is wrong what helps."""

    topic: str
    state: State
    text: str
    advice: str = ""


def nvidia_smi(arguments: list[str]) -> str | None:
    """What nvidia-smi prints, None where there is none or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


@dataclass(frozen=True)
class Gpu:
    """One GPU as `nvidia-smi -q -x` describes it. `text(path)` is "" where this version does not say."""

    index: int
    node: xml.Element

    def text(self, *paths: str) -> str:
        """The first of these elements that has a value."""
        for path in paths:
            value = (self.node.findtext(path) or "").strip()
            if value and value not in ("N/A", "[N/A]", "Requested functionality has been deprecated"):
                return value
        return ""

    def number(self, *paths: str) -> float | None:
        """The number that the first of these begins with: 600.00 of "600.00 W"."""
        match = re.match(r"-?\d+(?:\.\d+)?", self.text(*paths))
        return float(match[0]) if match else None

    @property
    def address(self) -> str:
        """PCI address as /sys writes it: 0000:c1:00.0."""
        address = self.text("pci/pci_bus_id") or self.node.get("id", "")
        domain, _, rest = address.lower().partition(":")
        return f"{domain[-4:]}:{rest}"


def gpus(smi: Smi) -> list[Gpu]:
    """Every GPU that the driver knows."""
    text = smi(["-q", "-x"])
    if text is None:
        return []
    try:
        return [Gpu(i, node) for i, node in enumerate(xml.fromstring(text).findall("gpu"))]
    except xml.ParseError:
        return []


def collect(root: Path = Path("/"), smi: Smi = nvidia_smi) -> list[Finding]:
    """Everything, in the order in which it is worth looking at."""
    found = gpus(smi)
    findings: list[Finding] = []
    if found:
        findings += [_driver(found), *_links(found, root), *_peers(found, smi), *_iommu(found, root)]
        for look in (_clocks, _power, _errors, _persistence):
            findings += [look(gpu) for gpu in found]
        findings += [_gpu_numa(gpu, root) for gpu in found if _nodes(root) > 1]
    return [*findings, *_cpu(root)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _driver(found: list[Gpu]) -> Finding:
    names = {gpu.text("product_name") for gpu in found}
    memory = {gpu.text("fb_memory_usage/total") for gpu in found}
    text = f"{len(found)} x {', '.join(sorted(names))}, {', '.join(sorted(memory))}"
    if len(names) > 1:
        return Finding("GPUs", "look", text, "GPUs of different kinds run at the pace of the slowest")
    return Finding("GPUs", "ok", text)


def _links(found: list[Gpu], root: Path) -> Iterable[Finding]:
    """PCIe width and generation. An idle GPU lowers the generation by itself, never the width."""
    for gpu in found:
        link = "pci/pci_gpu_link_info/"
        width = gpu.number(link + "link_widths/current_link_width")
        full = gpu.number(link + "link_widths/max_link_width")
        now = gpu.number(link + "pcie_gen/current_link_gen")
        top = gpu.number(link + "pcie_gen/max_link_gen")
        device = gpu.number(link + "pcie_gen/max_device_link_gen") or top
        if width is None or full is None or now is None or top is None:
            sys = root / "sys/bus/pci/devices" / gpu.address
            speed, wide = _read(sys / "current_link_speed"), _read(sys / "current_link_width")
            text = f"GPU {gpu.index}: {speed or 'speed unknown'}, x{wide or '?'}"
            yield Finding("PCIe", "unknown", text)
            continue
        text = f"GPU {gpu.index}: gen {now:.0f} of {top:.0f}, x{width:.0f} of x{full:.0f}"
        if width < full:
            yield Finding(
                "PCIe", "look", text, "fewer lanes than the card has: another slot, riser or BIOS bifurcation"
            )
        elif device is not None and top < device:
            advice = f"the card can do gen {device:.0f}: slot, riser or BIOS setting"
            yield Finding("PCIe", "look", text, advice)
        elif now < top:
            yield Finding("PCIe", "ok", text + " (lowered while idle; look again under load)")
        else:
            yield Finding("PCIe", "ok", text)


_PEER = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "it is disabled by a registry key of the driver",
    "U": "the driver does not know",
}


def _peers(found: list[Gpu], smi: Smi) -> Iterable[Finding]:
    """Whether GPUs read each other's memory without the host."""
    if len(found) < 2:
        return
    text = smi(["topo", "-p2p", "r"])
    cells = re.findall(r"^\s*GPU\d+\s+((?:(?:X|OK|CNS|GNS|TNS|NS|DR|U)\s*)+)$", text or "", re.MULTILINE)
    states = [word for row in cells for word in row.split() if word != "X"]
    if not states:
        yield Finding("P2P", "unknown", "nvidia-smi topo -p2p r says nothing", "needed by more than one GPU")
    elif bad := sorted({word for word in states if word != "OK"}):
        count = sum(word != "OK" for word in states)
        why = "; ".join(_PEER[word] for word in bad)
        advice = "transfers between GPUs go through host memory: IOMMU, ACS and Above 4G Decoding in the BIOS, driver"
        yield Finding("P2P", "look", f"{count} of {len(states)} directions do not work: {why}", advice)
    else:
        yield Finding("P2P", "ok", f"all {len(states)} directions between {len(found)} GPUs")


def _iommu(found: list[Gpu], root: Path) -> Iterable[Finding]:
    """An IOMMU that translates sends every transfer between GPUs through the root complex."""
    kinds = set()
    for gpu in found:
        kinds.add(_read(root / "sys/bus/pci/devices" / gpu.address / "iommu_group" / "type"))
    kinds.discard("")
    if not kinds:
        units = root / "sys/class/iommu"
        if units.is_dir() and any(units.iterdir()):
            yield Finding("IOMMU", "unknown", "on; the kind of its domains is not shown here")
        else:
            yield Finding("IOMMU", "ok", "off")
    elif kinds == {"identity"}:
        yield Finding("IOMMU", "ok", "passes addresses through (identity)")
    else:
        text = f"translates ({', '.join(sorted(kinds))})"
        if len(found) > 1:
            advice = "P2P is slow or fails: kernel options iommu=pt (or amd_iommu=off, intel_iommu=off), ACS off"
            yield Finding("IOMMU", "look", text, advice)
        else:
            yield Finding("IOMMU", "ok", text + "; matters between GPUs only")


# Reasons that lower clocks, by their names in nvidia-smi's XML, newer and older.
_SLOW = {
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "the power supply brakes it",
    "hw_slowdown": "hardware slows it down",
    "sw_power_cap": "at its power limit",
    "sync_boost": "bound to another GPU's clock",
    "applications_clocks_setting": "application clocks are set (nvidia-smi -rac)",
}


def _clocks(gpu: Gpu) -> Finding:
    sm, top = gpu.number("clocks/sm_clock"), gpu.number("max_clocks/sm_clock")
    memory, memory_top = gpu.number("clocks/mem_clock"), gpu.number("max_clocks/mem_clock")
    heat = gpu.number("temperature/gpu_temp")
    if sm is None or top is None or memory is None or memory_top is None:
        return Finding("clocks", "unknown", f"GPU {gpu.index}: not reported")
    text = f"GPU {gpu.index}: SM {sm:.0f} of {top:.0f} MHz, memory {memory:.0f} of {memory_top:.0f} MHz"
    text += "" if heat is None else f", {heat:.0f} C"
    active = []
    for name, meaning in _SLOW.items():
        paths = [f"clocks_{word}_reasons/clocks_{word}_reason_{name}" for word in ("event", "throttle")]
        if gpu.text(*paths) == "Active":
            active.append(meaning)
    if active:
        return Finding("clocks", "look", text, "; ".join(dict.fromkeys(active)))
    idle = [f"clocks_{word}_reasons/clocks_{word}_reason_gpu_idle" for word in ("event", "throttle")]
    return Finding("clocks", "ok", text + (" (idle; look again under load)" if gpu.text(*idle) == "Active" else ""))


def _power(gpu: Gpu) -> Finding:
    groups = ("gpu_power_readings", "power_readings")
    limit = gpu.number(*(f"{g}/{name}" for g in groups for name in ("current_power_limit", "power_limit")))
    default = gpu.number(*(f"{g}/default_power_limit" for g in groups))
    names = ("power_draw", "instant_power_draw", "average_power_draw")
    draw = gpu.number(*(f"{g}/{name}" for g in groups for name in names))
    if limit is None or default is None:
        return Finding("power", "unknown", f"GPU {gpu.index}: not reported")
    text = f"GPU {gpu.index}: limit {limit:.0f} W of {default:.0f} W by default"
    text += "" if draw is None else f", draws {draw:.0f} W"
    if limit < default:
        return Finding("power", "look", text, f"lower than the card's own limit: nvidia-smi -pl {default:.0f}")
    return Finding("power", "ok", text)


def _errors(gpu: Gpu) -> Finding:
    mode, pending = gpu.text("ecc_mode/current_ecc"), gpu.text("ecc_mode/pending_ecc")
    counts = [n for n in gpu.node.findall("ecc_errors/volatile/*") if "uncorrectable" in n.tag]
    counts += gpu.node.findall("ecc_errors/volatile/double_bit/total")  # older drivers
    bad = sum(int(n.text) for n in counts if n.text and n.text.strip().isdigit())
    text = f"GPU {gpu.index}: {(mode or 'not reported').lower()}, {bad} uncorrectable errors since the driver started"
    if bad:
        return Finding("ECC", "look", text, "results cannot be trusted: reset the GPU, then test or replace it")
    if gpu.text("remapped_rows/remapped_row_pending") == "Yes":
        return Finding("ECC", "look", text + ", a row waits to be remapped", "reset the GPU: nvidia-smi -r")
    if gpu.text("remapped_rows/remapped_row_failure") == "Yes":
        return Finding("ECC", "look", text + ", a row could not be remapped", "the card's memory fails: replace it")
    if mode and pending and mode != pending:
        return Finding("ECC", "look", text, f"will be {pending.lower()} after a reboot")
    return Finding("ECC", "ok" if mode else "unknown", text)


def _persistence(gpu: Gpu) -> Finding:
    mode = gpu.text("persistence_mode")
    text = f"GPU {gpu.index}: {mode.lower() or 'not reported'}"
    if mode == "Disabled":
        return Finding("persistence", "look", text, "every program waits for the driver to start: nvidia-smi -pm 1")
    return Finding("persistence", "ok" if mode else "unknown", text)


def _nodes(root: Path) -> int:
    folder = root / "sys/devices/system/node"
    return sum(1 for _ in folder.glob("node[0-9]*")) if folder.is_dir() else 1


def cpu_list(text: str) -> set[int]:
    """{0, 1, 2, 8} of "0-2,8"."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _gpu_numa(gpu: Gpu, root: Path) -> Finding:
    device = root / "sys/bus/pci/devices" / gpu.address
    node, near = _read(device / "numa_node"), cpu_list(_read(device / "local_cpulist"))
    if node in ("", "-1") or not near:
        text = f"GPU {gpu.index}: the BIOS does not say which node it is at"
        return Finding("NUMA", "unknown", text, "nvidia-smi topo -m may know; pin with numactl")
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else near
    text = f"GPU {gpu.index}: at node {node}; {len(ours & near)} of our {len(ours)} cores are"
    if not ours & near:
        return Finding("NUMA", "look", text, f"host and GPU meet across sockets: numactl --cpunodebind={node}")
    return Finding("NUMA", "ok", text)


def _cpu(root: Path) -> Iterable[Finding]:
    governors = {_read(p) for p in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")}
    governors.discard("")
    if not governors:
        yield Finding("CPU clocks", "unknown", "no frequency governor is shown here (usual in a virtual machine)")
    elif governors == {"performance"}:
        yield Finding("CPU clocks", "ok", "governor performance")
    else:
        advice = "cores wake slowly: cpupower frequency-set -g performance"
        yield Finding("CPU clocks", "look", f"governor {', '.join(sorted(governors))}", advice)
    quota = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        allowed, cores = int(quota[0]) / int(quota[1]), os.cpu_count() or 1
        if allowed < cores:
            advice = f"more threads than that wait for each other: --threads {max(1, int(allowed))}"
            yield Finding("CPU quota", "look", f"{allowed:g} of {cores} cores' time", advice)
    nodes = _nodes(root)
    if nodes > 1:
        text = f"{nodes} nodes"
        if _read(root / "proc/sys/kernel/numa_balancing") == "1":
            advice = "pages move under running threads: sysctl kernel.numa_balancing=0, and numactl --interleave=all"
            yield Finding("NUMA", "look", text + ", automatic balancing is on", advice)
        else:
            yield Finding("NUMA", "ok", text)
