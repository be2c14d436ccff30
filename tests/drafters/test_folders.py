"""Loading a DFlash folder beside its target: every tensor there once, nothing left over, and the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from command import assert_refused, kdtree
from draft_folders import CONFIG, ROWS, draft_weights, reference_config, write_draft
from draft_models import TABLE, watch
from models import bf16_bits

from harness.reference import dflash, quant
from kdtree_engine import DraftOptions, Engine, EngineError
from kdtree_engine.draft_config import parse_draft_config
from kdtree_engine.draft_model import DraftModel

PROMPT = list(b"to be or not to be, that is the question; to be or not to be")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_folder(tmp_path_factory.mktemp("models") / "target")


def load(target: Path, draft: Path, options: DraftOptions = ROWS) -> Engine:
    return Engine.load(target, device="cpu", threads=1, draft_model=draft, draft_options=options)


def refused(target: Path, draft: Path, *words: str, code: str = "bad_model") -> None:
    with pytest.raises(EngineError) as caught:
        load(target, draft)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def last_draft(engine: Engine) -> np.ndarray:
    session = engine.session().native
    session.append(PROMPT)
    return watch(session, 5, drafter=engine.drafter("dflash"), budget=8).drafts[-1].logits


def test_a_folder_drafts_what_its_arrays_say(target: Path, tmp_path: Path) -> None:
    """Catches a tensor that lands in another's place on the way through the file."""
    engine = load(target, write_draft(tmp_path / "d"))
    session = engine.session().native
    session.append(PROMPT)
    seen = watch(session, 6, drafter=engine.drafter("dflash"), budget=8)
    from harness.reference.model import Model

    own = tiny_models.weights()
    fields = dict(engine.config.fields)
    taps = Model(fields, own).forward(session.tokens, range(len(session.tokens))).taps
    stacked = np.concatenate([taps[0], taps[1]], axis=1)
    config = reference_config(parse_draft_config(CONFIG, "config.json", ROWS))
    oracle = dflash.Drafter(config, draft_weights(), own["model.embed_tokens.weight"], own["lm_head.weight"])
    for draft in seen.drafts:
        wanted = oracle.logits(draft.root, stacked[: draft.position])
        assert np.abs(draft.logits - wanted).max() < 1e-5 * max(1.0, np.abs(wanted).max())


def test_dtypes_prefix_and_shards_change_nothing(target: Path, tmp_path: Path) -> None:
    """Catches a half-precision tensor that is misread, a name with model. that is not known, a shard left out."""
    from safetensors.numpy import save_file

    arrays = draft_weights()
    plain = last_draft(load(target, write_draft(tmp_path / "plain", tensors=arrays)))
    prefixed = write_draft(tmp_path / "prefix", tensors=arrays, prefix="model.")
    assert last_draft(load(target, prefixed)).tobytes() == plain.tobytes()

    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(arrays)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: arrays[n] for n in part}, sharded / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert last_draft(load(target, sharded)).tobytes() == plain.tobytes()

    rounded = {n: quant.from_bf16_bits(bf16_bits(a)) for n, a in arrays.items()}
    half = {n: a.astype(np.float16) for n, a in arrays.items()}
    exact = last_draft(load(target, write_draft(tmp_path / "f16", tensors=half)))
    wide = {n: a.astype(np.float32) for n, a in half.items()}
    assert exact.tobytes() == last_draft(load(target, write_draft(tmp_path / "f16w", tensors=wide))).tobytes()
    import ml_dtypes

    bf16 = {n: a.astype(ml_dtypes.bfloat16) for n, a in rounded.items()}
    got = last_draft(load(target, write_draft(tmp_path / "bf16", tensors=bf16)))
    assert got.tobytes() == last_draft(load(target, write_draft(tmp_path / "bf16w", tensors=rounded))).tobytes()


