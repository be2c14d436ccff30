"""Which tokens end a text: whatever either config says, and the end markers of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import rank_files
import tiny_models

from kdtree_engine import Engine
from kdtree_engine.tokenizer import FileTokenizer


def test_stop_set_is_the_union(tmp_path: Path) -> None:
    """Catches a model that talks past its turn: releases exist whose config ends texts with [EOS] alone."""
    ids = rank_files.write_kimi(tmp_path)
    config = {**tiny_models.CONFIG, "vocab_size": 512, "eos_token_id": ids["[EOS]"]}
    tiny_models.write_folder(tmp_path, config, tokenizer=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert Engine.load(tmp_path).eos_token_ids == {ids["[EOS]"], 7, ids["<|im_end|>"], ids["[EOT]"]}


def test_end_markers_of_a_tokenizer_json(tmp_path: Path) -> None:
    """Catches the compiled form of the same tokenizer that ends texts elsewhere."""
    from tokenizers import AddedToken, Tokenizer

    tiny_models.write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("[EOT]", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = FileTokenizer(tmp_path / "tokenizer.json")
    assert made.specials == {"<|end|>": 256, "<|im_end|>": 257}
    assert made.end_tokens == {257}
