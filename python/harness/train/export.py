"""Models of `harness.train` as checkpoint folders, and back.

A target is written as Kimi's released INT4 checkpoints are: ``kimi_k2``, routed experts as compressed-tensors
``pack-quantized`` (words, bf16 scales, shapes), the router's bias in float32, everything else in bf16. A drafter
is written as a published DFlash checkpoint.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from harness.train import tensors
from harness.train.bpe import MASK
from harness.train.drafter_model import Drafter
from harness.train.errors import TrainError
from harness.train.qat import GROUP, codes_and_scales, packed
from harness.train.shapes import DraftShape, TargetShape, draft_config, target_config
from harness.train.target_model import Target

__all__ = ["load_drafter", "load_target", "save_drafter", "save_target", "target_names"]

WEIGHTS = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def target_names(shape: TargetShape) -> dict[str, str]:
    """Checkpoint name (without ``.weight``) of every parameter that is stored as it is, by our name."""
    names = {"embed.weight": "model.embed_tokens", "norm.weight": "model.norm", "head.weight": "lm_head"}
    attention = {
        "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj",
    }  # fmt: skip
    for i in range(shape.num_hidden_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        names[f"{ours}.attention_norm.weight"] = f"{theirs}.input_layernorm"
        names[f"{ours}.mlp_norm.weight"] = f"{theirs}.post_attention_layernorm"
        names |= {f"{ours}.attention.{a}.weight": f"{theirs}.self_attn.{b}" for a, b in attention.items()}
        dense = i < shape.first_k_dense_replace
        for part in ("gate", "up", "down"):
            if dense:
                names[f"{ours}.mlp.{part}.weight"] = f"{theirs}.mlp.{part}_proj"
            else:
                names[f"{ours}.mlp.shared.{part}.weight"] = f"{theirs}.mlp.shared_experts.{part}_proj"
        if not dense:
            names[f"{ours}.mlp.router"] = f"{theirs}.mlp.gate"
    return names


def save_target(model: Target, folder: Path, tokenizer: Path | None = None) -> None:
    """Write config.json, generation_config.json, model.safetensors and, from the folder `tokenizer`, its files."""
    shape = model.shape
    state = model.state_dict()
    out = {f"{theirs}.weight": state[ours].to(torch.bfloat16) for ours, theirs in target_names(shape).items()}
    for i in range(shape.first_k_dense_replace, shape.num_hidden_layers):
        theirs = f"model.layers.{i}.mlp"
        out[f"{theirs}.gate.e_score_correction_bias"] = state[f"layers.{i}.mlp.bias"].float()
        experts = model.layers[i].mlp
        for part in ("gate", "up", "down"):
            weight = getattr(experts, part).detach()
            # A model that was loaded from INT4 holds INT4 values: its codes are those of its own scales.
            codes, scales = codes_and_scales(weight) if experts.quantized else experts.loaded[part]
            words = packed(codes).cpu()
            for e in range(shape.n_routed_experts):
                name = f"{theirs}.experts.{e}.{part}_proj"
                out[f"{name}.weight_packed"] = words[e]
                out[f"{name}.weight_scale"] = scales[e].to(torch.bfloat16)
                out[f"{name}.weight_shape"] = torch.tensor(list(weight[e].shape), dtype=torch.int32)
    folder.mkdir(parents=True, exist_ok=True)
    tensors.write(folder / WEIGHTS, out)
    _json(folder / "config.json", target_config(shape))
    eos = target_config(shape)["eos_token_id"]
    _json(folder / "generation_config.json", {"eos_token_id": eos, "bos_token_id": 0})
    for name in _TOKENIZER:
        if tokenizer is not None and (tokenizer / name).exists() and tokenizer != folder:
            shutil.copyfile(tokenizer / name, folder / name)


def load_target(folder: Path, device: str) -> Target:
    """A target in the form that `save_target` writes, as it will run: the experts are their INT4 values and are not
    quantised anew. Raises TrainError for a folder of another form."""
    shape = read_shape(folder)
    stored = tensors.read(folder / WEIGHTS)
    model = Target(shape)
    state = model.state_dict()
    try:
        for ours, theirs in target_names(shape).items():
            state[ours].copy_(stored[f"{theirs}.weight"].float())
        for i in range(shape.first_k_dense_replace, shape.num_hidden_layers):
            theirs = f"model.layers.{i}.mlp"
            state[f"layers.{i}.mlp.bias"].copy_(stored[f"{theirs}.gate.e_score_correction_bias"])
            experts = model.layers[i].mlp
            experts.quantized, experts.loaded = False, {}
            for part in ("gate", "up", "down"):
                names = [f"{theirs}.experts.{e}.{part}_proj" for e in range(shape.n_routed_experts)]
                words = torch.stack([stored[f"{n}.weight_packed"] for n in names])
                scales = torch.stack([stored[f"{n}.weight_scale"] for n in names]).float()
                shifts = 4 * torch.arange(8, dtype=torch.int32)
                codes = ((words.unsqueeze(-1) >> shifts & 15) - 8).flatten(-2).float()
                value = (codes.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)
                state[f"layers.{i}.mlp.{part}"].copy_(value)
                experts.loaded[part] = codes.to(device), scales.to(device)
    except (KeyError, RuntimeError) as error:
        raise TrainError(f"{folder}: the weights do not fit its config.json: {error}") from error
    model.to(device)
    return model


def read_shape(folder: Path) -> TargetShape:
    """The shape that a config.json states. Raises TrainError where it is not of this package's form."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        rope = config["rope_scaling"]
        renamed = {"original": "original_max_position_embeddings"}
        values = {f.name: config[f.name] for f in fields(TargetShape) if f.name in config}
        values |= {
            key: rope[renamed.get(key, key)] for key in ("factor", "original", "beta_fast", "beta_slow")
        }
        shape = TargetShape(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path} is no config.json of a model that `target` has trained: {error}") from error
    if target_config(shape) != config:
        other = sorted(k for k in {*config, *target_config(shape)} if config.get(k) != target_config(shape).get(k))
        raise TrainError(f"{path}: {other[0]} is {config.get(other[0])!r}, which this package does not train")
    return shape