def broken() -> Iterator[tuple[str, dict[str, np.ndarray], tuple[str, ...], str]]:
    arrays = draft_weights()
    q = "layers.1.self_attn.q_proj.weight"
    yield "missing", {n: a for n, a in arrays.items() if n != q}, (q, "missing"), "bad_model"
    yield "unknown", arrays | {"layers.0.self_attn.sinks": np.ones(4, np.float32)}, ("sinks",), "bad_model"
    third = {"layers.2.mlp.up_proj.weight": arrays["layers.1.mlp.up_proj.weight"]}
    yield "layer", arrays | third, ("layers.2",), "bad_model"
    yield "shape", arrays | {q: arrays[q][:-1].copy()}, (q, "[63, 64]", "[64, 64]"), "bad_model"
    yield "taps", arrays | {"fc.weight": arrays["fc.weight"][:, :64].copy()}, ("fc.weight", "[64, 128]"), "bad_model"
    yield "dtype", arrays | {q: arrays[q].astype(np.int32)}, (q, "I32"), "bad_model"
    yield "zeros", arrays | {q: np.zeros_like(arrays[q])}, (q, "zeros"), "bad_file"
    yield "head", arrays | {"lm_head.weight": np.ones((272, 64), np.float32)}, ("lm_head", "target's"), "unsupported"
    yield "embed", arrays | {"embed_tokens.weight": np.ones((272, 64), np.float32)}, ("embed_tokens",), "unsupported"
    yield "nan", arrays | {"norm.weight": np.full(64, np.nan, np.float32)}, ("norm.weight", "nan"), "not_finite"
    yield "twice", arrays | {f"model.{q}": arrays[q]}, (q, "twice"), "bad_model"


