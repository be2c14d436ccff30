"""The tensors of a Hugging Face folder against the tensors that its config implies, both ways.

Each expected tensor must be there exactly once, in one of the forms that the engine reads, with its shape and
dtype; what nobody expects is an error that names it, because a tensor that is silently left out is a model
that is silently wrong. Names come with or without the prefix of a multimodal wrapper. Forms of a matrix
``X.weight`` [out, in]:

- ``X.weight`` in F32, BF16 or F16;
- ``X.weight_packed`` I32 [out, in / 8], ``X.weight_scale`` BF16 or F32 [out, in / 32], ``X.weight_shape`` (I32
  or I64, [out, in]): INT4 as compressed-tensors packs it;
- ``X.weight`` in F8_E4M3 with ``X.weight_scale_inv`` F32 or BF16 [ceil(out / 128), ceil(in / 128)];
- for routed experts, ``experts.gate_up_proj`` [E, 2I, H] (gate rows first) and ``experts.down_proj`` [E, H, I]
  over all experts of a layer, as transformers 5 saves them with ``save_original_format=False``.

Ignored by name: ``rotary_emb.inv_freq`` (stale buffers that some converters leave behind), the layers of
multi-token prediction (as many behind the last one as the config says) and, in a multimodal model, the other
parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from .checkpoint_stream import Piece
from .config import ModelConfig
from .config_quantization import BLOCK, GROUP
from .errors import fail
from .safetensors_file import TensorEntry

__all__ = ["Item", "Names", "audit", "require_all"]

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_FUSED = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_MTP_MARK = ".eh_proj."  # joins the hidden state and the next token; no other layer has it
_FLOATS = ("F32", "BF16", "F16")
# Spellings of the text model inside a multimodal one, longest first, and what they stand for.
_PREFIXES = (
    ("model.language_model.", "model."),  # transformers 5
    ("language_model.model.", "model."),  # as published
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),  # some exporters
)
_INT4 = ("weight_packed", "weight_scale", "weight_shape")
_REFUSED = {
    "weight_zero_point": "asymmetric INT4 is not supported",
    "weight_g_idx": "INT4 with reordered groups (g_idx) is not supported",
}
# Modules that are no linear layers, so that "Linear" in a quantization_config does not mean them.
_NOT_LINEAR = ("model.embed_tokens", ".mlp.gate")


class Item(NamedTuple):
    """One call of the builder: ``name`` is a full tensor name, of INT4 the module's. ``entry`` and
    ``pieces[0]`` are the main tensor; then come scales and, for INT4, the shape. ``scales``: their dtype."""

    kind: Literal["plain", "int4", "fp8"]
    name: str
    shape: tuple[int, ...]
    entry: TensorEntry
    pieces: tuple[Piece, ...]
    scales: TensorEntry | None = None
    sizes: TensorEntry | None = None


class Names:
    """Stored names -> the engine's own, of one config."""

    def __init__(self, config: ModelConfig) -> None:
        self._skipped = config.skipped
        self._layers = int(config["num_hidden_layers"])
        self._extra = range(self._layers, self._layers + config.extra_layers)
        self._left_out: dict[int, bool] = {}  # layers of multi-token prediction, and whether their mark was there

    def canonical(self, name: str) -> str | None:
        """The engine's name of a stored tensor; None for one that is ignored."""
        if self._skipped and name.startswith(self._skipped):
            return None
        if name.startswith(("language_model.", "model.language_model.")):
            for prefix, plain in _PREFIXES:
                if name.startswith(prefix):
                    name = plain + name[len(prefix) :]
                    break
            if name.startswith("model.blocks."):  # transformers 5 renames these with the vision tower's
                name = "model.layers." + name[len("model.blocks.") :]
        layer = _LAYER.match(name)
        if layer is not None and (number := int(layer[1])) in self._extra:
            self._left_out[number] = self._left_out.get(number, False) or _MTP_MARK in name
            return None
        return None if name.endswith("rotary_emb.inv_freq") else name

    def check_left_out(self, path: Path) -> None:
        """That what was left out as a layer of multi-token prediction is one; else num_hidden_layers is too small.
        To be called when all names have been seen."""
        for number, marked in sorted(self._left_out.items()):
            if not marked:
                fail(
                    "bad_model",
                    f"{path}: num_hidden_layers is {self._layers}, but model.layers.{number} is an ordinary layer: "
                    "one of multi-token prediction has eh_proj",
                )


