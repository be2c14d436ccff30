"""The tokenizer: byte-level BPE with Kimi's split pattern and special tokens, as a tokenizer.json.

Needs the package ``tokenizers``. Special tokens come first, under the ids of SPECIALS; a document ends with
[EOS], and nothing opens one. ``<|mask|>`` is what a drafter puts in place of tokens it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.train.errors import TrainError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["EOS", "MASK", "PAD", "SPECIALS", "encode_documents", "save", "train"]

SPECIALS = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[UNK]",
    "[PAD]", "<|mask|>",
)  # fmt: skip
BOS, EOS, UNK, PAD, MASK = (SPECIALS.index(s) for s in ("[BOS]", "[EOS]", "[UNK]", "[PAD]", "<|mask|>"))

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TrainError("the tokenizer needs the package tokenizers: pip install 'kdtree-engine[train]'") from error
    return tokenizers


def train(texts: Iterable[str], vocab: int) -> tokenizers.Tokenizer:
    """A tokenizer of `vocab` tokens, the special ones included. Raises TrainError where the texts are too small
    for so many, or `vocab` does not fit 16 bits."""
    if not 256 + len(SPECIALS) < vocab <= 65536:
        raise TrainError(f"a vocabulary of {vocab} tokens; expected {257 + len(SPECIALS)} to 65536")
    lib = _library()
    tokenizer: tokenizers.Tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence(
        [
            lib.pre_tokenizers.Split(lib.Regex(PATTERN), "isolated"),
            lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise TrainError(f"the texts give {tokenizer.get_vocab_size()} tokens; expected {vocab}: more text is needed")
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def encode_documents(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str]
) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """All texts, each followed by [EOS]; markers of special tokens in a text are plain text."""
    tokenizer.encode_special_tokens = True
    parts = []
    for at in range(0, len(texts), 512):
        for encoded in tokenizer.encode_batch_fast(list(texts[at : at + 512]), add_special_tokens=False):
            parts.append(np.asarray([*encoded.ids, EOS], np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)
