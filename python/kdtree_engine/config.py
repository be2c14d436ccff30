"""config.json of a Hugging Face checkpoint -> the fields of cpp/model/config.h.

Members of one model family differ in numbers that look like details (rms_norm_eps 1e-6 or 1e-5, YaRN
beta_fast 1 or 32, factor 32 or 64), and a wrong one gives fluent but wrong text. So every number is read
from the file and none has a default; a field that this module does not know is an error, because it may
change the maths; and a field that contradicts what the engine computes is an error that names it. What a
``model_type`` implies without saying it in its config stands in one table, config_architectures.py.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from .config_architectures import ARCHITECTURES, CLASSES, IGNORABLE, WRAPPERS, Architecture, Wrapper
from .config_quantization import Quantization, parse_quantization
from .errors import fail

__all__ = [
    "DEFAULT_LATENT_NORM_EPS",
    "FIELDS",
    "LFS_POINTER",
    "ModelConfig",
    "check_eos",
    "load_json",
    "parse_config",
    "parse_eos",
    "parse_json",
    "read_regular",
    "real_number",
]

DEFAULT_LATENT_NORM_EPS = 1e-6
"""eps of q_a_layernorm and kv_a_layernorm. No config states it: the reference implementation uses its norm
class's default of 1e-6 whatever ``rms_norm_eps`` says, some other engines use ``rms_norm_eps``."""

_MOST_EPS = 0.01  # models have 1e-6 to 1e-5; from here on the norms would no longer be norms
LFS_POINTER = b"version https://git-lfs"
_MAX_JSON = 1 << 28  # an index of 200,000 tensors has 20 MB

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
    "max_position_embeddings",
)
_ROUTING = ("first_k_dense_replace", "n_group", "topk_group")  # integers that some architectures spell otherwise
_INTEGERS_OR_NULL = ("q_lora_rank", "n_routed_experts", "n_shared_experts")  # null: no such part, stored as 0
_REALS = ("routed_scaling_factor", "rms_norm_eps")
_FLAGS = ("norm_topk_prob",)
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

