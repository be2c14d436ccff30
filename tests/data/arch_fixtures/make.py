"""Makes the folders beside this file: a tiny random checkpoint of each architecture and what transformers
computes for it. Run by hand, with torch, transformers (5.x) and compressed-tensors installed::

    PYTHONPATH=python python tests/data/arch_fixtures/make.py

The tests read the folders and need none of them. Each has a model as it is published and ``expected.kdtr``:
tokens (bytes of a real text, modulo the vocabulary), logits at some positions and the best token at all of
them, and what the last layer caches there, as transformers lays it out. The contexts are longer than the
original ones; what the models are sensitive to says tests/checkpoints/reference_models.py.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kdtree_engine import kdtr

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "checkpoints"))
import reference_models as models  # noqa: E402

VOCAB, POSITIONS_APART = 128, 8
TINY: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
TOKENS = [token % VOCAB for token in models.TOKENS[:288]]
PLACEHOLDER = 127


def expected(model: Any) -> dict[str, np.ndarray]:
    logits, cached = models.reference(model, TOKENS)
    at = np.arange(POSITIONS_APART - 1, len(TOKENS), POSITIONS_APART)
    latent, rope = cached[-1]
    return {
        "tokens": np.array(TOKENS, np.int32),
        "positions": at.astype(np.int32),
        "logits": logits[at],
        "argmax": logits.argmax(-1).astype(np.int32),
        "latent": latent[at],
        "rope": rope[at],
    }


def saved(kind: str, seed: int, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any], Path]:
    """Tensors and config of a bf16 model that transformers saved, and where."""
    folder = Path(tempfile.mkdtemp())
    model = models.text_model(kind, seed, **TINY, **changes)
    model.to(torch.bfloat16).save_pretrained(folder)
    return *models.published(folder), folder


def finish(name: str, tensors: dict[str, torch.Tensor], config: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    assert PLACEHOLDER not in TOKENS
    shutil.rmtree(HERE / name, ignore_errors=True)
    models.write(HERE / name, tensors, config)
    kdtr.write(HERE / name / "expected.kdtr", arrays)
    size = sum(f.stat().st_size for f in (HERE / name).iterdir())
    print(f"{name}: {size} bytes, largest logit {np.abs(arrays['logits']).max():.3f}")


def plain(name: str, kind: str, seed: int) -> None:
    tensors, config, folder = saved(kind, seed)
    finish(name, tensors, config, expected(models.load_reference(folder)))


def kimi_k25() -> None:
    """INT4 experts packed by compressed-tensors, 32-bit sizes as in the released files; both rounding rules."""
    tensors, config, folder = saved("v3", 12)
    packed = models.packed_experts(tensors)
    packed = {n: t.to(torch.int32) if n.endswith("weight_shape") else t for n, t in packed.items()}
    made = {}
    for rule in ("exact", "bf16"):
        experts = models.unpacked_experts(packed, exact=rule == "exact")
        made[rule] = expected(models.load_reference(models.write(folder / rule, experts, config)))
    arrays = made["exact"] | {"bf16.logits": made["bf16"]["logits"]}
    text = models.kimi_k2_config(config) | {"quantization_config": models.int4_scheme()[2]}
    outer = models.kimi_k25_config(text) | {"media_placeholder_token_id": PLACEHOLDER}
    finish("kimi_k25", models.wrapped(packed), outer, arrays)


def deepseek_v3_fp8() -> None:
    """Blocks of 128 that are cut off: hidden 160."""
    tensors, config, folder = saved("v3", 13, hidden_size=160, moe_intermediate_size=40, intermediate_size=136)
    codes = models.fp8_matrices(tensors)
    reference = models.load_reference(models.write(folder / "plain", models.plain_fp8(codes), config))
    finish("deepseek_v3_fp8", codes, config | {"quantization_config": models.FP8}, expected(reference))


def main() -> None:
    plain("deepseek_v2", "v2", 10)
    plain("glm4_moe_lite", "glm", 11)
    kimi_k25()
    deepseek_v3_fp8()
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
