"""Kimi's tokenizer: a ``tiktoken.model`` file, Kimi's split pattern and 256 reserved slots.

The file holds the base vocabulary, one ``BASE64 RANK`` a line. Everything else lives in program code that the
repositories bring along and that is never run here: how text is split before byte pairs are merged, that exactly
256 slots for special tokens follow the base vocabulary (named by ``added_tokens_decoder`` of
tokenizer_config.json, the others ``<|reserved_token_ID|>`` with the *absolute* id), and how very long texts are
cut before they are tokenized. No token opens a text.

The ``tiktoken`` library does the merging. Nothing is downloaded: the library is given ranks, never the name of
an encoding.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import load_json, read_regular
from .errors import fail
from .tokenizer import END_NAMES, ByteStream, TextStream, checked_text, decode_with

if TYPE_CHECKING:
    import tiktoken

__all__ = ["PATTERN", "RESERVED", "TiktokenTokenizer", "cut_long", "read_ranks"]

RESERVED = 256
"""Slots for special tokens, from the first id behind the base vocabulary on."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # one character that is no letter, digit or line break goes with the word
_AFTER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is cut into pieces before byte pairs are merged (facts of the released tokenizers; in the syntax of
tiktoken's regular expressions). A run of Han is a piece of its own; camelCase is two; a contraction stays with
its word; digits go by three."""

MAX_CHARACTERS = 400_000  # of one call of the library; a longer text is cut there, whatever stands there
MAX_RUN = 25_000  # of space, or of anything else, without a change between the two; cut likewise

_MAX_FILE = 1 << 26  # the released file has 2.8 MB
_NAME = "tiktoken.model"


class TiktokenTokenizer:
    """The tokenizer in a model folder that has a ``tiktoken.model``.

    ``vocab_size``: base vocabulary and reserved slots. ``specials``: names and ids of the tokens that a text
    from a user never turns into: all reserved slots. ``end_tokens``: those among them that end a turn or text.

    Raises EngineError: ``unsupported`` without the package tiktoken, ``bad_file`` for a file that is none,
    ``bad_model`` where the vocabulary is larger than the model's (`vocab_size`).
    """

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        path = folder / _NAME
        ranks = read_ranks(path)
        base = len(ranks)
        if vocab_size is not None and base + RESERVED > vocab_size:
            fail(
                "bad_model",
                f"{path} has {base} tokens and {RESERVED} reserved slots, but the model's vocab_size is {vocab_size}",
            )
        names, hidden = _slots(folder / "tokenizer_config.json", base)
        self.specials: Mapping[str, int] = {name: id_ for id_, name in names.items()}
        self.end_tokens = frozenset(self.specials[n] for n in END_NAMES if n in self.specials) & hidden
        self.vocab_size = base + RESERVED
        self._encoding = _encoding(path, ranks, self.specials)
        self._bytes = [b""] * self.vocab_size
        for piece, rank in ranks.items():
            self._bytes[rank] = piece
        for id_, name in names.items():
            self._bytes[id_] = b"" if id_ in hidden else name.encode()

    def encode(self, text: str, *, start: bool = True, special: bool = False) -> list[int]:
        """Tokens of `text`; `special`: names of reserved slots in it become those tokens. `start` changes
        nothing: no token opens a text of these models."""
        checked_text(text)
        ids: list[int] = []
        for part in cut_long(text):
            if special:
                ids += self._encoding.encode(part, allowed_special="all", disallowed_special=())
            else:
                ids += self._encoding.encode_ordinary(part)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`. Special tokens are left out; reserved slots that tokenizer_config.json declares
        not special (``<think>``) show."""
        return decode_with(self.stream(), tokens)

    def stream(self) -> TextStream:
        return ByteStream(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to a text; nothing for special tokens, and for rows of the embedding that no text
        uses."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank of a ``tiktoken.model``, every rank from 0 on exactly once.

    Raises EngineError: ``io``, or ``bad_file`` naming the line.
    """
    data = read_regular(path, _MAX_FILE)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        fields = line.split(b" ")
        if len(fields) != 2 or not re.fullmatch(rb"[0-9]{1,9}", fields[1]):
            fail("bad_file", f"{path}, line {number}: expected a token in base64, a space and its rank")
        try:
            piece = base64.b64decode(fields[0], validate=True)
        except (binascii.Error, ValueError) as error:
            fail("bad_file", f"{path}, line {number}: the token is not base64", error)
        if not piece or piece in ranks:
            fail("bad_file", f"{path}, line {number}: the token {'is empty' if not piece else 'appears twice'}")
        ranks[piece] = int(fields[1])
    if set(ranks.values()) != set(range(len(ranks))):
        fail("bad_file", f"{path}: its {len(ranks)} tokens do not have the ranks 0 to {len(ranks) - 1}")
    missing = [b for b in range(256) if bytes((b,)) not in ranks]
    if missing:
        fail("bad_file", f"{path}: the byte {missing[0]:#04x} is no token, so not every text has tokens")
    return ranks


def _slots(path: Path, base: int) -> tuple[dict[int, str], frozenset[int]]:
    """The names of all reserved slots by id, and which of them are special (without a text of their own)."""
    names = {id_: f"<|reserved_token_{id_}|>" for id_ in range(base, base + RESERVED)}
    hidden = set(names)
    declared = load_json(path).get("added_tokens_decoder") if path.exists() else None
    if declared is None:
        declared = {}
    if not isinstance(declared, dict):
        fail("bad_file", f"{path}: added_tokens_decoder is no object")
    for key, value in declared.items():
        id_, content, special = _added(path, key, value)
        if id_ < base:
            fail("bad_file", f"{path}: added_tokens_decoder names {id_} {content!r}, a token of {_NAME}")
        if id_ not in names:  # past the slots there is no row of the embedding: a marker for other programs
            continue
        names[id_] = content
        if not special:
            hidden.discard(id_)
    (name, times), *_ = Counter(names.values()).most_common(1)
    if times > 1:
        fail("bad_file", f"{path}: added_tokens_decoder gives two ids the name {name!r}")
    return names, frozenset(hidden)


def _added(path: Path, key: str, value: Any) -> tuple[int, str, bool]:
    content = value.get("content") if isinstance(value, dict) else None
    special = value.get("special", True) if isinstance(value, dict) else None
    good = re.fullmatch(r"[0-9]{1,9}", key) and isinstance(content, str) and content and isinstance(special, bool)
    if not good:
        fail("bad_file", f"{path}: added_tokens_decoder[{key!r}] is not {{content, special}} under a token id")
    assert isinstance(content, str)
    return int(key), checked_text(content), bool(special)


def _encoding(path: Path, ranks: dict[bytes, int], specials: Mapping[str, int]) -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError as error:
        hint = "pip install 'kdtree-engine[hf]'"
        fail("unsupported", f"reading {path} needs the package tiktoken: {hint}", error)
    return tiktoken.Encoding(name=path.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(specials))


def cut_long(text: str) -> Iterator[str]:
    """`text` in parts as the released tokenizers cut it: after every 400,000 characters and, inside such a part,
    after every 25,000 of a run of space or of a run of anything else. Parts are tokenized one by one, so for
    huge texts the cuts are part of the tokenization."""
    for begin in range(0, len(text), MAX_CHARACTERS):
        part = text[begin : begin + MAX_CHARACTERS]
        if len(part) <= MAX_RUN:
            yield part
            continue
        start = 0
        for run in re.finditer(r"\s+|\S+", part):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[start:cut]
                start = cut
        yield part[start:]
