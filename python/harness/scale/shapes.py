"""The numbers of a model that decide its bytes: built-in shapes, and config.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.scale.values import ScaleError

GROUP = 32  # INT4 group size along the input dimension
ExpertFormat = Literal["int4", "bf16"]


@dataclass(frozen=True)
class Vision:
    """A vision tower of K2.5's kind (MoonViT: biased linears and norms) and its patch-merging projector.

    width, layers, intermediate of the tower; patch side in pixels; positions of the learned embedding; merged patches
    per projected token; hidden size of the text model.
    """

    width: int
    layers: int
    intermediate: int
    patch: int
    positions: int
    merge: int
    text_hidden: int


@dataclass(frozen=True)
class Shape:
    """An MLA + MoE model.

    q_lora 0: queries straight from q_proj. `shared`: shared experts, stored as one MLP of shared * moe_inter. `bias`:
    the router has a float32 correction bias per expert. `experts_stored`: format of the routed experts' weights.
    """

    name: str
    hidden: int
    layers: int
    dense_layers: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    dense_inter: int
    moe_inter: int
    experts: int
    top_k: int
    shared: int
    vocab: int
    bias: bool = True
    experts_stored: ExpertFormat = "int4"
    vision: Vision | None = None

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def with_experts(self, stored: ExpertFormat) -> Shape:
        """The same model with its routed experts in another format."""
        return replace(self, experts_stored=stored)


def _deepseek(name: str, **numbers: Any) -> Shape:
    common = {"kv_lora": 512, "nope": 128, "rope": 64, "v": 128}
    return Shape(name=name, **(common | numbers))


K26 = _deepseek(
    "k2.6",
    hidden=7168,
    layers=61,
    dense_layers=1,
    heads=64,
    q_lora=1536,
    dense_inter=18432,
    moe_inter=2048,
    experts=384,
    top_k=8,
    shared=1,
    vocab=163840,
    vision=Vision(width=1152, layers=27, intermediate=4304, patch=14, positions=64 * 64, merge=4, text_hidden=7168),
)
V3 = _deepseek(
    "v3",
    hidden=7168,
    layers=61,
    dense_layers=3,
    heads=128,
    q_lora=1536,
    dense_inter=18432,
    moe_inter=2048,
    experts=256,
    top_k=8,
    shared=1,
    vocab=129280,
)
MOONLIGHT = _deepseek(
    "moonlight",
    hidden=2048,
    layers=27,
    dense_layers=1,
    heads=16,
    q_lora=0,
    dense_inter=11264,
    moe_inter=1408,
    experts=64,
    top_k=6,
    shared=2,
    vocab=163840,
)
V2_LITE = _deepseek(
    "v2-lite",
    hidden=2048,
    layers=27,
    dense_layers=1,
    heads=16,
    q_lora=0,
    dense_inter=10944,
    moe_inter=1408,
    experts=64,
    top_k=6,
    shared=2,
    vocab=102400,
    bias=False,
)
GLM_47_FLASH = Shape(
    name="glm-4.7-flash",
    hidden=2048,
    layers=47,
    dense_layers=1,
    heads=20,
    q_lora=768,
    kv_lora=512,
    nope=192,
    rope=64,
    v=256,
    dense_inter=10240,
    moe_inter=1536,
    experts=64,
    top_k=4,
    shared=1,
    vocab=154880,
)
SHAPES: Mapping[str, Shape] = {s.name: s for s in (K26, V3, MOONLIGHT, V2_LITE, GLM_47_FLASH)}

_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "v": "v_head_dim",
    "dense_inter": "intermediate_size",
    "moe_inter": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "vocab": "vocab_size",
}
_MAY_BE_NULL = frozenset({"q_lora", "shared"})  # null: no such part


def load(path: Path) -> Shape:
    """Shape of a config.json, or of the folder that holds one. The numbers of `text_config` where there is one.

    Routed experts count as INT4 where quantization_config (at either level) says 4 bits in groups of 32, as bf16 where
    there is none; every other quantisation is refused. Raises ScaleError that names the file and the field.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        outer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ScaleError(f"{file}: no readable JSON ({error})") from error
    if not isinstance(outer, dict):
        raise ScaleError(f"{file}: expected a JSON object, got {type(outer).__name__}")
    fields = outer.get("text_config", outer)
    if not isinstance(fields, dict):
        raise ScaleError(f"{file}: text_config is {type(fields).__name__}, expected an object")
    numbers = {ours: _integer(file, fields, theirs, ours in _MAY_BE_NULL) for ours, theirs in _KEYS.items()}
    name = file.parent.name if file.name == "config.json" else file.stem
    shape = Shape(
        name=name or "config",
        dense_layers=_dense_layers(file, fields, numbers["layers"]),
        bias=fields.get("topk_method", "noaux_tc") == "noaux_tc",
        experts_stored=_expert_format(file, outer, fields),
        vision=None,
        **numbers,
    )
    if shape.top_k > shape.experts:
        raise ScaleError(f"{file}: num_experts_per_tok {shape.top_k} is more than n_routed_experts {shape.experts}")
    return shape


def _integer(file: Path, fields: Mapping[str, Any], key: str, nullable: bool) -> int:
    value = fields.get(key)
    if nullable and value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < (0 if nullable else 1):
        raise ScaleError(f"{file}: {key} is {value!r}, expected a positive integer")
    return value


def _dense_layers(file: Path, fields: Mapping[str, Any], layers: int) -> int:
    kinds = fields.get("mlp_layer_types")  # glm4_moe_lite says it layer by layer
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ScaleError(f"{file}: mlp_layer_types has {len(kinds)} entries, num_hidden_layers is {layers}")
        return sum(kind == "dense" for kind in kinds)
    dense = _integer(file, fields, "first_k_dense_replace", nullable=True)
    if dense > layers:
        raise ScaleError(f"{file}: first_k_dense_replace {dense} is more than num_hidden_layers {layers}")
    return dense


def _expert_format(file: Path, *levels: Mapping[str, Any]) -> ExpertFormat:
    blocks = [level["quantization_config"] for level in levels if level.get("quantization_config")]
    if not blocks:
        return "bf16"
    try:
        weights = [group["weights"] for group in blocks[0]["config_groups"].values()]
        found = {(w["num_bits"], w["type"], w["group_size"], w["symmetric"]) for w in weights}
    except (AttributeError, KeyError, TypeError) as error:
        method = blocks[0].get("quant_method") if isinstance(blocks[0], dict) else blocks[0]
        raise ScaleError(f"{file}: quantization_config {method!r} is no compressed-tensors group scheme") from error
    if found != {(4, "int", GROUP, True)}:
        raise ScaleError(
            f"{file}: quantization_config is {found}, expected symmetric 4-bit integers in groups of {GROUP}"
        )
    return "int4"


def resolve(model: str) -> Shape:
    """A built-in name, else a path. Raises ScaleError where it is neither."""
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model)
    if path.exists():
        return load(path)
    raise ScaleError(f"no model {model!r}: built in are {', '.join(SHAPES)}; or give a config.json")
