"""From packages to documents: one text each, with a kind and a name that stays the same between runs."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sysconfig
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from harness.train.errors import TrainError
from harness.train.sources import Kind, Source

__all__ = ["SKIPPED", "Document", "documents"]

SKIPPED = re.compile(r"(^|/)(_?vendor(ed)?|extern(al)?|_distutils|site-packages|dist-packages|lib2to3|pythonwin)(/|$)")
"""Folders with other projects' code, whose licence is not the package's."""

_LISTS = re.compile(r"changelog|changes|whatsnew|release|history|news|glossary|genindex", re.IGNORECASE)
_SMALLEST, _LARGEST = 400, 400_000  # characters
_LONGEST_LINE = 1000


@dataclass(frozen=True)
class Document:
    """``name``: source and place in it."""

    name: str
    kind: Kind
    source: str
    text: str


def documents(source: Source, file: Path | None) -> Iterator[Document]:
    """The documents of one package, in the order of their names. Raises TrainError for a package that cannot be
    read."""
    try:
        for place, kind, text in _READERS[source.form](file):
            text = text.replace("\r\n", "\n").strip("\n") + "\n"
            prose = source.form in ("moby", "sotu")  # one line a paragraph, or a whole speech
            if _SMALLEST <= len(text) <= _LARGEST and (prose or max(map(len, text.split("\n"))) <= _LONGEST_LINE):
                yield Document(f"{source.package}/{place}", kind, source.package, text)
    except (OSError, zipfile.BadZipFile, tarfile.TarError, zlib.error, ValueError, KeyError) as error:
        raise TrainError(f"{file or source.package} cannot be read as {source.form}: {error}") from error


Found = Iterator[tuple[str, Kind, str]]


def _stdlib(_: Path | None) -> Found:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if not SKIPPED.search(place) and not path.is_symlink():
            text = _decoded(path.read_bytes())
            if text is not None:
                yield place, "code", text


def _wheel(file: Path | None) -> Found:
    with zipfile.ZipFile(_given(file)) as archive:
        for name in sorted(archive.namelist()):
            suffix = PurePosixPath(name).suffix
            if SKIPPED.search(name) or suffix not in (".py", ".csv", ".md", ".rst") or ".dist-info/" in name:
                continue
            text = _decoded(archive.read(name))
            if text is None:
                continue
            if suffix == ".py":
                yield name, "code", text
            elif suffix == ".csv":
                yield name, "lists", text[: text.rfind("\n", 0, 30_000) + 1]
            else:
                yield name, _of_docs(name), text


def _rst(file: Path | None) -> Found:
    for name, data in _deb(_given(file), lambda n: "/_sources/" in n and n.endswith(".txt")):
        text = _decoded(data)
        if text is not None:
            place = name.split("/_sources/", 1)[1].removesuffix(".txt")
            yield place, _of_docs(place), text


def _html(file: Path | None) -> Found:
    for name, data in _deb(_given(file), lambda n: n.endswith(".html") and "_modules" not in n):
        text = _decoded(data)
        if text is not None:
            parser = _Text()
            parser.feed(text)
            place = name.split("/usr/share/", 1)[-1]
            yield place, _of_docs(place), parser.result()


def _wordnet(file: Path | None) -> Found:
    """Glosses as lines "words (part of speech): gloss", 150 to a document, in the order of the file."""
    for name, data in _deb(_given(file), lambda n: "/wordnet/data." in n):
        part = name.rsplit(".", 1)[1]
        lines = []
        for raw in data.decode("utf-8", "replace").split("\n"):
            if raw.startswith(" ") or " | " not in raw:
                continue
            head, gloss = raw.split(" | ", 1)
            fields = head.split(" ")
            words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
            lines.append(f"{', '.join(words)} ({part}): {gloss.strip()}")
        for at in range(0, len(lines), 150):
            yield f"{part}/{at // 150}", "lists", "\n".join(lines[at : at + 150])


def _austen(file: Path | None) -> Found:
    """Six novels by chapter. They are in R's lazy-load format: zlib streams of serialised character vectors."""
    (_, data), *_rest = _deb(_given(file), lambda n: n.endswith("/janeaustenr/data/Rdata.rdb"))
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        lines = _r_strings(raw)
        title = lines[0].title()
        chapters = re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME)\b)", "\n".join(lines))
        for number, chapter in enumerate(chapters):
            yield f"{title}/{number}", "prose", chapter


def _r_strings(raw: bytes) -> list[str]:
    found = []
    at = raw.find(b"\x00\x04\x00\x09")
    while 0 <= at < len(raw) and raw[at : at + 4] == b"\x00\x04\x00\x09":
        (length,) = struct.unpack_from(">i", raw, at + 4)
        found.append(raw[at + 8 : at + 8 + max(length, 0)].decode("utf-8", "replace"))
        at += 8 + max(length, 0)
    return found


