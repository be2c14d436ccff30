"""Cost models of the collectives, and the published timings that they are fitted to.

All-reduce of S bytes on p ranks:

    one-shot   every rank sends its whole buffer to every other, each sums for itself:  a + (p - 1) S / B
    two-shot   reduce-scatter, then all-gather:                                         a + 2 (p - 1) / p  S / B
    ring       the same traffic through NCCL, with its larger fixed cost

a is the fixed cost of one call inside a CUDA graph, B the effective rate of one rank. A fit is only as good as its
points: PUBLISHED lists them and tests hold every model to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.scale.values import Kind, ScaleError

US = 1e-6
Algorithm = Literal["one-shot", "two-shot", "ring"]


@dataclass(frozen=True)
class AllReduce:
    """a seconds and B bytes/s of one algorithm on one fabric; kind and source say how they were come by."""

    algorithm: Algorithm
    fixed: float
    rate: float
    kind: Kind
    source: str

    def traffic(self, size: float, ranks: int) -> float:
        """Bytes that one rank receives."""
        share = ranks - 1 if self.algorithm == "one-shot" else 2 * (ranks - 1) / ranks
        return share * size

    def seconds(self, size: float, ranks: int) -> float:
        """Time of an all-reduce of `size` bytes; nothing on one rank."""
        if ranks < 1:
            raise ScaleError(f"all-reduce on {ranks} ranks: expected at least 1")
        return 0.0 if ranks == 1 else self.fixed + self.traffic(size, ranks) / self.rate


@dataclass(frozen=True)
class Fabric:
    """What joins the GPUs of one domain."""

    name: str
    algorithms: tuple[AllReduce, ...]

    def all_reduce(self, size: float, ranks: int) -> tuple[float, AllReduce]:
        """The fastest algorithm's time, and which it is."""
        return min(((a.seconds(size, ranks), a) for a in self.algorithms), key=lambda pair: pair[0])

    def algorithm(self, name: str) -> AllReduce | None:
        """By name; None where the fabric has no figure for it."""
        return next((a for a in self.algorithms if a.algorithm == name), None)

    def exchange(self, size: float, ranks: int) -> float:
        """One all-gather or reduce-scatter of `size` bytes in total: half of a two-shot all-reduce."""
        two_shot = next(a for a in self.algorithms if a.algorithm == "two-shot")
        return two_shot.seconds(size, ranks) / 2

    def all_to_all(self, received: float) -> float:
        """A dispatch or combine in which a rank receives `received` bytes. Modelled: one-shot's fixed cost and rate."""
        one_shot = next(a for a in self.algorithms if a.algorithm == "one-shot")
        return one_shot.fixed + received / one_shot.rate


@dataclass(frozen=True)
class Network:
    """What joins domains: one NIC a GPU. `fixed` and `rate`: of a one-shot exchange between domains; `dispatch` and
    `combine`: bytes/s that a rank receives in an all-to-all, by total ranks."""

    name: str
    fixed: float
    rate: float
    kind: Kind
    source: str
    dispatch: tuple[tuple[int, float], ...]
    combine: tuple[tuple[int, float], ...]
    all_to_all_source: str

    def all_reduce(self, fabric: Fabric, size: float, domain: int, domains: int) -> float:
        """Hierarchical: reduce-scatter inside a domain, one-shot between domains of each GPU's slice, all-gather
        inside. One domain: the fabric's own."""
        if domains == 1:
            return fabric.all_reduce(size, domain)[0]
        inside = 2 * fabric.exchange(size, domain)
        return inside + self.fixed + (domains - 1) * size / domain / self.rate

    def all_to_all(self, received: float, ranks: int, combine: bool) -> float:
        """Time in which every rank receives `received` bytes: the published rate at that many ranks (linear in log2 of
        the ranks), never less than one exchange's fixed cost."""
        table = self.combine if combine else self.dispatch
        rate = float(np.interp(np.log2(ranks), np.log2([r for r, _ in table]), [rate for _, rate in table]))
        return max(self.fixed, received / rate)


_B12X = "local-inference-lab/rtx6kpro models/kimi-k3/qsrt-tp9-dspark-qualification.md"
_RTX6KPRO = "local-inference-lab/rtx6kpro hardware/pcie-bandwidth.md"
_VLLM_H100 = "vllm-project/vllm #24111, H100, TP6"
_TOKENSPEED_860 = "lightseekorg/tokenspeed #860, GB200, fused with RMSNorm"
_TOKENSPEED_1234 = "lightseekorg/tokenspeed #1234, GB200"
_VLLM_GB300 = "vllm-project/vllm #53318, GB300 NVL72"
_ROCE = "local-inference-lab/b12x #295, RoCE, ConnectX-7, 4 nodes"

