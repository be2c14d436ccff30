"""How fast a checkpoint loads, next to how fast its disk is read.

    python bench/load_checkpoint.py --dir DIR [--gb 5] [--rounds 3] [--keep]

Makes a folder in Kimi K2.5's layout (hidden 7168, INT4 experts of 2048, the published names and order of
tensors, fewer layers and experts) in DIR, with random weights. Then, each time with the files out of the page
cache: reads them with O_DIRECT in blocks of 16 MiB, and loads them into an engine on the CPU. Prints GB/s of
both, their ratio, and the peak of resident memory next to the weights.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import kimi_folder

EXPERTS, LAYERS = 96, 2


def make(path: Path, gigabytes: float) -> None:
    layers = max(LAYERS, round(gigabytes / (EXPERTS * 0.0248)) + 1)
    end = {"eos_token_id": 1}  # of the small vocabulary
    text = kimi_folder.TEXT | end | {"num_hidden_layers": layers, "n_routed_experts": EXPERTS, "vocab_size": 4096}
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps(kimi_folder.CONFIG | end | {"text_config": text | {"quantization_config": kimi_folder.QUANTIZATION}})
    )
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, 16 << 20, np.uint8).tobytes()
    floats = (
        rng.integers(0x3C00, 0x3D00, 8 << 20, np.uint16) | (rng.integers(0, 2, 8 << 20, np.uint16) << 15)
    ).tobytes()
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(kimi_folder.tensors(text)[: layers + 1]):
        name = f"model-{i + 1:05d}.safetensors"
        head, _ = kimi_folder.header(shard)
        with (path / name).open("wb") as file:
            file.write(head)
            for tensor, dtype, shape in sorted(shard, key=lambda t: (-kimi_folder.BYTES[t[1]], t[1], t[0])):
                write(file, tensor, dtype, shape, block, floats)
            file.flush()
            os.fsync(file.fileno())
        weight_map |= {tensor: name for tensor, _, _ in shard}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write(file, tensor: str, dtype: str, shape: list[int], block: bytes, floats: bytes) -> None:  # type: ignore[no-untyped-def]
    if tensor.endswith("weight_shape"):
        out, width = (7168, 2048) if "down_proj" in tensor else (2048, 7168)
        file.write(np.array([out, width], "<i4").tobytes())
        return
    source = block if dtype == "I32" else floats
    left = int(np.prod(shape)) * kimi_folder.BYTES[dtype]
    if dtype == "F32":
        file.write(np.zeros(left // 4, "<f4").tobytes())
        return
    while left > 0:
        file.write(source[: min(left, len(source))])
        left -= len(source)


def forget(files: list[Path]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def disk_rate(files: list[Path]) -> float:
    size = 16 << 20
    buffer = mmap.mmap(-1, size)
    done, started = 0, time.perf_counter()
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        at = 0
        while (n := os.preadv(fd, [buffer], at)) > 0:
            at += n
            if n % 4096:
                break
        done += at
        os.close(fd)
    return done / (time.perf_counter() - started)


def touch(size: int) -> None:
    memory = np.empty(size, np.uint8)
    memory[::4096] = 1


LOAD = """
import sys, time
from kdtree_engine import Engine
started, cpu = time.perf_counter(), time.process_time()
engine = Engine.load(sys.argv[1], device="cpu", context=64)
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(seconds, engine.weight_bytes, peak, cpu)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the folder behind")
    args = parser.parse_args()
    folder = args.dir / "load-checkpoint"
    if not folder.exists():
        make(folder, args.gb)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(f.stat().st_size for f in files)
    print(f"{size / 1e9:.2f} GB in {len(files)} shards")
    try:
        for _ in range(args.rounds):
            forget(files)
            disk = disk_rate(files)
            forget(files)
            touch(size + (1 << 30))
            out = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True)
            seconds, weights, peak, cpu = map(float, out.stdout.split())
            print(
                f"disk {disk / 1e9:.2f} GB/s   load {size / seconds / 1e9:.2f} GB/s   "
                f"ratio {size / seconds / disk:.2f}   "
                f"{seconds:.1f} s, CPU {cpu:.1f} s   weights {weights / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB",
                flush=True,
            )
    finally:
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