def save_drafter(model: Drafter, folder: Path, draft: DraftShape, target: TargetShape) -> None:
    """config.json and model.safetensors in bf16 under the published names."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: t.to(torch.bfloat16) for n, t in model.state_dict().items() if n not in ("cos", "sin", "mask")}
    tensors.write(folder / WEIGHTS, state)
    _json(folder / "config.json", draft_config(draft, target))


def load_drafter(folder: Path, target: Target, device: str) -> tuple[Drafter, DraftShape]:
    """A drafter in the form that `save_drafter` writes; the mask's embedding is the one in `target`. Raises TrainError
    for another form, and for the drafter of another target."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        own = config["dflash_config"]
        values = {f.name: config[f.name] for f in fields(DraftShape) if f.name in config}
        values |= {"rows": config["block_size"], "window": config["sliding_window"]}
        shape = DraftShape(**values, taps=tuple(own["target_layer_ids"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path} is no config.json of a drafter that was trained here: {error}") from error
    if draft_config(shape, target.shape) != config:
        raise TrainError(f"{path} is of a drafter for another target, or not of this package's form")
    drafter = Drafter(shape, target.shape)
    stored = {name: tensor.float() for name, tensor in tensors.read(folder / WEIGHTS).items()}
    try:
        drafter.load_state_dict(stored | {"mask": target.embed.weight[MASK].detach().cpu()}, strict=True)
    except RuntimeError as error:
        raise TrainError(f"{folder}: the weights do not fit its config.json: {error}") from error
    drafter.to(device)
    return drafter, shape


def _json(path: Path, value: dict[str, Any]) -> None:
    tensors.write_text(path, json.dumps(value, indent=1) + "\n")