def _moby(file: Path | None) -> Found:
    """Chapters; the package also holds the whole book once more."""
    for name, data in _tgz(_given(file), r"/chapter_\d+\.json$"):
        chapter = json.loads(data)
        yield Path(name).stem, "prose", f"CHAPTER {chapter['chapter']}. {chapter['title']}\n\n{chapter['text']}"


def _sotu(file: Path | None) -> Found:
    for name, data in _tgz(_given(file), r"/data/\d+_.*\.txt$"):
        text = data.decode("utf-8", "replace").strip()
        # A speech is one line: a paragraph every few sentences, so that lines are not of endless length.
        sentences = re.split(r"(?<=[.!?]) +(?=[A-Z])", text)
        paragraphs = [" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)]
        title = Path(name).stem.split("_")
        heading = f"{' '.join(title[1:-1]).title()}, State of the Union, {title[0]}"
        for part, at in enumerate(range(0, len(paragraphs), 60)):
            if part == 0 or len(paragraphs) - at > 5:
                yield f"{Path(name).stem}/{part}", "prose", f"{heading}\n\n" + "\n\n".join(paragraphs[at : at + 60])


_READERS = {
    "stdlib": _stdlib, "wheel": _wheel, "rst": _rst, "html": _html, "wordnet": _wordnet, "austen": _austen,
    "moby": _moby, "sotu": _sotu,
}  # fmt: skip


def _given(file: Path | None) -> Path:
    if file is None:
        raise ValueError("the package was not downloaded")
    return file


def _of_docs(place: str) -> Kind:
    return "lists" if _LISTS.search(PurePosixPath(place).name) or "/releases/" in place else "reference"


def _decoded(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    # Tables of numbers and byte strings teach nothing and fill the budget.
    digits = sum(text.count(d) for d in "0123456789")
    return None if "\x00" in text or digits > 0.25 * len(text) + 100 else text


def _deb(file: Path, wanted: Callable[[str], bool]) -> list[tuple[str, bytes]]:
    """Files of a Debian package for whose name `wanted` holds, in the order of names."""
    with tempfile.TemporaryFile() as tar:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=tar, stderr=subprocess.PIPE)
        if done.returncode:
            raise ValueError(done.stderr.decode(errors="replace").strip())
        tar.seek(0)
        with tarfile.open(fileobj=tar) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and wanted(m.name)]
            return [(m.name, _content(archive, m)) for m in sorted(members, key=lambda m: m.name)]


def _tgz(file: Path, pattern: str) -> list[tuple[str, bytes]]:
    with tarfile.open(file) as archive:
        members = [m for m in archive.getmembers() if m.isfile() and re.search(pattern, m.name)]
        return [(m.name, _content(archive, m)) for m in sorted(members, key=lambda m: m.name)]


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    return b"" if stream is None else stream.read()


class _Text(HTMLParser):
    """The text of a page: blocks on lines of their own, preformatted text as it is, navigation left out."""

    _BLOCKS = frozenset(
        ("p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "br")
    )
    _HIDDEN = frozenset(["script", "style", "head", "nav", "footer", "title", "svg"])
    _VOID = frozenset(["br", "img", "hr", "meta", "link", "input", "col", "wbr", "area", "base"])

    def __init__(self) -> None:
        super().__init__()
        self._out = io.StringIO()
        self._hidden = 0
        self._pre = 0
        self._stack: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._BLOCKS:
            self._out.write("\n")
        if tag in self._VOID:
            return
        values = " ".join(v or "" for k, v in attrs if k in ("class", "id", "role"))
        hidden = tag in self._HIDDEN or bool(re.search(r"sphinxsidebar|navheader|navfooter|nav\b|headerlink", values))
        self._stack.append((tag, hidden))
        self._hidden += hidden
        self._pre += tag == "pre"
        if tag == "li":
            self._out.write("- ")
        if tag in ("td", "th"):
            self._out.write(" | ")

    def handle_endtag(self, tag: str) -> None:
        while any(open_ == tag for open_, _ in self._stack):
            open_, hidden = self._stack.pop()
            self._hidden -= hidden
            self._pre -= open_ == "pre"
            if open_ == tag:
                break
        if tag in self._BLOCKS:
            self._out.write("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._out.write(data if self._pre else re.sub(r"\s+", " ", data))

    def result(self) -> str:
        text = re.sub(r"[ \t]+\n", "\n", self._out.getvalue())
        return re.sub(r"\n{3,}", "\n\n", text)