def require_all(path: Path, wanted: Sequence[str], missing: Sequence[str]) -> None:
    if missing:
        fail(
            "bad_model",
            f"{path}: {len(missing)} of {len(wanted)} tensors are missing, the first is {missing[0]}",
        )


def audit(
    path: Path,
    config: ModelConfig,
    entries: Iterable[tuple[str | None, TensorEntry]],
    expected: Iterable[tuple[str, list[int], bool]],
) -> list[Item]:
    """What to load. `entries`: everything in the files, with the engine's own name of each. `expected` as from
    the native builder: full names, shapes, whether INT4 may stand for them. Raises EngineError naming the
    tensor."""
    return _Audit(path, config, expected).run(entries)


class _Audit:
    def __init__(self, path: Path, config: ModelConfig, expected: Iterable[tuple[str, list[int], bool]]) -> None:
        self.path = path
        self.config = config
        self.wanted: dict[str, tuple[int, ...]] = {}
        self.int4: set[str] = set()
        for name, shape, may_be_int4 in expected:
            self.wanted[name] = tuple(shape)
            if may_be_int4:
                self.int4.add(name)
        self.items: dict[str, Item] = {}  # by full tensor name
        self.parts: dict[str, dict[str, TensorEntry]] = {}  # of quantised modules, by module
        self.unknown: list[TensorEntry] = []

    def run(self, entries: Iterable[tuple[str | None, TensorEntry]]) -> list[Item]:
        for name, entry in entries:
            if name is not None:
                self.sort_in(name, entry)
        for module, parts in self.parts.items():
            self.join(module, parts)
        if self.unknown:
            first, more = self.unknown[0], len(self.unknown) - 1
            tail = f" (and {more} more)" if more else ""
            self.bad(first, f"is not one of this model's{tail}")
        embed = self.items.get("model.embed_tokens.weight")
        if self.config.tie_word_embeddings and embed is not None:
            self.items["lm_head.weight"] = embed._replace(name="lm_head.weight")
        require_all(self.path, list(self.wanted), [name for name in self.wanted if name not in self.items])
        self.check_claims()
        return list(self.items.values())

    def sort_in(self, name: str, entry: TensorEntry) -> None:
        if name in self.wanted:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                fail("bad_model", f"{entry.file.path}: {entry.name} contradicts tie_word_embeddings true")
            if entry.dtype == "F8_E4M3":
                self.collect(name.removesuffix(".weight"), "weight", entry)
                return
            self.check(entry, self.wanted[name], _FLOATS)
            self.put(name, Item("plain", name, entry.shape, entry, (_whole(entry),)))
            return
        module, _, part = name.rpartition(".")
        if f"{module}.weight" in self.wanted:
            if part in _REFUSED:
                fail("unsupported", f"{entry.file.path}: the tensor {entry.name} is there, but {_REFUSED[part]}")
            if part in _INT4 or part == "weight_scale_inv":
                self.collect(module, part, entry)
                return
        if not self.split_fused(name, entry):
            self.unknown.append(entry)

    def collect(self, module: str, part: str, entry: TensorEntry) -> None:
        parts = self.parts.setdefault(module, {})
        if part in parts:
            self.bad(entry, f"is also there as {parts[part].name}")
        parts[part] = entry

    def join(self, module: str, parts: Mapping[str, TensorEntry]) -> None:
        """The parts of a quantised matrix: all of one form, and none of another."""
        name = f"{module}.weight"
        shape = self.wanted[name]
        entry = next(iter(parts.values()))
        fp8 = "weight" in parts or "weight_scale_inv" in parts
        form = ("weight", "weight_scale_inv") if fp8 else _INT4
        for part in parts:
            if part not in form:
                self.bad(parts[part], f"stands beside {entry.name}, which is of another format")
        if name in self.items:
            self.bad(entry, f"stands beside {self.items[name].entry.name}, which is whole without it")
        for part in form:
            if part not in parts:
                full = f"{entry.name.rpartition('.')[0]}.{part}"
                fail("bad_model", f"{entry.file.path}: {entry.name} is there, but {full} is missing")
        kind: Literal["int4", "fp8"] = "fp8" if fp8 else "int4"
        if self.config.quantization is None or self.config.quantization.kind != kind:
            said = "has no quantization_config" if self.config.quantization is None else "says otherwise"
            self.bad(entry, f"is {kind}, but config.json {said}")
        if len(shape) != 2 or (kind == "int4" and name not in self.int4):
            self.bad(entry, "is quantised; this tensor must be in floating point")
        if fp8:
            self.check(parts["weight"], shape, ("F8_E4M3",))
            self.check(parts["weight_scale_inv"], tuple(-(-n // BLOCK) for n in shape), ("F32", "BF16"))
            main, scales = (parts[part] for part in form)
            self.put(name, Item("fp8", name, shape, main, (_whole(main), _whole(scales)), scales))
            return
        if shape[1] % GROUP:
            self.bad(entry, f"has {shape[1]} inputs, which are no multiple of the group size {GROUP}")
        main, scales, sizes = (parts[part] for part in form)
        self.check(main, (shape[0], shape[1] // 8), ("I32",))
        self.check(scales, (shape[0], shape[1] // GROUP), ("BF16", "F32"))
        self.check(sizes, (2,), ("I32", "I64"))
        pieces = (_whole(main), _whole(scales), _whole(sizes))
        self.put(name, Item("int4", module, shape, main, pieces, scales, sizes))

    def split_fused(self, name: str, entry: TensorEntry) -> bool:
        fused = _FUSED.fullmatch(name)
        if fused is None or f"{fused[1]}.0.down_proj.weight" not in self.wanted:
            return False
        experts = int(self.config["n_routed_experts"])
        parts = ("down_proj",) if fused[2] == "down_proj" else ("gate_proj", "up_proj")
        rows, columns = self.wanted[f"{fused[1]}.0.{parts[0]}.weight"]
        self.check(entry, (experts, len(parts) * rows, columns), _FLOATS)
        nbytes = entry.nbytes // (experts * len(parts))
        for i in range(experts * len(parts)):
            full = f"{fused[1]}.{i // len(parts)}.{parts[i % len(parts)]}.weight"
            piece = Piece(entry.file, entry.offset + i * nbytes, nbytes)
            self.put(full, Item("plain", full, (rows, columns), entry, (piece,)))
        return True

    def put(self, name: str, item: Item) -> None:
        if name in self.items:
            other = self.items[name].entry.name
            fail("bad_model", f"{item.entry.file.path}: {item.entry.name} and {other} both hold {name}")
        self.items[name] = item

    def check_claims(self) -> None:
        """The config's word on what is INT4 against the tensors. They decide; but where the two disagree,
        something was replaced by half."""
        quantization = self.config.quantization
        if quantization is None:
            return
        if quantization.kind == "fp8":
            if not any(item.kind == "fp8" for item in self.items.values()):
                fail("bad_model", f"{self.path}: config.json says that weights are fp8, but none is")
            return
        for name, item in self.items.items():
            if len(item.shape) != 2 or (name == "lm_head.weight" and self.config.tie_word_embeddings):
                continue
            module = name.removesuffix(".weight")
            if module.endswith(_NOT_LINEAR):
                continue
            stored = item.entry.name.rpartition(".")[0] if _FUSED.search(item.entry.name) is None else module
            claimed = quantization.names(stored, module)
            if claimed != (item.kind == "int4"):
                says = "is to be INT4" if claimed else "is not to be INT4"
                self.bad(item.entry, f"is not what config.json says: by its quantization_config {module} {says}")

    def check(self, entry: TensorEntry, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        if entry.shape != shape:
            self.bad(entry, f"has shape {list(entry.shape)}; expected {list(shape)}")
        if entry.dtype not in dtypes:
            wanted = f"{', '.join(dtypes[:-1])} or {dtypes[-1]}" if len(dtypes) > 1 else dtypes[0]
            self.bad(entry, f"has dtype {entry.dtype}; expected {wanted}")

    def bad(self, entry: TensorEntry, message: str) -> NoReturn:
        fail("bad_model", f"{entry.file.path}: the tensor {entry.name} {message}")


def _whole(entry: TensorEntry) -> Piece:
    return Piece(entry.file, entry.offset, entry.nbytes)