FIELDS = (
    *_INTEGERS,
    *_ROUTING,
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

@dataclass(frozen=True)
class ModelConfig:
    """A model as the engine sees it.

    ``fields`` holds exactly FIELDS, as floats; ``tie_word_embeddings``: the head is the embedding matrix and
    the checkpoint stores it once; ``eos_token_ids``: what config.json says about the end of a text;
    ``quantization``: how the checkpoint's quantised tensors are stored, None where it has none;
    ``extra_layers``: layers behind the last one that predict further tokens (MTP); they are not loaded;
    ``placeholders``: ids of tokens that stand for images or video, which no prompt may hold; ``skipped``:
    prefixes of the tensors of a multimodal model's other parts.
    """

    fields: Mapping[str, float]
    model_type: str = ""
    tie_word_embeddings: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    quantization: Quantization | None = None
    extra_layers: int = 0
    placeholders: frozenset[int] = frozenset()
    skipped: tuple[str, ...] = ()

    def __getitem__(self, field: str) -> float:
        return self.fields[field]


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; EngineError as from `parse_json` and `read_regular`."""
    return parse_json(read_regular(path, _MAX_JSON), str(path))


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most`; EngineError ``io`` or ``bad_file``. A pipe would be waited for
    and a device read without end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                fail("bad_file", f"{path} is not a regular file")
            data = file.read(most + 1)
    except OSError as error:
        fail("io", f"cannot read {path}: {error.strerror or error}", error)
    if len(data) > most:
        fail("bad_file", f"{path} has more than {most} bytes, which no file of this kind needs")
    return data


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; EngineError ``bad_file`` for anything else, for a repeated key and for NaN."""

    if data.startswith(LFS_POINTER):
        fail("bad_file", f"{where} is a pointer of Git LFS, not the file itself; expected JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            fail("bad_file", f"{where}: the key {twice!r} appears twice")
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


def check_eos(tokens: Iterable[int], vocab_size: float, where: str) -> None:
    """That the model has these tokens; EngineError ``bad_model``."""
    for token in tokens:
        if token >= vocab_size:
            fail("bad_model", f"{where}: eos_token_id is {token}, but vocab_size is {vocab_size:.0f}")


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
        model_type = self.model_type([*ARCHITECTURES, *WRAPPERS])
        self.check_class(model_type)
        if model_type in WRAPPERS:
            return self.unwrap(WRAPPERS[model_type], model_type, latent_norm_eps)
        architecture = ARCHITECTURES[model_type]
        self.check_only(architecture.only)
        eos = parse_eos(self.left, self.where)
        tied = self.flag("tie_word_embeddings", default=False)
        quantization = self.quantization()
        extra_layers = self.extra_layers()
        fields: dict[str, float] = {key: self.integer(key) for key in _INTEGERS}
        check_eos(eos, fields["vocab_size"], self.where)
        if fields["max_position_embeddings"] < 1:
            self.bad(f"max_position_embeddings is {fields['max_position_embeddings']:.0f}; expected at least 1")
        fields |= {key: self.integer(key, nullable=True) for key in _INTEGERS_OR_NULL}
        fields |= {key: self.real(key) for key in _REALS}
        if fields["rms_norm_eps"] >= _MOST_EPS:
            self.bad(f"rms_norm_eps is {fields['rms_norm_eps']:g}; expected a small number, below {_MOST_EPS}")
        fields |= {key: float(self.flag(key)) for key in _FLAGS}
        fields |= self.dense_layers(architecture, fields["num_hidden_layers"])
        fields |= self.groups(architecture, bool(fields["norm_topk_prob"]))
        fields["scoring"] = float(architecture.scoring)
        fields["latent_norm_eps"] = latent_norm_eps
        fields["rope_interleave"] = float(self.flag("rope_interleave", default=architecture.rope_interleave))
        fields |= self.rope()
        nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
        self.check_derived("num_key_value_heads", fields["num_attention_heads"], "num_attention_heads")
        self.check_derived("head_dim", rope, "qk_rope_head_dim")
        self.check_derived("qk_head_dim", nope + rope, "qk_nope_head_dim + qk_rope_head_dim")
        for key in ("num_local_experts", "num_experts"):
            self.check_derived(key, fields["n_routed_experts"], "n_routed_experts")
        self.finish(IGNORABLE)
        assert set(fields) == set(FIELDS)
        return ModelConfig(fields, model_type, tied, eos, quantization, extra_layers)

    def unwrap(self, wrapper: Wrapper, model_type: str, latent_norm_eps: float) -> ModelConfig:
        """The text part of a multimodal model. What inner and outer object both say must be the same."""
        inner = self.take(wrapper.text)
        if not isinstance(inner, Mapping):
            self.bad(f"{wrapper.text} is {inner!r}; expected an object")
        reader = _Reader(inner, f"{self.where}: {wrapper.text}")
        reader.model_type(wrapper.text_types)
        quantization = self.quantization()
        tied = self.flag("tie_word_embeddings") if "tie_word_embeddings" in self.left else None
        if tied is None and "tie_word_embeddings" not in inner:
            self.bad("the field tie_word_embeddings is missing")
        if tied is not None and inner.get("tie_word_embeddings", tied) is not tied:
            self.bad(f"tie_word_embeddings is {tied}, but {wrapper.text} says {inner['tie_word_embeddings']!r}")
        text = reader.read(latent_norm_eps)
        if None not in (quantization, text.quantization) and quantization != text.quantization:
            self.bad(f"quantization_config contradicts the one in {wrapper.text}")
        found = [key for key in wrapper.placeholder if key in self.left]
        if not found:
            self.bad(f"the field {wrapper.placeholder[0]} is missing")
        placeholders = frozenset(int(self.integer(key)) for key in found)
        eos = parse_eos(self.left, self.where)
        check_eos(eos, text["vocab_size"], self.where)
        self.finish(IGNORABLE | wrapper.ignorable)
        return replace(
            text,
            model_type=model_type,
            tie_word_embeddings=text.tie_word_embeddings if tied is None else tied,
            eos_token_ids=text.eos_token_ids | eos,
            quantization=quantization or text.quantization,
            placeholders=placeholders,
            skipped=wrapper.skipped,
        )

    def model_type(self, known: Collection[str]) -> str:
        value = self.left.get("model_type")
        if not isinstance(value, str) or value not in known:
            if self.left.get("architectures") == ["DFlashDraftModel"]:
                fail("unsupported", f"{self.where} is a DFlash draft model's; --draft-model takes it beside a target")
            fail(
                "unsupported",
                f"{self.where}: model_type {value!r} is not supported; known: {', '.join(known)}",
            )
        return value

    def check_class(self, model_type: str) -> None:
        """`architectures`, where it names one of the classes that are known, against model_type."""
        named = self.left.get("architectures")
        for name in named if isinstance(named, list) else ():
            types = CLASSES.get(name, (model_type,)) if isinstance(name, str) else (model_type,)
            if model_type not in types:
                self.bad(f"architectures names {name}, not of model_type {model_type} but of {' or '.join(types)}")

    def quantization(self) -> Quantization | None:
        value = self.left.pop("quantization_config", None)
        return None if value is None else parse_quantization(value, f"{self.where}: quantization_config")

    def extra_layers(self) -> int:
        """Of multi-token prediction, under its two names. A file may hold so many layers more than the model
        has; without a number, more layers are a model that was cut short."""
        given = {key: self.integer(key, nullable=True) for key in _EXTRA_LAYERS if key in self.left}
        for key, value in given.items():
            if value != (wanted := next(iter(given.values()))) or not 0 <= value <= 64:
                self.bad(f"{key} is {value:.0f}; expected {wanted:.0f}, at most 64")
        return int(next(iter(given.values()), 0))

    def dense_layers(self, architecture: Architecture, layers: float) -> dict[str, float]:
        """first_k_dense_replace, or mlp_layer_types: "dense" so many times, then "sparse"."""
        key = "first_k_dense_replace"
        types = self.left.pop("mlp_layer_types", None) if architecture.dense_layers == "mlp_layer_types" else None
        if types is None:
            return {key: self.integer(key)}
        if not isinstance(types, list):
            self.bad(f"mlp_layer_types is {types!r}; expected a list")
        dense = types.count("dense")
        if len(types) != layers or types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            fail(
                "unsupported",
                f"{self.where}: mlp_layer_types is {_listed(map(repr, types))}; expected {layers:.0f} entries, "
                "'dense' ones first, then 'sparse' ones",
            )
        self.check_derived(key, dense, "the dense entries of mlp_layer_types")
        return {key: float(dense)}

    def groups(self, architecture: Architecture, normalised: bool) -> dict[str, float]:
        """n_group and topk_group. The softmax router names its choice of experts; greedy has no groups."""
        if architecture.router is None:
            return {key: self.integer(key) for key in ("n_group", "topk_group")}
        method = self.take(architecture.router)
        if method not in ("greedy", "group_limited_greedy"):
            fail(
                "unsupported",
                f"{self.where}: {architecture.router} is {method!r}; only 'greedy' and 'group_limited_greedy' "
                "are supported",
            )
        if normalised:
            # The original implementation then leaves the scaling factor out, others the normalisation.
            fail("unsupported", f"{self.where}: norm_topk_prob is true, which implementations read differently")
        if method == "group_limited_greedy":
            return {key: self.integer(key) for key in ("n_group", "topk_group")}
        for key in ("n_group", "topk_group"):
            self.check_derived(key, 1, "a router without groups")
        return {"n_group": 1.0, "topk_group": 1.0}

    def finish(self, ignorable: Collection[str]) -> None:
        unknown = sorted(set(self.left) - set(ignorable))
        if unknown:
            self.bad(f"unknown field {_listed(unknown)}, which may change what the model computes")

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
        return real_number(self.take(key), key, self.where)

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
            scaled = {key: real_number(values.pop(key), f"{spelling}.{key}", self.where) for key in _YARN}
            # At mscale 0 implementations part ways: some take it for "not given" and use 1, some compute
            # with 0.
            if scaled["mscale"] == 0:
                fail("unsupported", f"{where}.mscale is 0, which implementations read in different ways")
        else:
            fail("unsupported", f"{where}: type {kind!r} is not supported; known: default, yarn")
        if values:
            self.bad(f"{spelling} has the unknown field {_listed(sorted(values))}")
        fields = {f"rope_{key}": value for key, value in scaled.items()}
        fields["rope_theta"] = real_number(inner_theta if theta is None else theta, "rope_theta", self.where)
        return fields


def real_number(value: Any, key: str, where: str) -> float:
    """`value` as a finite float; EngineError ``bad_model`` that names `key` in `where` for anything else."""
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
