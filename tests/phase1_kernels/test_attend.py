"""Attention over a row's virtual key sequence: committed prefix, then ancestors by depth."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_inputs import ISAS, Batch, World, attend, attend_float64, normal, same_bits, world

from harness.reference import ddtree
from kdtree_engine._native import ops

EDGES = [1, 2, 62, 63, 64, 65, 127, 128, 129]


def random_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Parents of a random tree of `nodes` draft nodes; -1 for the root."""
    return np.array([-1] + [int(rng.integers(0, i + 1)) for i in range(nodes)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("latent", "rope", "heads"), [(32, 8, 4), (37, 10, 5), (16, 0, 1), (96, 33, 17), (512, 64, 3)])
def test_close_to_float64(isa: str, latent: int, rope: int, heads: int) -> None:
    """Catches a wrong key, scale, value width or normalisation, for prompt and tree rows of several sequences whose
    pages lie in any order. Tolerance: 1e-5 of outputs of magnitude 1."""
    rng = np.random.default_rng(latent)
    lengths = [64, 1, 130, 63]
    w = world(rng, lengths, latent, rope)
    batch = Batch()
    for s, length in enumerate(lengths):
        batch.add(s, length, [])
        batch.add(s, length, [3])
        batch.add(s, length, [0, 7, 2, 64])
        batch.add(s, max(1, length // 2), [])
    q = normal(rng, len(batch.prefix), heads, latent + rope)
    out = attend(w, q, batch, scale=(latent + rope) ** -0.5, isa=isa, threads=2)
    wide = attend_float64(w, q, batch, scale=(latent + rope) ** -0.5)
    assert np.abs(out - wide).max() < 1e-5


def committed(w: World, sequence: int, keys: np.ndarray) -> World:
    """The same world with `keys` as the whole committed prefix of a sequence, in pages of its own."""
    count = (len(keys) + 63) // 64
    flat = np.full((count * 64, w.width), np.nan, dtype=np.float32)
    flat[: len(keys)] = keys
    pages = np.concatenate([w.pages, flat.reshape(count, 64, w.width)[::-1]])
    table = np.full((len(w.page_table), max(count, w.page_table.shape[1])), -1, dtype=np.int32)
    table[:, : w.page_table.shape[1]] = w.page_table
    table[sequence] = -1
    table[sequence, :count] = len(w.pages) + np.arange(count)[::-1]
    return World(pages, w.scratch, table, w.latent, w.rope)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("prefix", EDGES)
def test_keys_from_pages_and_from_scratch_are_the_same(isa: str, prefix: int) -> None:
    """Catches arithmetic that depends on where a key lies: any number of the last keys moves from the pages to scratch,
    across chunk borders, and no bit may change. This is what makes a tree row equal to plain decoding."""
    rng = np.random.default_rng(prefix)
    w = world(rng, [prefix], 40, 8)
    q = normal(rng, 1, 6, w.width)
    for depth in (1, 2, 5, 64, 65):
        ancestors = [int(a) for a in rng.permutation(65)[:depth]]
        batch = Batch()
        batch.add(0, prefix, ancestors)
        tree_row = attend(w, q, batch, isa=isa)
        keys = w.keys(0, prefix, ancestors)
        plain = Batch()
        plain.add(0, len(keys), [])
        assert same_bits(tree_row, attend(committed(w, 0, keys), q, plain, isa=isa)), (prefix, depth)
        some = depth // 2
        mixed = Batch()
        mixed.add(0, prefix + some, ancestors[some:])
        assert same_bits(tree_row, attend(committed(w, 0, keys[: prefix + some]), q, mixed, isa=isa)), (prefix, depth)


@pytest.mark.parametrize("prefix", [4095, 4096, 4097])
def test_long_prefix(prefix: int) -> None:
    """Catches a split or an index that breaks at a page table's far end: against float64, and tree row against page
    row, bit for bit."""
    rng = np.random.default_rng(prefix)
    w = world(rng, [prefix], 24, 8)
    q = normal(rng, 1, 4, w.width)
    batch, plain = Batch(), Batch()
    batch.add(0, prefix, [5, 9, 1])
    out = attend(w, q, batch, threads=2)
    assert np.abs(out - attend_float64(w, q, batch)).max() < 1e-5
    plain.add(0, prefix + 3, [])
    assert same_bits(out, attend(committed(w, 0, w.keys(0, prefix, [5, 9, 1])), q, plain))


@pytest.mark.parametrize("start", [1, 10, 61, 64, 100])
def test_whole_tree_equals_its_chains_and_the_mask(start: int) -> None:
    """Catches a wrong ancestor list in any of 65 rows: each row against the one-row chain of its ancestors, bit for
    bit, and all rows against the documented bitmask of visibility in float64."""
    rng = np.random.default_rng(start)
    w = world(rng, [start], 32, 8)
    parent = random_tree(rng, 64)
    batch = Batch()
    for i in range(65):
        batch.add(0, start, ddtree.ancestors(parent, i))
    q = normal(rng, 65, 4, w.width)
    out = attend(w, q, batch, threads=2)
    for i in range(65):
        chain = Batch()
        chain.add(0, start, batch.ancestors[i])
        assert same_bits(out[i : i + 1], attend(w, q[i : i + 1].copy(), chain)), i
    mask = np.concatenate([np.ones((65, start), dtype=bool), ddtree.visible(parent)], axis=1)
    keys = np.concatenate([w.keys(0, start, []), w.scratch]).astype(np.float64)
    s = np.where(mask[:, None], q.astype(np.float64) @ keys.T * 0.25, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    assert np.abs(out - p / p.sum(axis=2, keepdims=True) @ keys[:, :32]).max() < 1e-5


def test_one_key_is_its_value() -> None:
    """Catches a first chunk that reads what the output held before: one key has weight exactly 1."""
    rng = np.random.default_rng(0)
    w = world(rng, [1], 20, 4)
    batch = Batch()
    batch.add(0, 1, [])
    out = attend(w, normal(rng, 1, 3, 24), batch)
    assert same_bits(out[0], np.repeat(w.keys(0, 1, [])[:, :20], 3, axis=0))


def test_scores_far_apart() -> None:
    """Catches a softmax without its maximum, or one that forgets to rescale when a later chunk raises it: scores rise
    by thousands from chunk to chunk, and the last key takes all."""
    rng = np.random.default_rng(1)
    w = world(rng, [200], 16, 0)
    flat = np.zeros((256, 16), dtype=np.float32)
    flat[:200] = normal(rng, 200, 16)
    flat[:, 0] = np.arange(256)
    w.pages[w.page_table[0]] = flat.reshape(4, 64, 16)
    q = np.zeros((2, 1, 16), dtype=np.float32)
    q[0, 0, 0], q[1, 0, 0] = 1000.0, -1000.0
    batch = Batch()
    batch.add(0, 200, [])
    batch.add(0, 200, [])
    out = attend(w, q, batch)
    assert same_bits(out[0, 0], flat[199]) and same_bits(out[1, 0], flat[0])


def test_a_nan_key_reaches_only_those_who_see_it() -> None:
    """Catches masked slots that are multiplied by zero instead of not being read: 0 * NaN is NaN."""
    rng = np.random.default_rng(2)
    w = world(rng, [70], 16, 4)
    w.scratch[2] = np.nan
    batch = Batch()
    batch.add(0, 70, [0, 1])
    batch.add(0, 70, [0, 2])
    batch.add(0, 70, [])
    out = attend(w, normal(rng, 3, 2, 20), batch)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all() and np.isfinite(out[2]).all()


# ------------------------------------------------------------------------------------------------------------
# writing latents, committing


def test_latents_land_where_they_belong() -> None:
    """Catches a slot, page or scratch row mixed up, rope at another position than the row's, a norm over the rope part,
    and any write beside the slot: everything else keeps its bytes."""
    rng = np.random.default_rng(3)
    latent, rows = 12, 7
    pages = np.full((4, 64, 18), -1, dtype=np.int32).view(np.float32)
    scratch = np.full((65, 18), -1, dtype=np.int32).view(np.float32)
    table = np.array([[2, 0], [1, 3]], dtype=np.int32)
    weight, ckv = normal(rng, latent), normal(rng, rows, 18)
    angle = np.arange(128)[:, None] * np.array([1.0, 0.1, 0.01])
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    batch = Batch()
    for sequence, position in ((0, 0), (0, 63), (0, 64), (1, 127)):
        batch.add(sequence, position + 1, [])
    batch.add(1, 5, [4])
    batch.add(1, 5, [4, 5])
    batch.add(0, 100, [4, 6])
    ops.write_latent(ckv, weight, 1e-6, cos, sin, True, pages, scratch, table, **batch.arrays())
    places = [(2, 0), (2, 63), (0, 0), (3, 63)]
    normed = ops.rms_norm(ckv, weight, 1e-6)
    for i in range(rows):
        slot = pages[places[i]] if i < 4 else scratch[i]
        assert same_bits(slot[:latent].copy(), normed[i])
        c, s = cos[batch.position[i]].astype(np.float64), sin[batch.position[i]].astype(np.float64)
        x = ckv[i, latent:].astype(np.float64)
        assert np.abs(slot[latent::2] - (x[::2] * c - x[1::2] * s)).max() < 1e-6
        assert np.abs(slot[latent + 1 :: 2] - (x[1::2] * c + x[::2] * s)).max() < 1e-6
        slot[:] = np.full(18, -1, dtype=np.int32).view(np.float32)
    assert (pages.view(np.int32) == -1).all() and (scratch.view(np.int32) == -1).all()


def test_commit_copies_the_path_in_order() -> None:
    """Catches rows committed in another order, across a page border, or to another sequence."""
    rng = np.random.default_rng(4)
    pages = normal(rng, 5, 64, 9)
    scratch, table = normal(rng, 65, 9), np.array([[0, 1], [4, 2]], dtype=np.int32)
    before = pages.copy()
    path = np.array([0, 3, 64, 7, 12], dtype=np.int32)
    ops.commit(path, 61, 1, pages, scratch, table)
    for j, row in enumerate(path):
        page, slot = (4, 61 + j) if 61 + j < 64 else (2, 61 + j - 64)
        assert same_bits(pages[page, slot].copy(), scratch[row].copy())
        before[page, slot] = pages[page, slot]
    assert same_bits(pages, before)
