"""What `kdtree doctor` says about a machine with GPUs, from /sys and nvidia-smi as they are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import kdtree

from kdtree_engine.cli import machine
from kdtree_engine.cli.machine import Finding

# One GPU of `nvidia-smi -q -x` in the form of driver 580, cut down to what is read; {} are what tests change.
GPU = """<gpu id="00000000:{address}:00.0">
<product_name>NVIDIA RTX PRO 6000 Blackwell Server Edition</product_name>
<persistence_mode>{persistence}</persistence_mode>
<ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>{pending}</pending_ecc></ecc_mode>
<ecc_errors><volatile><sram_correctable>7</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_correctable>9</dram_correctable><dram_uncorrectable>{errors}</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>No</remapped_row_pending></remapped_rows>
<pci><pci_bus_id>00000000:{address}:00.0</pci_bus_id><pci_gpu_link_info><pcie_gen><max_link_gen>{host_gen}</max_link_gen>
<current_link_gen>{gen}</current_link_gen><max_device_link_gen>5</max_device_link_gen></pcie_gen>
<link_widths><max_link_width>16x</max_link_width><current_link_width>{width}x</current_link_width></link_widths>
</pci_gpu_link_info></pci>
<fb_memory_usage><total>97887 MiB</total></fb_memory_usage>
<clocks_event_reasons><clocks_event_reason_gpu_idle>{idle}</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
<temperature><gpu_temp>31 C</gpu_temp></temperature>
<gpu_power_readings><instant_power_draw>41.5 W</instant_power_draw><current_power_limit>{limit} W</current_power_limit>
<default_power_limit>600.00 W</default_power_limit></gpu_power_readings>
<clocks><sm_clock>180 MHz</sm_clock><mem_clock>405 MHz</mem_clock></clocks>
<max_clocks><sm_clock>3090 MHz</sm_clock><mem_clock>14001 MHz</mem_clock></max_clocks>
</gpu>"""
GOOD = {
    "persistence": "Enabled",
    "pending": "Enabled",
    "errors": "0",
    "gen": "1",
    "host_gen": "5",
    "width": "16",
    "idle": "Active",
    "hot": "Not Active",
    "limit": "600.00",
}
PEERS = """ \t\x1b[4mGPU0\tGPU1\t\x1b[0m
 GPU0\tX\t{0}\t
 GPU1\t{0}\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def box(root: Path, peers: str = "OK", iommu: str = "identity", **changes: str) -> list[Finding]:
    """Findings of a machine with two GPUs and two NUMA nodes."""
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": changes.pop("governor", "performance"),
        "sys/fs/cgroup/cpu.max": changes.pop("quota", "max 100000"),
        "proc/sys/kernel/numa_balancing": changes.pop("balancing", "0"),
    }
    ours = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    near = changes.pop("near", ours)
    for address in ("01", "c1"):
        device = f"sys/bus/pci/devices/0000:{address}:00.0"
        files[f"{device}/iommu_group/type"] = iommu
        files[f"{device}/numa_node"] = "1" if near else "-1"
        files[f"{device}/local_cpulist"] = near
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    first, second = (GPU.format(address=a, **(GOOD | (changes if a == "C1" else {}))) for a in ("01", "C1"))
    answers = {
        "-q -x": '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "x.dtd">\n'
        f"<nvidia_smi_log>{first}{second}</nvidia_smi_log>",
        "topo -p2p r": PEERS.format(peers),
    }
    return machine.collect(root, lambda arguments: answers.get(" ".join(arguments)))


def test_a_good_machine_has_nothing_to_look_at(tmp_path: Path) -> None:
    """Catches false alarms: an idle GPU lowers its clocks and its link by itself, correctable errors are none."""
    findings = box(tmp_path)
    assert [f for f in findings if f.state != "ok"] == []
    topics = list(dict.fromkeys(f.topic for f in findings))
    assert topics == ["GPUs", "PCIe", "P2P", "IOMMU", "clocks", "power", "ECC", "persistence", "NUMA", "CPU clocks"]
    texts = [f.text for f in findings]
    assert "2 x NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887 MiB" in texts
    assert "GPU 1: limit 600 W of 600 W by default, draws 42 W" in texts


@pytest.mark.parametrize(
    "changes, topic, words",
    [
        ({"peers": "CNS"}, "P2P", "2 of 2 directions do not work: the chipset"),
        ({"iommu": "DMA-FQ"}, "IOMMU", "translates (DMA-FQ): P2P is slow or fails: kernel options iommu=pt"),
        ({"width": "8"}, "PCIe", "GPU 1: gen 1 of 5, x8 of x16: fewer lanes"),
        ({"host_gen": "4"}, "PCIe", "GPU 1: gen 1 of 4, x16 of x16: the card can do gen 5"),
        ({"hot": "Active"}, "clocks", "GPU 1: SM 180 of 3090 MHz, memory 405 of 14001 MHz, 31 C: too hot"),
        ({"limit": "450.00"}, "power", "GPU 1: limit 450 W of 600 W by default, draws 42 W: lower"),
        ({"errors": "3"}, "ECC", "GPU 1: enabled, 3 uncorrectable errors"),
        ({"pending": "Disabled"}, "ECC", "will be disabled after a reboot"),
        ({"persistence": "Disabled"}, "persistence", "GPU 1: disabled: every program waits"),
        ({"near": "4000-4001"}, "NUMA", "GPU 0: at node 1; 0 of our"),
        ({"balancing": "1"}, "NUMA", "2 nodes, automatic balancing is on"),
        ({"governor": "powersave"}, "CPU clocks", "governor powersave"),
        ({"quota": "50000 100000"}, "CPU quota", "0.5 of"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_fault_is_named(changes: dict[str, str], topic: str, words: str, tmp_path: Path) -> None:
    """Catches a fault that nobody would see, named at the wrong place or without what helps."""
    looks = [f for f in box(tmp_path, **changes) if f.state == "look"]
    assert {f.topic for f in looks} == {topic}
    assert words in f"{looks[0].text}: {looks[0].advice}" and looks[0].advice


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    """Catches a traceback, or an all-clear, where files, fields or nvidia-smi's answers are missing."""
    assert machine.collect(tmp_path, lambda _: None) == [
        Finding("CPU clocks", "unknown", "no frequency governor is shown here (usual in a virtual machine)")
    ]
    assert machine.collect(tmp_path, lambda _: "<not xml")[0].topic == "CPU clocks"
    empty = "<nvidia_smi_log><gpu id='00000000:01:00.0'/><gpu><ecc_mode/></gpu></nvidia_smi_log>"
    findings = machine.collect(tmp_path, lambda arguments: empty if "-q" in arguments else "")
    assert {f.topic for f in findings if f.state == "ok"} == {"GPUs", "IOMMU"}
    assert {f.topic for f in findings if f.state == "unknown"} >= {
        "PCIe",
        "P2P",
        "clocks",
        "power",
        "ECC",
        "persistence",
    }


def test_cpu_lists() -> None:
    """Catches a list of cores that is read by its ends only."""
    assert machine.cpu_list("0-2,8\n") == {0, 1, 2, 8} and machine.cpu_list("") == set()


def test_doctor_asks_nvidia_smi(tmp_path: Path) -> None:
    """Catches findings that the command does not print, and a name from a driver that drives the terminal."""
    answer = tmp_path / "answer.xml"
    text = GPU.format(address="01", **(GOOD | {"limit": "300.00"})).replace("NVIDIA RTX", "NVIDIA&#9;RTX\nx")
    answer.write_text(f"<nvidia_smi_log>{text}</nvidia_smi_log>")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '-q -x' ] && cat {answer}\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    shown = kdtree("doctor", PATH=path)
    assert shown.code == 0
    assert any(line.startswith("power          LOOK GPU 0: limit 300 W of 600 W") for line in shown.out.splitlines())
    assert any(line.startswith("GPUs           ok   1 x NVIDIA") for line in shown.out.splitlines())
    findings = kdtree("doctor", "--json", PATH=path).json["machine"]
    assert {f["topic"]: f["state"] for f in findings}["power"] == "look"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert "GPU" not in "".join(f["topic"] for f in kdtree("doctor", "--json", PATH=path).json["machine"])
