"""GPUs and systems, every number with its source.

Bandwidths and rates are per GPU. "achieved" is what a good kernel gets of the nominal figure; costs per GPU-hour are
total cost of ownership where that was published, else rent, and never ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.scale import comm
from harness.scale.shapes import K26, Shape
from harness.scale.values import GIB, ScaleError, Sourced

_RTX6KPRO = "github.com/local-inference-lab/rtx6kpro"
_INFERENCEX = "github.com/SemiAnalysisAI/InferenceX-app"
_TCO = f"SemiAnalysis AI Cloud TCO Model, quoted in {_INFERENCEX}"
_VERDA = "verda.com/blog/gb300-nvl72-architecture"
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """memory: what the driver reports; bandwidth: nominal; achieved: share of it that a large read gets; bf16: dense
    matrix rate of real kernels; power: board power limit; hour: cost of a GPU-hour in US dollars."""

    name: str
    memory: Sourced
    bandwidth: Sourced
    achieved: Sourced
    bf16: Sourced
    power: Sourced
    hour: Sourced


@dataclass(frozen=True)
class System:
    """Domains of `domain` GPUs joined by `fabric`, at most `domains` of them joined by `network`."""

    name: str
    title: str
    gpu: Gpu
    domain: int
    fabric: comm.Fabric
    domains: int = 1
    network: comm.Network | None = None

    @property
    def gpus(self) -> int:
        return self.domain * self.domains


RUNTIME_RESERVE = Sourced(3 * GIB, "bytes", "modelled", "CUDA context, graphs, scratch and activations, per GPU")
LAYER_OVERHEAD = Sourced(
    12e-6,
    "s",
    "modelled",
    "about 9 graph nodes a layer; an empty node takes 0.58 us (measured, H200), the rest is ramp and tail of kernels",
)

PRO_6000 = Gpu(
    "RTX PRO 6000 Blackwell",
    memory=Sourced(97887 * MIB, "bytes", "published", "nvidia-smi (95.6 GiB)"),
    bandwidth=Sourced(1.792e12, "B/s", "published", "512-bit GDDR7 at 28 Gb/s; hardware-corner.net, 2025-03-21"),
    achieved=Sourced(
        0.83, "share", "published", f"device copy 1376 to 1490 GB/s, {_RTX6KPRO} hardware/pcie-bandwidth.md"
    ),
    bf16=Sourced(417e12, "flop/s", "published", "Server Edition; zzc0721/torch-performance-test-data #160"),
    power=Sourced(600.0, "W", "published", "hardware-corner.net, 2025-03-21"),
    hour=Sourced(0.54, "USD", "published", "blended rent, signwl.com week of 2026-04-06; a rent, not a TCO"),
)
H200 = Gpu(
    "H200 SXM",
    memory=Sourced(143771 * MIB, "bytes", "measured", "nvidia-smi on an H200, 2026-10-27 (140.4 GiB)"),
    bandwidth=Sourced(4.8e12, "B/s", "published", f"NVIDIA datasheet, quoted in {_INFERENCEX}"),
    achieved=Sourced(4.3 / 4.8, "share", "measured", "device copy 4.25 TB/s, read-only 4.46 TB/s, 2026-11-29"),
    bf16=Sourced(625e12, "flop/s", "measured", "mma.sync m16n8k16 from registers, 2026-11-29; wgmma reaches 790"),
    power=Sourced(700.0, "W", "published", "mlcommons/inference_results_v4.1, H200-SXM-141GBx8"),
    hour=Sourced(1.41, "USD", "published", f"{_TCO}, 2026-05-26"),
)
B200 = Gpu(
    "B200 SXM",
    memory=Sourced(183359 * MIB, "bytes", "published", "nvidia-smi in NVIDIA/TensorRT-LLM #10278 (179.1 GiB)"),
    bandwidth=Sourced(7.67e12, "B/s", "published", "7680-bit bus at 3996 MHz, pytorch/ao #4002; the datasheet says 8"),
    achieved=Sourced(0.9, "share", "modelled", "the H200's share"),
    bf16=Sourced(1.8e15, "flop/s", "modelled", f"80 % of 2250 TFLOP/s, the published dense peak ({_INFERENCEX})"),
    power=Sourced(1000.0, "W", "published", "mlcommons/inference_results_v6.0, nebius_b200_n1"),
    hour=Sourced(1.95, "USD", "published", f"{_TCO}, 2026-05-26"),
)
GB300 = Gpu(
    "GB300",
    memory=Sourced(279e9, "bytes", "published", f"{_VERDA}; 288 GB of HBM3e are fitted"),
    bandwidth=Sourced(8.0e12, "B/s", "published", f"{_VERDA}; 576 TB/s a rack"),
    achieved=Sourced(0.9, "share", "modelled", "the H200's share"),
    bf16=Sourced(2.0e15, "flop/s", "modelled", f"80 % of 2500 TFLOP/s, the published dense peak ({_VERDA})"),
    power=Sourced(1400.0, "W", "published", _VERDA),
    hour=Sourced(2.65, "USD", "published", f"{_TCO}, 2026-05-26"),
)

SYSTEMS: Mapping[str, System] = {
    s.name: s
    for s in (
        System("pro6000x8", "8x RTX PRO 6000, PCIe 5", PRO_6000, 8, comm.PCIE5),
        System("h200x8", "HGX H200 x8", H200, 8, comm.NVLINK4),
        System("b200-ib", "HGX B200 x8, InfiniBand", B200, 8, comm.NVLINK5_HGX, 8, comm.CX7),
        System("gb300-nvl72", "GB300 NVL72", GB300, 72, comm.NVLINK5_RACK),
    )
}


def resolve(name: str) -> System:
    """A system by name. Raises ScaleError where there is none."""
    if name not in SYSTEMS:
        raise ScaleError(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


@dataclass(frozen=True)
class Peer:
    """A published decode rate of K2.5 or K2.6 with INT4 experts, for comparison with the model."""

    system: str
    engine: str
    rows: int  # of one step
    context: int  # positions read per sequence
    step_ms: float
    source: str


PEERS = (
    Peer(
        "pro6000x8",
        "vLLM, K2.6, no speculation, 1 sequence",
        1,
        0,
        1e3 / 91.9,
        f"91.4 to 92.4 tok/s, {_RTX6KPRO} models/kimi-k26-v3.md and -v4.md",
    ),
    Peer(
        "h200x8",
        "vLLM 0.21, K2.5, 4 sequences at 8k + 1k",
        4,
        8704,
        10.97,
        f"TPOT, {_INFERENCEX} b200-nvfp4-vs-h200-int4-kimi-k2",
    ),
    Peer(
        "b200-ib",
        "vLLM 0.21, K2.5, 4 sequences at 8k + 1k",
        4,
        8704,
        9.58,
        f"TPOT, one node, {_INFERENCEX} b200-nvfp4-vs-h200-int4-kimi-k2",
    ),
)


@dataclass(frozen=True)
class Acceptance:
    """Tokens emitted per round, published."""

    name: str
    rows: int
    tokens: float
    source: str


_DFLASH = "DFlash card of K2.5, block 8 chain, thinking on, at most 4096 tokens"
_EAGLE = "rtx6kpro, K2.6, acceptance 0.65 / 0.40 / 0.24"
ACCEPTANCES = (
    Acceptance("EAGLE3-MLA, chain of 3", 4, 2.28, _EAGLE),
    Acceptance("DFlash, MT-Bench", 8, 3.7, _DFLASH),
    Acceptance("DFlash, MBPP", 8, 4.5, _DFLASH),
    Acceptance("DFlash, MATH-500", 8, 5.5, _DFLASH),
)

# DFlash for K2.5 / K2.6: 6 layers, 3.48 B weights in bf16, the target's head; vocabulary-parallel like the target
DRAFT_BYTES = Sourced(6.48 * GIB, "bytes", "published", "z-lab/Kimi-K2.6-DFlash, 69 tensors in bf16")
DRAFT_LAYERS = 6


def is_k2(shape: Shape) -> bool:
    """Whether the published decode rates, acceptances and drafters of K2.5 and K2.6 are this shape's."""
    return shape.with_experts("int4") == replace(K26, name=shape.name, vision=shape.vision)
