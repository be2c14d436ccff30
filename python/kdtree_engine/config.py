"""config.json of a Hugging Face checkpoint -> the fields of cpp/model/config.h.

Members of one model family differ in numbers that look like details (rms_norm_eps 1e-6 or 1e-5, YaRN
beta_fast 1 or 32, factor 32 or 64), and a wrong one gives fluent but wrong text. So every number is read
from the file and none has a default; a field that this module does not know is an error, because it may
change the maths; and a field that contradicts what the engine computes is an error that names it. What a
``model_type`` implies without saying it in its config stands in one table, ARCHITECTURES.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import fail

__all__ = [
    "ARCHITECTURES",
    "DEFAULT_LATENT_NORM_EPS",
    "FIELDS",
    "ModelConfig",
    "load_json",
    "parse_config",
    "parse_eos",
    "parse_json",
]

DEFAULT_LATENT_NORM_EPS = 1e-6
"""eps of q_a_layernorm and kv_a_layernorm. No config states it: the reference implementation uses its norm
class's default of 1e-6 whatever ``rms_norm_eps`` says, some other engines use ``rms_norm_eps``."""

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)
_INTEGERS_OR_NULL = ("q_lora_rank", "n_routed_experts", "n_shared_experts")  # null: no such part, stored as 0
_REALS = ("routed_scaling_factor", "rms_norm_eps")
_FLAGS = ("norm_topk_prob",)
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

FIELDS = (
    *_INTEGERS,
    *_INTEGERS_OR_NULL,
    *_REALS,
    *_FLAGS,
    "scoring",
    "latent_norm_eps",
    "rope_theta",
    "rope_interleave",
    *(f"rope_{key}" for key in _YARN),
)
"""Every field of cpp/model/config.h."""

