"""Whole models of random weights at Moonlight's widths, fewer layers: steps and decodings on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from kdtree_engine import _native
from kdtree_engine.benchmark import Runner, Workload
from kdtree_engine.cli.bench import clocks
from kdtree_engine.config import parse_config
from kdtree_engine.engine import Engine
from machine import THREADS
from records import Record

DEPTH = 256  # positions before everything that is measured
TOKENS = 48

MOONLIGHT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 32768, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 11264,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": None, "max_position_embeddings": 8192, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


def engine(kind: str, layers: int) -> Engine:
    """`f32`: all of it; `int4`: MLPs and experts INT4, the rest bf16. On KDTREE_BENCH_DEVICE."""
    config = parse_config(MOONLIGHT | {"num_hidden_layers": layers}, "config.json")
    device = os.environ.get("KDTREE_BENCH_DEVICE", "auto")
    if device == "auto":
        usable = any(gpu["compiled_for"] for gpu in _native.gpu_report()["gpus"])
        device = "cuda" if usable and _native.build_info()["cuda"] else "cpu"
    precision = "f32" if kind == "f32" else ""
    builder = _native.EngineBuilder(dict(config.fields), device, THREADS, precision=precision)
    rng = np.random.default_rng(1)
    for name, shape, may_be_int4 in builder.expected():
        if kind == "int4" and may_be_int4 and ".mlp." in name and "mlp.gate." not in name:
            out, width = shape
            words = rng.integers(0, 2**32, (out, width // 8), dtype=np.uint32).view(np.int32)
            scales = rng.integers(0x3B00, 0x3B80, (out, width // 32), dtype=np.uint16)
            builder.add_w4a16(name.removesuffix(".weight"), words, scales)
        elif len(shape) == 1:
            builder.add(name, np.full(shape, 0.0 if "bias" in name else 1.0, np.float32))
        else:
            values = rng.random(shape, dtype=np.float32)
            values -= np.float32(0.5)
            values *= np.float32(3.5 / np.sqrt(shape[1]))
            # bf16 halves the bytes of what stays in floating point
            builder.add(name, values if kind == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16))
    return Engine(builder.finish(), Path("random weights"), config, None, frozenset())


class Bench:
    """One engine and a runner for it; its sessions hold DEPTH positions."""

    def __init__(self, kind: str, layers: int) -> None:
        self.runner = Runner(engine(kind, layers))
        tests = [Workload("tg", TOKENS, DEPTH)]
        self.session = self.runner.engine.session(self.runner.positions(tests)).native
        self.session.append(self.runner.prefix(DEPTH))
        self.session.begin(1)
        while self.session.step().finished is None:
            pass
        plain = self.runner.decoding(self.session, tests[0])
        plain.reset()
        plain.finish()
        self.runner.measurement(plain, [1.0], 1.0)  # what planted drafts are planted from

    def run(self, benchmark: BenchmarkFixture, drafter: str, budget: int | str, rounds: int, steps: bool) -> None:
        """Measures one round of `budget` nodes (`steps`), or TOKENS tokens."""
        test = Workload("tg", TOKENS, DEPTH, drafter, budget)  # type: ignore[arg-type]
        decoding = self.runner.decoding(self.session, test)
        read: list[float] = []

        def before() -> None:
            decoding.reset()
            if len(read) < 4:
                read.append(self.runner.roofline.measure())

        call = decoding.step if steps else decoding.finish
        benchmark.pedantic(call, setup=before, rounds=rounds, warmup_rounds=2)
        if benchmark.stats is None:  # --benchmark-disable: run, not timed
            return
        m = self.runner.measurement(decoding, [benchmark.stats.stats.median], max(read))
        native = self.runner.engine.native
        record = Record(
            self.runner.roofline, native.device, native.description, bytes=m.bytes,
            working_set=m.bytes / m.forwards, exact=m.exact,
        )  # fmt: skip
        record.fill(benchmark, {"read": read})
        stats = self.session.stats
        emitted = sum(m.accepted_lengths)
        benchmark.extra_info |= {
            "drafter": drafter,
            "budget": budget,
            "rows_per_forward": m.rows / m.forwards,
            "forwards": m.forwards,
            "accepted_length": emitted / m.forwards,
            "tokens_per_second": emitted / benchmark.stats.stats.median,
            "stage_seconds": {k: v for k, v in stats["seconds"].items() if k != "prefill"},
            "weight_bytes": self.runner.engine.weight_bytes,
        }
        benchmark.extra_info["clocks"] = clocks(native.device, native.description)


