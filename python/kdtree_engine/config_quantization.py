"""quantization_config of a checkpoint -> what its quantised tensors are, or a refusal that names the field.

Two ways of storing weights in fewer bits are read: compressed-tensors ``pack-quantized`` INT4 in symmetric
groups of 32 (the released Kimi K2-Thinking, K2.5 and K2.6) and fp8 e4m3 in blocks of 128 x 128 (DeepSeek
V3, R1, V3.1; Kimi K2). "4 bit, group 32" alone says too little: MXFP4 and NVFP4 are 4 bit too, and take
other values. So every field that says what the bits mean is read, and none is defaulted.

Which tensors are quantised is decided by the tensors in the files; ``ignore`` and ``targets`` only have to
agree with them (`Quantization.names`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NoReturn

from .errors import fail

__all__ = ["BLOCK", "GROUP", "Quantization", "parse_quantization"]

GROUP = 32
"""Inputs that share one scale in INT4."""

BLOCK = 128
"""Rows and columns of the blocks that share one scale in fp8."""

_LIVE = re.compile(r"\*|\+|\{")  # quantifiers without a bound, or with one that may be large
_NESTED = re.compile(r"\)\s*[*+{?]|[*+}?]\s*[*+{]|\\[0-9]|\(\?[^:]")
_MOST_LIVE, _LONGEST = 3, 256


@dataclass(frozen=True)
class Quantization:
    """``kind``; for INT4 the modules that the config says are quantised: those that `targets` name and
    `ignore` does not (compressed-tensors' rules: ``re:`` anchors at the start, anything else must equal the
    module's name or its class). ``powers_of_two``: for fp8, whether it says that scales are such, so that
    products are bf16 numbers."""

    kind: Literal["int4", "fp8"]
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    powers_of_two: bool = False

    def names(self, *module: str) -> bool:
        """Whether the config says that a linear layer is quantised; `module` are the names that it goes by
        (as stored, and without the prefix of a multimodal wrapper)."""
        if self.kind != "int4" or any(_matches(self._ignored, name) for name in module):
            return False
        return "Linear" in self.targets or any(_matches(self._targeted, name) for name in module)

    @cached_property
    def _ignored(self) -> _Patterns:
        return _compile(self.ignore)

    @cached_property
    def _targeted(self) -> _Patterns:
        return _compile(self.targets)


_Patterns = tuple[frozenset[str], tuple[re.Pattern[str], ...]]


def _compile(patterns: Iterable[str]) -> _Patterns:
    expressions = tuple(re.compile(p.removeprefix("re:")) for p in patterns if p.startswith("re:"))
    return frozenset(p for p in patterns if not p.startswith("re:")), expressions


def _matches(patterns: _Patterns, name: str) -> bool:
    exact, expressions = patterns
    return name in exact or any(e.match(name) for e in expressions)


def parse_quantization(value: Any, where: str) -> Quantization:
    """`value` is a quantization_config. Raises EngineError: ``unsupported`` for a method, format or width that
    the engine does not read, ``bad_model`` for a field that is missing, unknown or of the wrong kind."""
    if not isinstance(value, Mapping):
        fail("bad_model", f"{where} is {value!r}; expected an object or null")
    method = value.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(_Fields(value, where))
    if method == "fp8":
        return _fp8(_Fields(value, where))
    fail(
        "unsupported",
        f"{where}: quant_method {method!r} is not supported; expected compressed-tensors (pack-quantized INT4) "
        "or fp8 (128 x 128 blocks)",
    )


class _Fields:
    """An object whose fields are taken one by one; what is left is unknown."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, Mapping):
            fail("bad_model", f"{where} is {fields!r}; expected an object")
        self.left = dict(fields)
        self.where = where

    def take(self, key: str) -> Any:
        if key not in self.left:
            self.bad(f"the field {key} is missing")
        return self.left.pop(key)

    def inner(self, key: str) -> _Fields:
        return _Fields(self.take(key), f"{self.where}.{key}")

    def only(self, key: str, *allowed: Any, default: Any = ...) -> Any:
        """The value of `key`, which must be one of `allowed`; missing only where there is a `default`."""
        value = self.left.pop(key, default) if default is not ... else self.take(key)
        if any(type(value) is type(a) and value == a for a in allowed):
            return value
        wanted = " or ".join(_json(a) for a in allowed)
        fail("unsupported", f"{self.where}: {key} is {_json(value)}; only {wanted} is supported")

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.take(key)
        if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
            self.bad(f"{key} is {value!r}; expected a list of strings")
        for pattern in value:
            self.check_pattern(key, pattern)
        return tuple(value)

    def check_pattern(self, key: str, pattern: str) -> None:
        """Patterns come from the file: one that could take exponential time is no pattern for us."""
        if not pattern.startswith("re:"):
            return
        body = re.sub(r"\\[^0-9]", "x", pattern)
        if len(pattern) > _LONGEST or len(_LIVE.findall(body)) > _MOST_LIVE or _NESTED.search(body):
            fail("unsupported", f"{self.where}: {key} holds the pattern {pattern!r}, which is too intricate")
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            self.bad(f"{key} holds the pattern {pattern!r}: {error}")

    def skip(self, *keys: str) -> None:
        """Fields that say nothing about the stored bits."""
        for key in keys:
            self.left.pop(key, None)

    def finish(self) -> None:
        if self.left:
            self.bad(f"unknown field {min(self.left)}, which may change what the weights mean")

    def bad(self, message: str) -> NoReturn:
        fail("bad_model", f"{self.where}: {message}")


def _json(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, "") if _is_word(value) else repr(value)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _compressed_tensors(fields: _Fields) -> Quantization:
    fields.skip("quant_method", "version", "global_compression_ratio")
    fields.only("format", "pack-quantized")
    fields.only("quantization_status", "compressed")
    fields.only("kv_cache_scheme", None, default=None)
    fields.only("sparsity_config", None, {}, default=None)
    fields.only("transform_config", None, {}, default=None)
    fields.only("moe_sparsity_config", None, default=None)
    if fields.left.get("ignore", ...) is None:
        fields.left["ignore"] = []
    ignore = fields.strings("ignore")
    groups = fields.inner("config_groups")
    if not groups.left:
        groups.bad("expected at least one group")
    targets: list[str] = []
    for name in list(groups.left):
        group = groups.inner(name)
        targets += group.strings("targets")
        group.only("input_activations", None)
        group.only("output_activations", None)
        group.only("format", None, "pack-quantized", default=None)
        _int4(group.inner("weights"))
        group.finish()
    fields.finish()
    return Quantization("int4", tuple(targets), ignore)


def _int4(weights: _Fields) -> None:
    weights.only("type", "int")
    weights.only("num_bits", 4)
    weights.only("symmetric", True)
    weights.only("strategy", "group")
    weights.only("group_size", GROUP)
    weights.only("dynamic", False)
    # "static" and "weight" order the columns while quantising and leave the stored order alone.
    weights.only("actorder", None, "static", "weight", default=None)
    weights.only("block_structure", None, default=None)
    # How the scales were found, and types that the tensors state themselves.
    weights.skip("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.finish()


def _fp8(fields: _Fields) -> Quantization:
    """Activations are not quantised here, whatever `activation_scheme` says about other engines; a static one
    comes with tensors of its own, which are then unknown."""
    fields.skip("quant_method", "modules_to_not_convert", "ignored_layers", "dequantize")
    fields.only("fmt", "e4m3", default="e4m3")  # the tensors' own dtype says it again
    fields.only("activation_scheme", "dynamic")
    fields.only("weight_block_size", [BLOCK, BLOCK])
    scales = fields.only("scale_fmt", None, "float", "ue8m0", default=None)
    fields.only("expert_dtype", "fp8", default="fp8")
    fields.only("modules_to_convert", None, [], default=None)
    fields.finish()
    return Quantization("fp8", powers_of_two=scales == "ue8m0")
