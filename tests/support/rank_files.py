"""Small folders with a tiktoken.model of Kimi's form, made from a list of tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESERVED = 256

# Offsets into the reserved slots, and what stands there in the released tokenizers (K2-Thinking, K2.5).
KIMI_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
NOT_SPECIAL = ("<think>", "</think>")


def byte_and(tokens: Iterable[bytes]) -> list[bytes]:
    """A base vocabulary: the 256 bytes, then `tokens`, each once."""
    return list(dict.fromkeys([*(bytes((b,)) for b in range(256)), *tokens]))


def write_ranks(folder: Path, tokens: Iterable[bytes]) -> int:
    """Writes ``tiktoken.model``; the size of the base vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = byte_and(tokens)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(vocabulary))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    return len(vocabulary)


def write_kimi(
    folder: Path, tokens: Iterable[bytes] = (), slots: Mapping[int, str] = KIMI_SLOTS, **config: Any
) -> dict[str, int]:
    """Writes ``tiktoken.model`` and a tokenizer_config.json that names `slots`, with `config` beside them;
    the ids of the named slots."""
    base = write_ranks(folder, tokens)
    added = {
        str(base + offset): {"content": name, "special": name not in NOT_SPECIAL, "lstrip": False, "rstrip": False}
        for offset, name in slots.items()
    }
    text = json.dumps({"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer", **config})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return {name: base + offset for offset, name in slots.items()}