# Fields that do not reach the forward pass of a decoder: bookkeeping, training, dropout (0 at inference),
# token ids (read by `parse_eos`) and the number of multi-token-prediction layers (their weights are not
# loaded).
_IGNORABLE = frozenset(
    {
        "_attn_implementation_autoset",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "ep_size",
        "initializer_range",
        "model_type",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class Architecture:
    """What a ``model_type`` means beyond the numbers in its config."""

    scoring: int  # of cpp/model/config.h: 0 sigmoid with correction bias (noaux_tc), 1 softmax (greedy)
    rope_interleave: bool  # how the stored weights pair the rotated components, where the config does not say
    only: Mapping[str, Any]  # fields that may be present, with the one value that the engine computes


_DEEPSEEK_V3 = Architecture(
    scoring=0,
    rope_interleave=True,
    only={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1,
        "quantization_config": None,
        "sliding_window": None,
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek_v3": _DEEPSEEK_V3,  # DeepSeek V3, V3.1, R1; Moonlight
    "kimi_k2": _DEEPSEEK_V3,  # Kimi K2 and K2-Thinking: the same maths under another name
}


@dataclass(frozen=True)
class ModelConfig:
    """A model as the engine sees it.

    ``fields`` holds exactly FIELDS, as floats; ``tie_word_embeddings``: the head is the embedding matrix and
    the checkpoint stores it once; ``eos_token_ids``: what config.json says about the end of a text.
    """

    fields: Mapping[str, float]
    model_type: str = ""
    tie_word_embeddings: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __getitem__(self, field: str) -> float:
        return self.fields[field]


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; EngineError as from `parse_json`, or ``io``."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        fail("io", f"cannot read {path}: {error.strerror or error}", error)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; EngineError ``bad_file`` for anything else, for a repeated key and for NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                fail("bad_file", f"{where}: the key {key!r} appears twice")
            found[key] = value
        return found

    def refuse(constant: str) -> Any:
        fail("bad_file", f"{where}: {constant} is not a JSON number")

    try:
        value: object = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as error:
        fail("bad_file", f"{where} is not UTF-8 at byte {error.start}", error)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        fail("bad_file", f"{where} is not JSON: {error.msg} at {place}", error)
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of thousands of digits
        fail("bad_file", f"{where} is not usable JSON: {error}", error)
    if not isinstance(value, dict):
        fail("bad_file", f"{where} holds a JSON {type(value).__name__}; expected an object")
    return value


def parse_eos(config: Mapping[str, Any], where: str) -> frozenset[int]:
    """The ids of ``eos_token_id`` (a number, a list or null) in a config.json or generation_config.json."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            fail("bad_model", f"{where}: eos_token_id is {value!r}; expected token ids")
    return frozenset(ids)


def parse_config(
    config: Mapping[str, Any], where: str = "config.json", latent_norm_eps: float = DEFAULT_LATENT_NORM_EPS
) -> ModelConfig:
    """Translate a parsed config.json.

    `where` is what messages call the file. Raises EngineError: ``unsupported`` for a model type, RoPE type,
    quantisation or switch that the engine does not compute, ``bad_model`` for a field that is missing,
    unknown or contradicts another one.
    """
    return _Reader(config, where).read(latent_norm_eps)


class _Reader:
    """Takes fields out of the file's object one by one; what is left at the end is unknown."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.left = dict(config)
        self.where = where

    def read(self, latent_norm_eps: float) -> ModelConfig:
        model_type = self.left.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            fail("unsupported", f"{self.where}: model_type {model_type!r} is not supported; known: {known}")
        architecture = ARCHITECTURES[model_type]
        self.check_only(architecture.only)
        eos = parse_eos(self.left, self.where)
        tied = self.flag("tie_word_embeddings", default=False)
        fields: dict[str, float] = {key: self.integer(key) for key in _INTEGERS}
        fields |= {key: self.integer(key, nullable=True) for key in _INTEGERS_OR_NULL}
        fields |= {key: self.real(key) for key in _REALS}
        fields |= {key: float(self.flag(key)) for key in _FLAGS}
        fields["scoring"] = float(architecture.scoring)
        fields["latent_norm_eps"] = latent_norm_eps
        fields["rope_interleave"] = float(self.flag("rope_interleave", default=architecture.rope_interleave))
        fields |= self.rope()
        nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
        self.check_derived("num_key_value_heads", fields["num_attention_heads"], "num_attention_heads")
        self.check_derived("head_dim", rope, "qk_rope_head_dim")
        self.check_derived("qk_head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
        self.check_derived("num_local_experts", fields["n_routed_experts"], "n_routed_experts")

        unknown = sorted(set(self.left) - _IGNORABLE)
        if unknown:
            self.bad(f"unknown field {_listed(unknown)}, which may change what the model computes")
        assert set(fields) == set(FIELDS)
        return ModelConfig(fields, model_type, tied, eos)

    def bad(self, message: str) -> NoReturn:
        fail("bad_model", f"{self.where}: {message}")

    def take(self, key: str) -> Any:
        if key not in self.left:
            self.bad(f"the field {key} is missing")
        return self.left.pop(key)

    def integer(self, key: str, nullable: bool = False) -> float:
        value = self.take(key)
        if value is None and nullable:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**53:
            self.bad(f"{key} is {value!r}; expected an integer")
        return float(value)

    def real(self, key: str) -> float:
        return _real(self.take(key), key, self.where)

    def flag(self, key: str, default: bool | None = None) -> bool:
        if default is not None and key not in self.left:
            return default
        value = self.take(key)
        if not isinstance(value, bool):
            self.bad(f"{key} is {value!r}; expected true or false")
        return bool(value)

    def check_only(self, only: Mapping[str, Any]) -> None:
        for key, wanted in only.items():
            value = self.left.pop(key, wanted)
            if value == wanted and isinstance(value, bool) == isinstance(wanted, bool):
                continue
            if key == "quantization_config":
                method = value.get("quant_method") if isinstance(value, dict) else value
                fail(
                    "unsupported",
                    f"{self.where}: quantization_config ({method}) is not supported; "
                    "expected weights in bf16, f16 or f32",
                )
            fail("unsupported", f"{self.where}: {key} is {value!r}; only {wanted!r} is supported")

    def check_derived(self, key: str, wanted: float, meaning: str) -> None:
        """A field that repeats what others say: may be absent or null, must not contradict."""
        value = self.left.pop(key, None)
        if value is not None and (isinstance(value, bool) or value != wanted):
            self.bad(f"{key} is {value!r}; expected {wanted:.0f}, the value of {meaning}")

    def rope(self) -> dict[str, float]:
        """rope_theta with rope_scaling {type}, or rope_parameters {rope_type, rope_theta}: one of two
        spellings.

        Equations: YaRN, arXiv 2309.00071; mscale and mscale_all_dim as in DeepSeek-V2, arXiv 2405.04434.
        """
        theta = self.left.pop("rope_theta", None)
        given = {k: self.left.pop(k) for k in ("rope_scaling", "rope_parameters") if k in self.left}
        filled = {k: v for k, v in given.items() if v is not None}
        if len(filled) == 2:
            self.bad("both rope_scaling and rope_parameters are present; expected one of them")
        spelling, values = next(iter(filled.items()), ("rope_scaling", {}))
        if not isinstance(values, dict):
            self.bad(f"{spelling} is {values!r}; expected an object or null")
        values = dict(values)

        inner_theta = values.pop("rope_theta", None)
        if theta is None and inner_theta is None:
            self.bad("the field rope_theta is missing")
        if theta is not None and inner_theta is not None and theta != inner_theta:
            self.bad(f"rope_theta is {theta!r}, but {spelling}.rope_theta is {inner_theta!r}")

        kinds = [values.pop(key) for key in ("rope_type", "type") if key in values] if filled else ["default"]
        if not kinds or kinds[0] != kinds[-1]:
            self.bad(f"{spelling}: expected one type, got {_listed(map(repr, kinds)) or 'none'}")
        kind = kinds[0]
        where = f"{self.where}: {spelling}"
        # Accepted where they state what the engine does anyway.
        for key, neutral in (("partial_rotary_factor", 1), ("truncate", True), ("attention_factor", None)):
            value = values.pop(key, neutral)
            if value != neutral:
                fail("unsupported", f"{where}.{key} is {value!r}; only {neutral!r} is supported")
        if kind == "default":
            scaled = dict.fromkeys(_YARN, 0.0)
        elif kind == "yarn":
            missing = [key for key in _YARN if key not in values]
            if missing:
                self.bad(f"the field {spelling}.{missing[0]} is missing")
            scaled = {key: _real(values.pop(key), f"{spelling}.{key}", self.where) for key in _YARN}
            # At mscale 0 implementations part ways: some take it for "not given" and use 1, some compute
            # with 0.
            if scaled["mscale"] == 0:
                fail("unsupported", f"{where}.mscale is 0, which implementations read in different ways")
        else:
            fail("unsupported", f"{where}: type {kind!r} is not supported; known: default, yarn")
        if values:
            self.bad(f"{spelling} has the unknown field {_listed(sorted(values))}")
        fields = {f"rope_{key}": value for key, value in scaled.items()}
        fields["rope_theta"] = _real(inner_theta if theta is None else theta, "rope_theta", self.where)
        return fields


def _real(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail("bad_model", f"{where}: {key} is {value!r}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        fail("bad_model", f"{where}: {key} is {value!r}; expected a finite number")
    return number


def _listed(names: Iterable[str], most: int = 5) -> str:
    """The first few names, comma-separated, and how many more there are."""
    items = list(names)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
