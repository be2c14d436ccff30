"""The corpus: documents, split by document into training and held-out texts, tokenised and packed.

A folder holds ``tokenizer.json``, per kind ``train.KIND.bin.xz`` and ``heldout.KIND.bin.xz`` (uint16 tokens, little
endian; a document ends with the end token), ``heldout.KIND.txt`` (the same documents as text, joined without the
end tokens), and ``manifest.json``.

The split looks at names alone: per kind the documents with the smallest SHA-256 of their names are held out, until
the wanted size is there. A training document that shares more than 30 per cent of its long lines with held-out
ones is dropped, so that copies and versions of a held-out document do not teach it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.train import bpe
from harness.train.acquire import acquire, package_file
from harness.train.errors import TrainError
from harness.train.extract import Document, documents
from harness.train.sources import KINDS, SOURCES, Kind, Source

__all__ = ["CorpusOptions", "build", "split"]

_LONG_LINE = 40  # characters: shorter lines are shared by unrelated documents
_SHARED = 0.3


@dataclass(frozen=True)
class CorpusOptions:
    """``heldout`` bytes a kind; ``most``: bytes of one kind that one package may give, so that no package is most of
    what the model sees; ``vocab`` size; ``tokenizer_sample``: characters that the tokenizer is trained on."""

    heldout: int = 400_000
    most: Mapping[Kind, int] = field(default_factory=lambda: {"code": 3_500_000, "lists": 3_500_000})
    vocab: int = 4096
    tokenizer_sample: int = 24_000_000


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _long_lines(text: str) -> set[int]:
    lines = (line.strip() for line in text.split("\n"))
    return {hash(line) for line in lines if len(line) >= _LONG_LINE}


def split(found: Iterable[Document], heldout: int) -> tuple[list[Document], list[Document], int]:
    """Training and held-out documents, each in the order of the hashes of their names, and how many training
    documents were dropped because they repeat held-out ones. Repeated texts are left out altogether."""
    unique: dict[bytes, Document] = {}
    for document in sorted(found, key=lambda d: _order(d.name)):
        unique.setdefault(hashlib.sha256(document.text.strip().encode()).digest(), document)
    held: list[Document] = []
    rest: list[Document] = []
    size: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for document in unique.values():
        nbytes = len(document.text.encode())
        # One long document would be the whole of a kind; an eighth keeps variety.
        if size[document.kind] < heldout and nbytes <= max(heldout // 8, 1):
            held.append(document)
            size[document.kind] += nbytes
        else:
            rest.append(document)
    seen: set[int] = set().union(*(_long_lines(d.text) for d in held)) if held else set()
    train = []
    for document in rest:
        lines = _long_lines(document.text)
        if not lines or len(lines & seen) <= _SHARED * len(lines):
            train.append(document)
    return train, held, len(rest) - len(train)


def _capped(found: Iterable[Document], options: CorpusOptions) -> list[Document]:
    """At most so much of each package and kind, chosen by the hash of the name. Documentation and prose are
    whole."""
    size: dict[tuple[str, Kind], int] = {}
    kept = []
    for document in sorted(found, key=lambda d: _order(d.name)):
        key = document.source, document.kind
        if size.get(key, 0) < options.most.get(document.kind, 10**12):
            size[key] = size.get(key, 0) + len(document.text.encode())
            kept.append(document)
    return kept


def build(
    out: Path,
    downloads: Path,
    options: CorpusOptions,
    sources: Sequence[Source] = SOURCES,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Make the folder `out`; the manifest. Raises TrainError."""
    acquire(downloads, sources, log)
    found: list[Document] = []
    used = []
    for source in sources:
        file = None if source.registry == "python" else package_file(downloads, source)
        mine = _capped(documents(source, file), options)
        if not mine:
            raise TrainError(f"{source.package} gave no document")
        found += mine
        used.append(_record(source, file, mine))
        log(f"{source.package}: {len(mine)} documents, {sum(used[-1]['bytes'].values()) / 1e6:.1f} MB")
    train, held, dropped = split(found, options.heldout)
    if not train or not held:
        raise TrainError("the packages are too small to be split; expected documents for training and held-out ones")

    out.mkdir(parents=True, exist_ok=True)
    random.Random(0).shuffle(train)
    log(f"tokenizer of {options.vocab} tokens")
    sample, size = [], 0
    for document in train:
        if size < options.tokenizer_sample:
            sample.append(document.text)
            size += len(document.text)
    tokenizer = bpe.train(sample, options.vocab)
    bpe.save(tokenizer, out)

    log(f"packing {len(train)} training and {len(held)} held-out documents")
    counts = {}
    for name, part in (("train", train), ("heldout", held)):
        for kind in KINDS:
            texts = [d.text for d in part if d.kind == kind]
            tokens = bpe.encode_documents(tokenizer, texts)
            (out / f"{name}.{kind}.bin.xz").write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), preset=6))
            text = "".join(texts).encode()
            counts[f"{name}.{kind}"] = {"documents": len(texts), "bytes": len(text), "tokens": len(tokens)}
            if name == "heldout":
                (out / f"heldout.{kind}.txt").write_bytes(text)
                counts[f"{name}.{kind}"]["xz_bytes"] = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    manifest = {
        "vocab": options.vocab,
        "split": "by document: smallest SHA-256 of the names first; copies of held-out documents dropped",
        "dropped_copies": dropped,
        "counts": counts,
        "sources": used,
        "heldout_documents": sorted(d.name for d in held),
        "files": {f.name: _sha256(f) for f in sorted(out.iterdir()) if f.name != "manifest.json"},
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _record(source: Source, file: Path | None, found: Sequence[Document]) -> dict[str, Any]:
    sizes = {k: sum(len(d.text.encode()) for d in found if d.kind == k) for k in KINDS}
    return {
        "package": source.package,
        "registry": source.registry,
        "licence": source.licence,
        "file": None if file is None else file.name,
        "sha256": None if file is None else _sha256(file),
        "bytes": {kind: size for kind, size in sizes.items() if size},
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_tokens(corpus: Path, part: str, kind: Kind) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The packed tokens ``PART.KIND``, uint16. Raises TrainError where the folder is no corpus."""
    path = corpus / f"{part}.{kind}.bin.xz"
    try:
        return np.frombuffer(lzma.decompress(path.read_bytes()), "<u2")
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror}; expected a folder of `corpus`") from error
    except lzma.LZMAError as error:
        raise TrainError(f"{path} is damaged: {error}") from error
