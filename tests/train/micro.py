"""A micro corpus, target and drafter, made once a session in seconds."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import numpy as np

from harness.train import bpe
from harness.train.shapes import DRAFTS, TARGETS, DraftShape, TargetShape
from harness.train.sources import KINDS

VOCAB = 300
TARGET: TargetShape = TargetShape(**{**TARGETS["micro"].__dict__, "vocab_size": VOCAB})
DRAFT: DraftShape = DRAFTS["micro"]
SENTENCE = "the cat saw a dog and then it ran to old house near river while birds sang above fields"


def write_corpus(folder: Path) -> Path:
    """Sentences of few words, the same for all kinds, with a tokenizer and a manifest."""
    words = SENTENCE.split(" ")
    noise = random.Random(5)
    texts = [" ".join(noise.choice(words) for _ in range(60)) + ".\n" for _ in range(60)]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe.train(texts, VOCAB)
    bpe.save(tokenizer, folder)
    counts = {}
    for part, chosen in (("train", texts[:48]), ("heldout", texts[48:])):
        tokens = bpe.encode_documents(tokenizer, chosen)
        data = "".join(chosen).encode()
        for kind in KINDS:
            (folder / f"{part}.{kind}.bin.xz").write_bytes(lzma.compress(tokens.astype(np.uint16).tobytes()))
            (folder / f"{part}.{kind}.txt").write_bytes(data)
            xz = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
            counts[f"{part}.{kind}"] = {"bytes": len(data), "tokens": len(tokens), "xz_bytes": xz}
    (folder / "manifest.json").write_text(json.dumps({"vocab": VOCAB, "counts": counts}))
    return folder
