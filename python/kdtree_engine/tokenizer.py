"""Text to tokens and back.

A folder brings its own ``tokenizer.json`` or ``tiktoken.model`` (the latter: tiktoken_tokenizer.py); a
bundle has neither, and its text is UTF-8 bytes where the vocabulary has room for them. All speak the same
three verbs: ``encode``, ``decode`` and ``stream``, which turns tokens into text one by one and holds back
what is not yet certain: the bytes of a character whose rest may come with the next token are never shown as
U+FFFD before the end.

Text from users is data: by default a ``<|im_end|>`` typed into a prompt is tokenized as the characters it
consists of and not as the special token, so that nobody can close a turn by typing its marker.
``special=True`` is for text that a program composed, such as a chat template.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from .config import load_json, parse_eos, read_regular
from .errors import fail

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "END_NAMES",
    "ByteStream",
    "ByteTokenizer",
    "FileTokenizer",
    "StopText",
    "TextStream",
    "Tokenizer",
    "checked_text",
    "decode_with",
    "generation_eos",
    "load_tokenizer",
]

_MAX_FILE = 1 << 28  # a tokenizer.json of 160,000 tokens has some 10 MB


class TextStream(Protocol):
    """Text of a growing sequence: the pieces, joined, are ``decode`` of the whole."""

    def push(self, token: int) -> str:
        """The text that `token` makes certain; may be empty."""

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD."""


END_NAMES = ("<|im_end|>", "[EOS]", "[EOT]")
"""Special tokens that end a turn or a text whatever the configs say: the two configs of a release name
different ones of these, or only one, and a model stops at any."""


class Tokenizer(Protocol):
    specials: Mapping[str, int]
    """Markers of special tokens, which ``encode`` reads as plain text unless `special` is true, and their
    ids."""
    end_tokens: frozenset[int]
    """Those special tokens that are called like one of END_NAMES."""

    def encode(self, text: str, *, start: bool = True, special: bool = False) -> list[int]:
        """Tokens of `text`. `start`: the text begins a sequence, so the tokenizer's own opening token (if
        it has one) comes first. `special`: markers of special tokens in `text` become those tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens left out."""

    def stream(self) -> TextStream: ...

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to a text, in UTF-8; a token may be half a character. Empty for special tokens
        and for rows of the embedding that no text uses."""


def load_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None where there is neither a tiktoken.model nor a
    tokenizer.json.

    Where both are there, the tiktoken.model counts: a tokenizer.json beside it was converted from it, and
    the converters in circulation split text differently. `vocab_size` of the model, where it is known, is
    held against the file.
    """
    if (folder / "tiktoken.model").exists():
        from .tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer(folder, vocab_size)
    path = folder / "tokenizer.json"
    return FileTokenizer(path, vocab_size) if path.exists() else None


def generation_eos(folder: Path) -> frozenset[int]:
    """eos ids of generation_config.json; empty where there is none.

    The union with those of config.json ends a text: releases exist whose two files name different ids, and a
    model stops at either.
    """
    path = folder / "generation_config.json"
    return parse_eos(load_json(path), str(path)) if path.exists() else frozenset()