PCIE5 = Fabric(
    "PCIe 5 x16",
    (
        AllReduce("one-shot", 7.2 * US, 26e9, "published", f"fit to {_RTX6KPRO}, custom kernel on PCIe switches"),
        AllReduce("two-shot", 14.4 * US, 50e9, "modelled", "two one-shot hops; ring rate of flashinfer #4870"),
        AllReduce("ring", 21.5 * US, 50e9, "published", f"fit to {_RTX6KPRO} and {_B12X}, NCCL"),
    ),
)
NVLINK4 = Fabric(
    "NVLink 4",
    (
        AllReduce("one-shot", 4.9 * US, 322e9, "published", f"fit to {_VLLM_H100}, ca_1stage"),
        AllReduce("two-shot", 11.9 * US, 278e9, "published", f"fit to {_VLLM_H100}, ca_2stage"),
    ),
)
NVLINK5_RACK = Fabric(
    "NVLink 5, 72 GPUs",
    (
        AllReduce("one-shot", 10.8 * US, 689e9, "published", f"fit to {_TOKENSPEED_860} and {_TOKENSPEED_1234}"),
        AllReduce("two-shot", 12.5 * US, 700e9, "published", f"fit to {_TOKENSPEED_1234} and {_VLLM_GB300}"),
    ),
)
_SAME_LINKS = "as in the NVL72, whose links these are; no timing of small messages on 8 B200 was found"
NVLINK5_HGX = Fabric(
    "NVLink 5, 8 GPUs",
    tuple(replace(each, kind="modelled", source=_SAME_LINKS) for each in NVLINK5_RACK.algorithms),
)

_ALL_TO_ALL = "deepseek-ai/DeepEP docs/legacy.md: H800, ConnectX-7 400 Gb/s, 128 tokens a rank, 7168 wide, top 8"
CX7 = Network(
    "InfiniBand NDR, ConnectX-7 400 Gb/s a GPU",
    fixed=17 * US,
    rate=45e9,
    kind="modelled",
    source=f"fixed cost of {_ROCE} (23 us for 48 KiB less its wire time); 46 to 48 GB/s a NIC, NVIDIA/nccl-tests #290",
    dispatch=((8, 98e9), (16, 63e9), (32, 48e9), (64, 43e9), (128, 39e9), (256, 39e9)),
    combine=((8, 127e9), (16, 74e9), (32, 53e9), (64, 46e9), (128, 39e9), (256, 40e9)),
    all_to_all_source=_ALL_TO_ALL,
)


@dataclass(frozen=True)
class Timing:
    """A published all-reduce: `size` bytes on `ranks` ranks in `us` microseconds. tolerance: by how much the model may
    miss it, relative."""

    fabric: Fabric
    algorithm: Algorithm
    ranks: int
    size: int
    us: float
    source: str
    tolerance: float


_KIB = 1024
_ROW = 7168 * 2  # bytes of one row of K2, bf16


def _timings(
    fabric: Fabric, algorithm: Algorithm, source: str, *points: tuple[int, int, float], tolerance: float = 0.1
) -> tuple[Timing, ...]:
    return tuple(Timing(fabric, algorithm, ranks, size, us, source, tolerance) for ranks, size, us in points)


PUBLISHED: tuple[Timing, ...] = (
    *_timings(
        PCIE5,
        "one-shot",
        _RTX6KPRO,
        (8, 256, 7.5),
        (8, _KIB, 7.5),
        (8, 8 * _KIB, 9.2),
        (8, 32 * _KIB, 16.5),
        (8, 64 * _KIB, 25.9),
        (8, 256 * _KIB, 73.6),
    ),
    *_timings(PCIE5, "one-shot", _B12X, (9, _ROW, 15.24), (9, 6 * _ROW, 34.52), tolerance=0.25),
    *_timings(
        PCIE5,
        "ring",
        _RTX6KPRO,
        (8, 256, 24.6),
        (8, _KIB, 24.1),
        (8, 8 * _KIB, 24.2),
        (8, 32 * _KIB, 24.5),
        (8, 64 * _KIB, 24.1),
        (8, 256 * _KIB, 28.0),
        tolerance=0.15,
    ),
    *_timings(PCIE5, "ring", _B12X, (9, _ROW, 19.78), (9, 6 * _ROW, 21.94), tolerance=0.15),
    *_timings(
        NVLINK4,
        "one-shot",
        _VLLM_H100,
        (6, 512 * _KIB, 13.0),
        (6, 1024 * _KIB, 21.0),
        (6, 2048 * _KIB, 38.0),
        (6, 4096 * _KIB, 70.0),
    ),
    *_timings(
        NVLINK4,
        "two-shot",
        _VLLM_H100,
        (6, 512 * _KIB, 15.0),
        (6, 1024 * _KIB, 17.0),
        (6, 2048 * _KIB, 26.0),
        (6, 4096 * _KIB, 37.0),
        tolerance=0.12,
    ),
    *_timings(
        NVLINK5_RACK,
        "one-shot",
        _TOKENSPEED_860,
        (8, _ROW, 10.9),
        (8, 8 * _ROW, 10.9),
        (8, 64 * _ROW, 19.1),
        (8, 128 * _ROW, 29.4),
        tolerance=0.12,
    ),
    *_timings(NVLINK5_RACK, "one-shot", _TOKENSPEED_1234, (16, 64 * _ROW, 32.7)),
    *_timings(NVLINK5_RACK, "two-shot", _TOKENSPEED_1234, (8, 64 * _ROW, 14.0), (16, 64 * _ROW, 15.0)),
    *_timings(NVLINK5_RACK, "two-shot", _VLLM_GB300, (16, 8188 * _KIB, 36.92), (8, 65534 * _KIB, 180.87)),
)
