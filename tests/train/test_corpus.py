"""The corpus: what is held out stays out of training, and what is packed is the text."""

from __future__ import annotations

import json
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest

from harness.train import bpe
from harness.train.corpus import CorpusOptions, build, load_tokens, split
from harness.train.errors import TrainError
from harness.train.extract import Document, documents
from harness.train.sources import SOURCES, Source

tokenizers = pytest.importorskip("tokenizers")


def document(i: int, text: str | None = None) -> Document:
    lines = [f"line {i * 1000 + j} of a document that is long enough to be compared with others" for j in range(20)]
    return Document(f"pkg/{i}", "code", "pkg", text or "\n".join(lines) + "\n")


def test_split_is_disjoint_and_drops_copies_of_held_out_documents() -> None:
    """Catches training on what is measured: the same file twice, and a version of it with a few lines changed."""
    found = [document(i) for i in range(40)]
    _, first, _ = split(found, 12_000)
    victim = first[0]
    lines = victim.text.split("\n")
    found.append(Document("pkg/copy", "code", "pkg", victim.text))
    found.append(Document("pkg/version", "code", "pkg", "\n".join(["a new first line", *lines[3:]])))
    train, held, dropped = split(found, 12_000)
    assert held and train and dropped >= 1
    names = {d.name for d in train}
    assert not names & {d.name for d in held}
    assert "pkg/version" not in names
    texts = [d.text for d in [*train, *held]]
    assert len(set(texts)) == len(texts)


def test_split_depends_on_names_alone() -> None:
    """Catches a split that moves when packages come in another order."""
    found = [document(i) for i in range(40)]
    one = [d.name for d in split(found, 9000)[1]]
    other = [d.name for d in split(found[::-1], 9000)[1]]
    assert one == other


def wheel(folder: Path, files: dict[str, str]) -> Source:
    with zipfile.ZipFile(folder / "thing-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return Source("thing", "pypi", "MIT", "wheel")


def test_vendored_copies_and_binaries_stay_out(tmp_path: Path) -> None:
    """Catches code under another licence than the package's."""
    body = "def f(x):\n    return x + 1  # a function\n" * 20
    files = {"thing/a.py": body, "thing/_vendor/other/b.py": body, "thing/c.py": "\x00" + body, "thing/d.so": body}
    source = wheel(tmp_path, files)
    found = list(documents(source, next(tmp_path.glob("*.whl"))))
    assert [d.name for d in found] == ["thing/thing/a.py"]


def test_packed_tokens_are_the_held_out_text(tmp_path: Path) -> None:
    """Catches a lossy tokenizer, documents that run into each other, and an xz figure of another text."""
    files = {}
    for i in range(60):
        lines = [f"def name_{i}_{j}(value):\n\treturn value * {i + j}  # \u00e4\u6f22\U0001f600" for j in range(30)]
        body = "\n".join(lines)
        for suffix in ("py", "md"):
            files[f"thing/m{i}.{suffix}"] = body.replace("def", "def" if suffix == "py" else "* see")
    source = wheel(tmp_path, files)
    out = tmp_path / "corpus"
    with pytest.raises(TrainError, match="more text is needed"):
        build(out, tmp_path, CorpusOptions(heldout=16_000, vocab=4096), [source], lambda _: None)
    made = build(out, tmp_path, CorpusOptions(heldout=16_000, vocab=300), [source], lambda _: None)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    for kind in ("code", "reference"):
        tokens = load_tokens(out, "heldout", kind)  # type: ignore[arg-type]
        assert (tokens == bpe.EOS).sum() == made["counts"][f"heldout.{kind}"]["documents"] > 0
        text = tokenizer.decode([int(t) for t in tokens if t != bpe.EOS])
        assert text.encode() == (out / f"heldout.{kind}.txt").read_bytes()
        packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
        assert len(packed) == made["counts"][f"heldout.{kind}"]["xz_bytes"]
    assert tokenizer.token_to_id("<|mask|>") == bpe.MASK
    assert json.loads((out / "manifest.json").read_text())["sources"][0]["licence"] == "MIT"


def test_markers_in_a_text_are_text() -> None:
    """Catches a document that can put the end token or the mask into training."""
    tokenizer = bpe.train(["some words to begin with, and more of them " * 50], 280)
    tokens = bpe.encode_documents(tokenizer, ["a [EOS] b <|mask|>"])
    assert list(np.flatnonzero(tokens < len(bpe.SPECIALS))) == [len(tokens) - 1]


def test_no_source_is_copyleft() -> None:
    """Catches a package added with a licence that the weights could not be shared under."""
    assert not [s for s in SOURCES if "GPL" in s.licence or not s.licence]


def test_a_damaged_corpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.code.bin.xz").write_bytes(b"no xz")
    with pytest.raises(TrainError, match=r"train.code.bin.xz is damaged"):
        load_tokens(tmp_path, "train", "code")
    with pytest.raises(TrainError, match=r"train.lists.bin.xz cannot be read"):
        load_tokens(tmp_path, "train", "lists")