@pytest.mark.parametrize(("arrays", "words", "code"), [b[1:] for b in broken()], ids=[b[0] for b in broken()])
def test_broken_folders(
    target: Path, tmp_path: Path, arrays: dict[str, np.ndarray], words: tuple[str, ...], code: str
) -> None:
    """Catches a tensor that is silently left out, reshaped or taken from elsewhere."""
    refused(target, write_draft(tmp_path / "d", tensors=arrays), *words, code=code)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, ("hidden_size is 48", "64")),
        ({"vocab_size": 300}, ("vocab_size is 300", "272")),
        ({"num_target_layers": 61}, ("61 layers", "has 3")),
        ({"dflash_config": {"mask_token_id": 270, "target_layer_ids": [0, 3]}}, ("layer 3", "0 to 2")),
        ({"dflash_config": {"mask_token_id": 270, "target_layer_ids": [0, -1]}}, ("layer -1",)),
        ({"dflash_config": {"mask_token_id": 270, "target_layer_ids": [1, 1]}}, ("layer 1 twice",)),
        ({"dflash_config": {"mask_token_id": 272, "target_layer_ids": [0, 1]}}, ("mask_token_id is 272", "272")),
        ({"num_key_value_heads": 3}, ("multiple",)),
        ({"head_dim": 15}, ("even",)),
        ({"block_size": 34}, ("block_rows is 34", "33")),
        ({"block_size": 1}, ("block_rows is 1",)),
    ],
)
def test_a_draft_model_of_another_target(
    target: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Catches a drafter that runs beside the wrong target: it would only look weak."""
    config = CONFIG | changes
    folder = write_draft(tmp_path / "d", config, tensors=draft_weights())
    refused(target, folder, str(folder), *words)


def test_a_mask_row_of_zeros_is_refused(tmp_path: Path) -> None:
    """Catches the checkpoint whose MASK embedding was never saved: accepted length 1.00 to 1.42 instead of 5 to 6."""
    own = tiny_models.weights()
    own["model.embed_tokens.weight"] = own["model.embed_tokens.weight"].copy()
    own["model.embed_tokens.weight"][270] = 0
    target = tiny_models.write_folder(tmp_path / "target", tensors=own)
    refused(target, write_draft(tmp_path / "d"), "row 270", "zeros", "mask", code="unsupported")


def test_a_drafter_that_overflows_only_costs_acceptance(target: Path, tmp_path: Path) -> None:
    """Catches infinities and NaN that get from the draft model into the tree, or through it into the output."""
    arrays = draft_weights()
    arrays["layers.1.mlp.down_proj.weight"][:] = 3e38
    engine = load(target, write_draft(tmp_path / "d", tensors=arrays))
    runs = [
        engine.session().generate(prompt_tokens=PROMPT, max_tokens=12, drafter=d, budget=8, ignore_eos=True).run()
        for d in ("none", "dflash")
    ]
    assert runs[0].tokens == runs[1].tokens and runs[1].stats["drafted"] == 0


def test_missing_folders(target: Path, tmp_path: Path) -> None:
    refused(target, tmp_path / "nothing", "nothing", "does not exist", code="io")
    (tmp_path / "file").write_text("x")
    refused(target, tmp_path / "file", "is not a folder", code="io")
    (tmp_path / "empty").mkdir()
    refused(target, tmp_path / "empty", "no config.json", code="bad_file")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG))
    refused(target, tmp_path / "empty", "model.safetensors", code="bad_file")


def test_every_truncation_is_refused(target: Path, tmp_path: Path) -> None:
    """Catches a download that ended early."""
    folder = write_draft(tmp_path / "d")
    data = (folder / "model.safetensors").read_bytes()
    for cut in (0, 7, 100, len(data) // 2, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:cut])
        with pytest.raises(EngineError) as caught:
            load(target, folder)
        assert caught.value.code == "bad_file"


def test_the_engine_tells_its_draft_model(target: Path, tmp_path: Path) -> None:
    engine = load(target, write_draft(tmp_path / "d"), options=DraftOptions(block_size="drafts", window=30))
    told = engine.native.draft_config
    assert told is not None and told["block_rows"] == 9
    assert told["window"] == [30, 30] and told["target_layers"] == [0, 1]
    assert [getattr(engine.drafter(name), "name", None) for name in ("auto", "dflash")] == ["dflash+ngram", "dflash"]
    assert Engine.load(target, device="cpu", threads=1).native.draft_config is None


def test_the_loader_closes_with_its_builder(target: Path, tmp_path: Path) -> None:
    """Catches a loader that outlives its backend, and a second draft model."""
    from kdtree_engine import _native
    from kdtree_engine.checkpoint import open_checkpoint

    with open_checkpoint(target) as checkpoint, DraftModel(write_draft(tmp_path / "d"), ROWS) as draft:
        builder = _native.EngineBuilder(dict(checkpoint.config.fields), "cpu", 1)
        c = draft.config
        arguments = (dict(c.fields), c.target_layers, c.window, c.causal)
        loader = builder.add_draft_model(*arguments)
        with pytest.raises(EngineError, match="already has a draft model"):
            builder.add_draft_model(*arguments)
        checkpoint.load_into(builder)
        with pytest.raises(EngineError, match="25 of 25 tensors of the draft model are missing"):
            builder.finish()
    with open_checkpoint(target) as checkpoint, DraftModel(tmp_path / "d", ROWS) as draft:
        builder = _native.EngineBuilder(dict(checkpoint.config.fields), "cpu", 1)
        loader = builder.add_draft_model(*arguments)
        draft.load_into(loader)
        checkpoint.load_into(builder)
        engine = builder.finish()
        assert engine.draft_config is not None
        del engine, builder
        with pytest.raises(EngineError, match=r"fc\.weight was given twice"):
            loader.add("fc.weight", np.ones((64, 128), np.float32))


# -- command line ----------------------------------------------------------------------------------------


def test_generate_with_a_draft_model(target: Path, tmp_path: Path) -> None:
    """Catches an option that is not passed on: the output is that of plain decoding, the statistics say who drafted."""
    draft = write_draft(tmp_path / "d")
    common = ("generate", target, "--prompt", "to be or not to be", "--max-tokens", "20", "--ignore-eos", "--json")
    plain = kdtree(*common, "--drafter", "none").json
    trace = tmp_path / "trace.jsonl"
    options = ("--draft-model", draft, "--draft-option", "block_size=rows", "--budget", "8", "--trace", trace)
    for drafter in ("auto", "dflash"):
        run = kdtree(*common, *options, "--drafter", drafter)
        assert run.code == 0, run.err
        assert run.json["tokens"] == plain["tokens"] and run.json["stats"]["drafted"] > 50
        rounds = [json.loads(line) for line in trace.read_text().splitlines()]
        assert len(rounds) == run.json["stats"]["rounds"] and all(r["asked"] & TABLE for r in rounds)
    run = kdtree(*common, *options, "--drafter", "auto", "--draft-option", "width=1", "--budget", "64")
    assert run.code == 0 and run.json["tokens"] == plain["tokens"]
    for r in (json.loads(line) for line in trace.read_text().splitlines()):
        table = [(parent, source) for parent, source in zip(r["parents"], r["sources"], strict=True) if source & TABLE]
        assert len({parent for parent, _ in table}) == len(table) == 7, "the table's nodes are no chain"
    assert_refused(kdtree(*common[:-1], "--draft-model", draft), "block_size 8", "block_size=rows")
    assert_refused(
        kdtree(*common[:-1], "--draft-model", draft, "--draft-option", "yarn=old"), "yarn", "ratio or legacy"
    )
    assert_refused(kdtree(*common[:-1], "--trace", tmp_path / "no" / "where"), "--trace", "No such file")


def test_verify_with_a_draft_model(target: Path, tmp_path: Path) -> None:
    run = kdtree("verify", target, "--drafter", "auto", "--draft-model", write_draft(tmp_path / "d"),
                 "--draft-option", "block_size=rows", "--prompt", "abc" * 12, "--max-tokens", "24",
                 "--ignore-eos")  # fmt: skip
    assert run.code in (0, 2) and ("identical" in run.out or "nothing was tested" in run.out), run
