"""Law 3: prompt rows, plain decoding and tree rows are one forward; how work is cut changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
from models import SPECS, build, prompt
from runs import assert_same, generate, open_session

from kdtree_engine import _native


@pytest.fixture(scope="module", params=list(SPECS))
def engine(request: pytest.FixtureRequest) -> _native.Engine:
    return build(SPECS[request.param], threads=2)


def prefilled(engine: _native.Engine, length: int, **kwargs: int) -> _native.Session:
    session = open_session(engine, **kwargs)
    session.score(prompt(engine.config["vocab_size"], length, seed=3))
    return session


@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 65, 256])
def test_prompt_chunking_changes_no_bit(engine: _native.Engine, rows: int) -> None:
    """Catches an op that treats the last row of a chunk, or a chunk border, specially."""
    def run(prefill_rows: int) -> object:
        session = open_session(engine, prefill_rows=prefill_rows)
        session.append(prompt(engine.config["vocab_size"], 150, seed=4))
        return generate(session, 6)

    assert_same(run(rows), run(150))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [1, 5, 62, 63, 64, 65, 127])
def test_chain_of_tree_rows_equals_prompt_rows(engine: _native.Engine, start: int) -> None:
    """Catches scratch keys read with other arithmetic than page keys: a chain is plain text."""
    vocab = engine.config["vocab_size"]
    text = prompt(vocab, 20, seed=start)
    n = len(text)
    chain, _ = prefilled(engine, start).run_rows(
        text, list(range(start, start + n)), [start] * n, [list(range(i + 1)) for i in range(n)], list(range(n))
    )
    plain = prefilled(engine, start).score(text)
    assert chain.tobytes() == plain.tobytes()


@pytest.mark.parametrize("start", [3, 60, 64])
def test_node_equals_its_ancestor_chain(engine: _native.Engine, start: int) -> None:
    """Catches a mask, position or slot error in any branch of a full-size tree: 65 rows, random shape."""
    rng = np.random.default_rng(start)
    vocab = engine.config["vocab_size"]
    parents = [-1] + [int(rng.integers(max(0, i - 6), i)) for i in range(1, 65)]
    tokens = prompt(vocab, 65, seed=start + 1)
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [i])
    session = prefilled(engine, start)
    tree, _ = session.run_rows(
        tokens, [start + len(p) - 1 for p in paths], [start] * 65, paths, list(range(65))
    )
    for i in [0, 1, 17, 33, 40, 63, 64]:
        chain = prefilled(engine, start).score([tokens[j] for j in paths[i]])
        assert tree[i].tobytes() == chain[-1].tobytes(), f"node {i} at depth {len(paths[i]) - 1}"


def test_fewer_logits_or_taps_change_no_bit(engine: _native.Engine) -> None:
    """Catches an output whose bits depend on what else was asked for."""
    vocab = engine.config["vocab_size"]
    tokens = prompt(vocab, 12, seed=8)
    args = (tokens, [9] * 12, [9] * 12, [[i] for i in range(12)])
    everything, taps = prefilled(engine, 9).run_rows(*args, list(range(12)), list(range(12)), [0, 2])
    assert taps.shape == (12, 2 * engine.config["hidden_size"]) and np.isfinite(taps).all()
    some, none = prefilled(engine, 9).run_rows(*args, [7, 2])
    assert none.size == 0
    assert some.tobytes() == everything[[7, 2]].tobytes()
    _, one_tap = prefilled(engine, 9).run_rows(*args, [], [5], [2])
    assert one_tap.tobytes() == taps[5, engine.config["hidden_size"] :].tobytes()


def test_a_layer_is_tapped_once(engine: _native.Engine) -> None:
    """Catches the second place of a layer's taps left as it was: what lay in memory."""
    with pytest.raises(_native.Error, match="tap layer 2 is named twice"):
        prefilled(engine, 9).run_rows([1], [9], [10], [[]], [], [0], [2, 0, 2])


def test_commit_then_decode_equals_fresh_prefill(engine: _native.Engine) -> None:
    """Catches a commit that rounds, misplaces or drops a latent."""
    session = open_session(engine)
    session.append(prompt(engine.config["vocab_size"], 61, seed=6))
    truth = open_session(engine)
    truth.append(prompt(engine.config["vocab_size"], 61, seed=6))
    generate(truth, 40)
    run = generate(
        session, 40, budget=31, drafter=_native.PlantedDrafter(truth.tokens, engine.config["vocab_size"], 9)
    )
    fresh = open_session(engine)
    logits = fresh.score(session.tokens[:-1])
    assert run.logits.tobytes() == logits[60:].tobytes()
    for layer, latents in enumerate(run.caches):
        assert latents.tobytes() == fresh.cache(layer).tobytes()


@pytest.mark.parametrize("name", ["k2_int4", "mixed_ragged"])
def test_threads_and_instruction_sets_are_one_device_kind(name: str) -> None:
    """Catches a code path that sums in another order: threads 1, 2, 3 and every instruction set of this machine."""
    reference = None
    for isa in ["portable", "avx2", "avx512"]:
        for threads in [1, 2, 3]:
            try:
                engine = build(SPECS[name], threads=threads, isa=isa)
            except _native.Error as error:
                assert error.code == "unsupported", error  # type: ignore[attr-defined]
                continue
            session = open_session(engine)
            session.append(prompt(engine.config["vocab_size"], 40, seed=1))
            run = generate(session, 12, temperature=0.7, seed=1)
            if reference is None:
                reference = run
            assert_same(run, reference)
    assert reference is not None
