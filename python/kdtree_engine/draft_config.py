"""config.json of a DFlash draft model -> the numbers of cpp/draft/dflash_config.h.

The published format (arXiv 2602.06036) is read in more than one way where a field has changed its meaning
between lineages. A wrong reading never fails: it looks like a weak drafter. So whatever two loaders read
differently is an error here that names both readings, unless the config itself or the caller decides
(`DraftOptions`). As for targets, no number has a default and an unknown field is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

from .config import load_json, real_number
from .errors import fail

__all__ = ["DraftConfig", "DraftOptions", "default_target_layers", "load_json", "parse_draft_config"]

_INTEGERS = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")

# Bookkeeping, training and token ids; positions past max_position_embeddings only cost acceptance.
_IGNORABLE = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "mask_token",
        "max_position_embeddings",
        "pad_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# What the published architecture knows but the engine does not compute: the one value that changes nothing.
_NEUTRAL: Mapping[str, Any] = {
    "attention_bias": False,
    "final_logit_softcapping": None,
    "fc_layernorm": False,
    "hidden_act": "silu",
    "input_embedding_scale": 1,
    "mlp_bias": False,
    "output_multiplier": 1,
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "query_zero_predicts_next": False,
    "sample_from_anchor": False,
    "shift_label": False,
}
_BLOCK_WIDE = ("bidirectional", "non_causal", "noncausal", "full")


@dataclass(frozen=True)
class DraftOptions:
    """How to read what a draft model's config leaves open, and how to use it; None: the config must say.

    ``block_size``: it counts ``rows`` (the anchor included) or ``drafts``. ``yarn``: the amplitude of cos and
    sin is the ``ratio`` m(mscale) / m(mscale_all_dim), or ``legacy``, m(1), whatever the mscales say.
    ``sliding``: in layers with a sliding window a row of the block sees the rows before it (``causal``) or
    the whole ``block``. ``window``: no layer looks further back than this many positions.
    ``width``: the tree takes only this many likeliest tokens of a position, 1 to 64 (None: 64); with 1 it
    is a chain.
    """

    block_size: Literal["rows", "drafts"] | None = None
    yarn: Literal["ratio", "legacy"] | None = None
    sliding: Literal["causal", "block"] | None = None
    window: int | None = None
    width: int | None = None

    CHOICES: ClassVar[Mapping[str, tuple[str, str]]] = {
        "block_size": ("rows", "drafts"),
        "yarn": ("ratio", "legacy"),
        "sliding": ("causal", "block"),
    }
    NUMBERS: ClassVar[Mapping[str, tuple[int, str]]] = {
        "window": (2**24, "positions"),
        "width": (64, "tokens a position"),  # kMaxTableWidth of cpp/core/limits.h
    }

    def __post_init__(self) -> None:
        for key, choices in self.CHOICES.items():
            value = getattr(self, key)
            if value is not None and value not in choices:
                fail("invalid_argument", f"the draft option {key} is {value!r}; expected {' or '.join(choices)}")
        for key, (most, unit) in self.NUMBERS.items():
            n = getattr(self, key)
            if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most):
                fail("invalid_argument", f"the draft option {key} is {n!r}; expected 1 to {most} {unit}")

    @classmethod
    def parse(cls, pairs: Mapping[str, str]) -> DraftOptions:
        """From texts, as a command line has them. Raises EngineError ``invalid_argument``."""
        known = (*cls.CHOICES, *cls.NUMBERS)
        for key in pairs:
            if key not in known:
                fail("invalid_argument", f"the draft option {key!r} is not known; known: {', '.join(known)}")
        values: dict[str, Any] = dict(pairs)
        for key in cls.NUMBERS:
            if key in values:
                if not values[key].isdecimal():
                    fail("invalid_argument", f"the draft option {key} is {values[key]!r}; expected a number")
                values[key] = int(values[key])
        return cls(**values)


@dataclass(frozen=True)
class DraftConfig:
    """A draft model as the engine sees it.

    ``fields``: the scalars of cpp/draft/dflash_config.h. ``target_layers``: taps are the residual stream
    after these layers of the target, counted from 0, in the order in which ``fc`` takes them. ``window`` and
    ``causal``: one number per draft layer. ``num_target_layers``: the target's layers, None where the config
    does not say.
    """

    fields: Mapping[str, float]
    target_layers: list[int]
    window: list[int]
    causal: list[int]
    num_target_layers: int | None


def default_target_layers(target_layers: int, draft_layers: int) -> list[int]:
    """The layers that a config without ``target_layer_ids`` taps: evenly spaced from 1 to `target_layers` - 3,
    as many as the draft model has layers; one layer taps the middle."""
    if draft_layers == 1:
        return [target_layers // 2]
    span = target_layers - 4
    return [round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers)]


def parse_draft_config(
    config: Mapping[str, Any], where: str = "config.json", options: DraftOptions | None = None
) -> DraftConfig:
    """Translate a parsed config.json of a DFlash draft model.

    Raises EngineError: ``unsupported`` for another architecture or a switch that the engine does not compute,
    ``bad_model`` for a field that is missing, unknown, contradicts another, or can be read in two ways and
    neither the config nor `options` decides.
    """
    return _Reader(config, where, options or DraftOptions()).read()


class _Reader:
    """Takes fields out of the file's object one by one; what is left at the end is unknown."""

    def __init__(self, config: Mapping[str, Any], where: str, options: DraftOptions) -> None:
        self.left = dict(config)
        self.where = where
        self.options = options
        inner = self.left.pop("dflash_config", None)
        if inner is not None and not isinstance(inner, dict):
            self.bad(f"dflash_config is {inner!r}; expected an object")
        # One name space: both places occur, and a field that stands in both must not contradict itself.
        for key, value in (inner or {}).items():
            outer = self.left.get(key)
            if value is not None and outer not in (None, value):
                self.bad(f"{key} is {outer!r}, but dflash_config.{key} is {value!r}")
            self.left[key] = outer if value is None else value

    def read(self) -> DraftConfig:
        self.check_architecture()
        for key, neutral in _NEUTRAL.items():
            value = self.left.pop(key, neutral)
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                fail("unsupported", f"{self.where}: {key} is {value!r}; only {neutral!r} is supported")
        fields: dict[str, float] = {key: self.integer(key) for key in _INTEGERS}
        layers = int(fields["num_hidden_layers"])
        fields["rms_norm_eps"] = real_number(self.take("rms_norm_eps"), "rms_norm_eps", self.where)
        fields |= self.rope()
        fields["block_rows"] = self.block_rows()
        fields["mask_token_id"] = self.integer("mask_token_id")
        for key, same in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
            value = self.left.pop(key, None)
            if value is not None and value != fields[same]:
                fail("unsupported", f"{self.where}: {key} is {value!r}; only {same} ({fields[same]:.0f}) is supported")
        targets, taps = self.taps(layers)
        window, causal = self.attention(layers)

        unknown = sorted(set(self.left) - _IGNORABLE)
        if unknown:
            self.bad(f"unknown field {', '.join(unknown[:5])}, which may change what the draft model computes")
        return DraftConfig(fields, taps, window, causal, targets)

    def bad(self, message: str) -> NoReturn:
        fail("bad_model", f"{self.where}: {message}")

    def open_question(self, what: str, option: str, field: str) -> NoReturn:
        first, second = (f"{option}={choice}" for choice in DraftOptions.CHOICES[option])
        self.bad(f"{what}; decide with the draft option {first} or {second}, or in the config with {field}")

    def take(self, key: str) -> Any:
        if key not in self.left:
            self.bad(f"the field {key} is missing")
        return self.left.pop(key)

    def integer(self, key: str) -> int:
        return self.whole(key, self.take(key))

    def whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**53:
            self.bad(f"{key} is {value!r}; expected an integer")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.left.pop(key, None)
        if value is not None and not isinstance(value, bool):
            self.bad(f"{key} is {value!r}; expected true or false")
        return value

    def check_architecture(self) -> None:
        names = self.left.pop("architectures", None)
        if names != ["DFlashDraftModel"]:
            fail("unsupported", f"{self.where}: architectures is {names!r}; only ['DFlashDraftModel'] is supported")
        kind = self.left.pop("model_type", None)
        if kind not in ("qwen3", "dflash"):
            fail("unsupported", f"{self.where}: model_type is {kind!r}; known for draft models: qwen3, dflash")

    def block_rows(self) -> int:
        """Rows of a block: the anchor, which holds the last token, and one row a draft."""
        size = self.integer("block_size")
        counts = self.left.pop("block_size_counts", None)
        if counts not in (None, "rows", "drafts"):
            self.bad(f"block_size_counts is {counts!r}; expected 'rows' or 'drafts'")
        drafts = self.left.pop("num_speculative_tokens", None)
        if drafts is not None:
            drafts = self.whole("num_speculative_tokens", drafts)
            if drafts not in (size - 1, size):
                self.bad(f"num_speculative_tokens is {drafts}, but block_size is {size}; expected {size - 1} or {size}")
            said = "rows" if drafts == size - 1 else "drafts"
            if counts not in (None, said):
                self.bad(f"block_size_counts is {counts!r}, but num_speculative_tokens says {said!r}")
            counts = said
        counts = self.options.block_size or counts
        if counts is None:
            self.open_question(
                f"block_size {size} may count the rows of a block (the anchor and {size - 1} drafts) "
                f"or its drafts ({size} behind the anchor)",
                "block_size",
                "dflash_config.block_size_counts",
            )
        return size if counts == "rows" else size + 1

    def taps(self, layers: int) -> tuple[int | None, list[int]]:
        """num_target_layers counts the target's layers, or the taps where target_num_hidden_layers is there."""
        total = self.left.pop("target_num_hidden_layers", None)
        count = self.left.pop("num_target_layers", None)
        ids = self.left.pop("target_layer_ids", None)
        targets = None if total is None else self.whole("target_num_hidden_layers", total)
        if count is not None:
            count = self.whole("num_target_layers", count)
            if targets is None:
                targets = count
        if ids is None:
            if targets is None:
                self.bad("target_layer_ids is missing, and num_target_layers too")
            return targets, default_target_layers(targets, layers)
        if not isinstance(ids, list) or not ids:
            self.bad(f"target_layer_ids is {ids!r}; expected a list of layers")
        ids = [self.whole("target_layer_ids", i) for i in ids]
        if count is not None and count not in (targets, len(ids)):
            self.bad(f"num_target_layers is {count}; expected {targets} layers or {len(ids)} taps")
        return targets, ids

    def attention(self, layers: int) -> tuple[list[int], list[int]]:
        """Window (0: none) and causality of each layer."""
        types = self.left.pop("layer_types", None)
        window = self.left.pop("sliding_window", None)
        uses = self.flag("use_sliding_window")
        full_until = self.left.pop("max_window_layers", None)
        use_swa, swa = self.flag("use_swa"), self.left.pop("swa_window_size", None)
        if use_swa:
            if swa is None or window not in (None, swa):
                self.bad(f"use_swa is true with swa_window_size {swa!r} and sliding_window {window!r}")
            window = swa
        if types is None:
            if use_swa:
                sliding = [True] * layers
            elif uses:
                first = self.whole("max_window_layers", full_until)
                sliding = [i >= first for i in range(layers)]
            elif window is not None and uses is None:
                self.bad(f"sliding_window is {window!r}, but neither layer_types nor use_sliding_window says where")
            else:
                sliding = [False] * layers
        else:
            kinds = ("full_attention", "sliding_attention")
            if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
                self.bad(f"layer_types is {types!r}; expected {layers} of {' and '.join(kinds)}")
            sliding = [t == "sliding_attention" for t in types]
            if any(sliding) and uses is False:
                self.bad("layer_types has sliding_attention, but use_sliding_window is false")
        if any(sliding) and self.whole("sliding_window", window) < 1:
            self.bad(f"sliding_window is {window}; expected at least 1")

        limit = self.options.window
        windows = [int(window) if s else 0 for s in sliding]
        if limit is not None:
            windows = [min(w, limit) if w else limit for w in windows]
        stated = self.causality()
        if stated is None and any(sliding):
            choice = self.options.sliding
            if choice is None:
                self.open_question(
                    "in its layers with a sliding window a row of the block may see the rows before it only "
                    "(newer loaders) or the whole block (older ones)",
                    "sliding",
                    "is_causal",
                )
            return windows, [int(s and choice == "causal") for s in sliding]
        return windows, [int(bool(stated))] * layers

    def causality(self) -> bool | None:
        """What the config says of all layers, None for nothing."""
        said = {key: self.flag(key) for key in ("is_causal", "causal")}
        mode = self.left.pop("attention_mode", None)
        if mode is not None:
            if mode != "causal" and mode not in _BLOCK_WIDE:
                known = ", ".join(("causal", *_BLOCK_WIDE))
                fail("unsupported", f"{self.where}: attention_mode is {mode!r}; known: {known}")
            said["attention_mode"] = mode == "causal"
        values = {value for value in said.values() if value is not None}
        if len(values) > 1:
            self.bad(f"{' and '.join(k for k, v in said.items() if v is not None)} contradict each other")
        return values.pop() if values else None

    def rope(self) -> dict[str, float]:
        """rope_theta with rope_scaling, or rope_parameters. YaRN: arXiv 2309.00071."""
        theta = self.left.pop("rope_theta", None)
        given = {k: self.left.pop(k) for k in ("rope_scaling", "rope_parameters") if k in self.left}
        filled = {k: v for k, v in given.items() if v is not None}
        if len(filled) == 2:
            self.bad("both rope_scaling and rope_parameters are present; expected one of them")
        spelling, values = next(iter(filled.items()), ("rope_scaling", {}))
        if not isinstance(values, dict):
            self.bad(f"{spelling} is {values!r}; expected an object or null")
        values = dict(values)
        inner = values.pop("rope_theta", None)
        if theta is None and inner is None:
            self.bad("the field rope_theta is missing")
        if theta is not None and inner is not None and theta != inner:
            self.bad(f"rope_theta is {theta!r}, but {spelling}.rope_theta is {inner!r}")
        kinds = [values.pop(key) for key in ("rope_type", "type") if key in values] if filled else ["default"]
        if not kinds or kinds[0] != kinds[-1]:
            self.bad(f"{spelling}: expected one type, got {kinds or 'none'}")
        where = f"{self.where}: {spelling}"
        for key, neutral in (("partial_rotary_factor", 1), ("truncate", True)):
            value = values.pop(key, neutral)
            if value != neutral:
                fail("unsupported", f"{where}.{key} is {value!r}; only {neutral!r} is supported")
        if kinds[0] == "default":
            scaled = dict.fromkeys(_YARN, 0.0)
            amplitude = 1.0
        elif kinds[0] in ("yarn", "deepseek_yarn"):
            missing = [key for key in _YARN if key not in values]
            if missing:
                self.bad(f"the field {spelling}.{missing[0]} is missing")
            scaled = {key: real_number(values.pop(key), f"{spelling}.{key}", self.where) for key in _YARN}
            amplitude = self.amplitude(kinds[0], scaled["factor"], values, spelling)
        else:
            fail("unsupported", f"{where}: type {kinds[0]!r} is not supported; known: default, yarn, deepseek_yarn")
        if values:
            self.bad(f"{spelling} has the unknown field {', '.join(sorted(values))}")
        fields = {f"rope_{key}": value for key, value in scaled.items()}
        fields["rope_theta"] = real_number(inner if theta is None else theta, "rope_theta", self.where)
        fields["rope_amplitude"] = amplitude
        return fields

    def amplitude(self, kind: str, factor: float, values: dict[str, Any], spelling: str) -> float:
        """Of cos and sin. With both mscales, older loaders of type yarn take m(1) all the same."""
        given = {
            key: real_number(value, f"{spelling}.{key}", self.where)
            for key in ("mscale", "mscale_all_dim", "attention_factor")
            if (value := values.pop(key, None)) is not None
        }

        def magnitude(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

        legacy = magnitude(1.0)
        mscale, all_dim = given.get("mscale", 0.0), given.get("mscale_all_dim", 0.0)
        ratio = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else None
        if self.options.yarn == "ratio" and ratio is None:
            self.bad(f"the draft option yarn=ratio needs {spelling}.mscale and {spelling}.mscale_all_dim")
        if self.options.yarn is not None:
            return legacy if self.options.yarn == "legacy" or ratio is None else ratio
        if "attention_factor" in given:
            return given["attention_factor"]
        if kind == "deepseek_yarn":
            if ratio is None:
                self.bad(f"{spelling} of type deepseek_yarn needs mscale and mscale_all_dim")
            return ratio
        if ratio is not None and ratio != legacy:
            self.open_question(
                f"the amplitude of {spelling} may be {ratio:.4g}, the ratio of its mscales, or {legacy:.4g}, "
                "which loaders that ignore them use",
                "yarn",
                f"{spelling}.attention_factor",
            )
        return legacy