class ByteTokenizer:
    """Text as UTF-8 bytes: token ids 0 to 255. Ids past them have no text and show as U+FFFD."""

    specials: Mapping[str, int] = MappingProxyType({})
    end_tokens: frozenset[int] = frozenset()

    def encode(self, text: str, *, start: bool = True, special: bool = False) -> list[int]:
        return list(checked_text(text).encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return decode_with(self.stream(), tokens)

    def stream(self) -> TextStream:
        return ByteStream(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        return bytes((min(token, 0xFF),))  # 0xFF is in no UTF-8 text: it shows as U+FFFD by itself


class FileTokenizer:
    """A tokenizer.json, read by the ``tokenizers`` library; EngineError ``bad_file`` where it cannot be, or where
    its vocabulary has ids that a model of `vocab_size` tokens does not have. (Fewer are usual: models pad theirs.)"""

    def __init__(self, path: Path, vocab_size: int | None = None) -> None:
        self._path = path
        self._plain = self._read()
        most = max(self._plain.get_vocab(with_added_tokens=False).values(), default=-1)
        if vocab_size is not None and most >= vocab_size:
            fail("bad_file", f"{path} has the token id {most}, but the model's vocab_size is {vocab_size}")
        self._plain.encode_special_tokens = True  # that is: encode their markers as ordinary text
        self._byte_level = type(self._plain.decoder).__name__ == "ByteLevel"
        added = self._plain.get_added_tokens_decoder()
        self._text = {id_: "" if token.special else token.content for id_, token in added.items()}
        self.specials: Mapping[str, int] = {token.content: id_ for id_, token in added.items() if token.special}
        self.end_tokens = frozenset(self.specials[name] for name in END_NAMES if name in self.specials)

    def encode(self, text: str, *, start: bool = True, special: bool = False) -> list[int]:
        tokenizer = self._with_special if special else self._plain
        return list(tokenizer.encode(checked_text(text), add_special_tokens=start).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return decode_with(self.stream(), tokens)

    def stream(self) -> TextStream:
        return ByteStream(self._bytes) if self._byte_level else _DecoderStream(self._plain)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes(token) if self._byte_level else str(self._plain.decode([token])).encode()

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        return self._read()

    def _read(self) -> tokenizers.Tokenizer:
        try:
            import tokenizers
        except ImportError as error:
            hint = "pip install 'kdtree-engine[hf]'"
            fail("unsupported", f"reading {self._path} needs the package tokenizers: {hint}", error)
        data = read_regular(self._path, _MAX_FILE)
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more specific
            fail("bad_file", f"{self._path} is not a tokenizer: {error}", error)
        # Files may carry the settings of a training run, which would silently cut a prompt or fill it up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _bytes(self, token: int) -> bytes:
        if token in self._text:
            return self._text[token].encode()
        piece = self._plain.id_to_token(token)  # None: a row of the embedding that no text uses
        if piece is None:
            return b""
        try:
            return bytes(_BYTE_OF[c] for c in piece)
        except KeyError:
            return str(piece).encode()


def checked_text(text: str) -> str:
    """`text`; EngineError ``invalid_argument`` where it has a lone surrogate, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fail("invalid_argument", f"the text is not valid Unicode at character {error.start}", error)
    return text


def decode_with(stream: TextStream, tokens: Sequence[int]) -> str:
    """What a new `stream` makes of `tokens`, to the end."""
    return "".join(stream.push(token) for token in tokens) + stream.finish()


class ByteStream:
    """Tokens are byte strings. A byte that can no longer become a character is U+FFFD at once."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _DecoderStream:
    """Any decoder of the library, by difference: a token's text is what it adds to the text of the ones
    before.

    The few tokens before it stay in the window, because decoders treat the first token of a text
    differently. A text that ends in U+FFFD is held back, but for no more tokens than one character has
    bytes: after that the bytes are wrong and not incomplete.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # tokens of the window whose text is out
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._added()
        if text.endswith("\ufffd") and len(self._held) < 4:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._added()) if self._held else ""

    def _added(self) -> str:
        before: str = self._tokenizer.decode(self._shown)
        return str(self._tokenizer.decode(self._shown + self._held)[len(before) :])

    def _release(self, text: str) -> str:
        self._shown = self._held if text else self._shown + self._held
        self._held = []
        return text


def _byte_table() -> dict[str, int]:
    """The byte-level alphabet of GPT-2's tokenizer: printable bytes stand for themselves, the others for the
    code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in printable)
    table |= {chr(256 + i): b for i, b in enumerate(others)}
    return table


_BYTE_OF = _byte_table()


class StopText:
    """Finds the first of several stop texts in a stream of pieces, wherever the borders between pieces fall.

    First is the one that is complete first; of two that end together, the longer. Text that may turn out to
    be the beginning of a stop text is held back; the stop text itself never comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop text was found: then that text ends before it."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back: no stop text came of it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
