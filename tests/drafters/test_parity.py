"""The engine's draft model against the numpy oracle, over whole generations: features, keys and draft logits.

The second half breaks the oracle on purpose, once for each way in which drafters are known to go wrong without an
error, and asserts that the comparison sees it: the same mistake in the engine would not pass the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from draft_models import FLOAT32_IDS, FLOAT32_RUNS, Pair, Watched, pair, require, watch
from models import prompt
from runs import open_session

from harness.reference import dflash
from kdtree_engine import _native

PROMPT, TOKENS = 70, 66  # the context crosses two borders of pages and chunks
TOLERANCE = 1e-5


@cache
def watched(name: str, device: str = "cpu") -> tuple[Pair, Watched, np.ndarray]:
    """A generation whose paths are long (planted beside the draft model's table), and the oracle's taps of it."""
    p = pair(name, device)
    plain = open_session(p.engine)
    plain.append(prompt(p.vocab, PROMPT, seed=11))
    plain.begin(TOKENS)
    while plain.step().finished is None:
        pass
    session = open_session(p.engine, prefill_rows=32)
    session.append(prompt(p.vocab, PROMPT, seed=11))
    planted = _native.PlantedDrafter(plain.tokens, p.vocab, 5, as_paths=True, break_probability=0.2)
    drafter = _native.CombinedDrafter([_native.DFlashDrafter(), planted])
    seen = watch(session, TOKENS, drafter=drafter, budget=24)
    assert session.tokens == plain.tokens
    lengths = session.stats["accepted_lengths"]
    assert len(seen.drafts) >= 8 and max(lengths) >= 5 and min(lengths) == 1, lengths
    return p, seen, p.taps(session.tokens)


def scale(array: np.ndarray) -> float:
    return max(1.0, float(np.abs(array).max()))


def feature_error(seen: Watched, features: np.ndarray) -> float:
    """Largest difference of any position's feature, in units of the tolerance's scale."""
    return max(np.abs(row - features[i]).max() for i, row in seen.features.items()) / scale(features)


def logit_error(seen: Watched, logits: Callable[[int, int], np.ndarray]) -> float:
    """The same of the draft logits; logits(root token, its position)."""
    worst = 0.0
    for draft in seen.drafts:
        wanted = logits(draft.root, draft.position)
        if wanted.shape != draft.logits.shape:
            return np.inf
        worst = max(worst, np.abs(draft.logits - wanted).max() / scale(wanted))
    return worst


@pytest.mark.parametrize(("name", "device"), FLOAT32_RUNS, ids=FLOAT32_IDS)
def test_features_and_logits_of_a_generation(name: str, device: str) -> None:
    """Catches everything that a drafter computes wrongly in the whole path from taps to logits."""
    require(device)
    p, seen, taps = watched(name, device)
    oracle = p.oracle()
    assert set(seen.features) == set(range(max(seen.features) + 1)) and len(seen.features) > PROMPT + 30
    assert feature_error(seen, oracle.features(taps)) < TOLERANCE
    assert logit_error(seen, lambda root, at: oracle.logits(root, taps[:at])) < TOLERANCE


@pytest.mark.parametrize(("name", "device"), FLOAT32_RUNS, ids=FLOAT32_IDS)
def test_keys_and_values_of_committed_positions(name: str, device: str) -> None:
    """Catches a key without its norm or angle, heads in another order, keys and values in each other's place."""
    require(device)
    p, seen, taps = watched(name, device)
    oracle, ready = p.oracle(), seen.session.draft_positions[0]
    features, position = oracle.features(taps[:ready]), np.arange(ready)
    for layer in range(p.draft.layers):
        wanted = np.stack(oracle.key_value(features, layer, position), axis=1)
        got = seen.session.draft_cache(layer)
        assert got.shape == wanted.shape and np.abs(got - wanted).max() < TOLERANCE * scale(wanted)


@pytest.mark.parametrize(("name", "device"), FLOAT32_RUNS, ids=FLOAT32_IDS)
def test_the_table_is_the_logits(name: str, device: str) -> None:
    """Catches a table from other rows or ranks than the logits have, or a softmax over less than the vocabulary."""
    require(device)
    _, seen, _ = watched(name, device)
    by_position = {d.position: d.logits.astype(np.float64) for d in seen.drafts}
    checked = 0
    for r in seen.rounds:
        logits = by_position[r["position"]]
        logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logp -= logits.max(-1, keepdims=True)
        for i, parent in enumerate(r["parents"]):
            if parent == 0 and r["sources"][i] == 1:  # from the table alone: its own probability
                assert np.isclose(np.log(r["probabilities"][i]), logp[0, r["tokens"][i]], atol=1e-4)
                checked += 1
    assert checked > 20


# ------------------------------------------------------------------------------------------------------------
# known failures, made on purpose in the oracle


class MaskInSlot0(dflash.Drafter):
    def block_tokens(self, root: int) -> list[int]:
        return [self.config.number("mask_token_id")] * self.config.number("block_rows")


class RootEverywhere(dflash.Drafter):
    def block_tokens(self, root: int) -> list[int]:
        return [root] * self.config.number("block_rows")


class MaskRowOfZeros(dflash.Drafter):
    def logits(self, root: int, taps: np.ndarray) -> np.ndarray:
        self.embed = self.embed.copy()
        self.embed[self.config.number("mask_token_id")] = 0
        return super().logits(root, taps)


class AnchorSlotRead(dflash.Drafter):
    def read_out(self, x: np.ndarray) -> np.ndarray:
        return x[:-1] @ self.head.T


class OtherHead(dflash.Drafter):
    def read_out(self, x: np.ndarray) -> np.ndarray:
        return x[1:] @ self.embed.T


class BlockOneLate(dflash.Drafter):
    def block_positions(self, start: int) -> np.ndarray:
        return super().block_positions(start) + 1


class BlockFromZero(dflash.Drafter):
    def block_positions(self, start: int) -> np.ndarray:
        return super().block_positions(0)


class MoreMasksThanTrained(dflash.Drafter):
    def block_tokens(self, root: int) -> list[int]:
        return [*super().block_tokens(root), self.config.number("mask_token_id")]

    def block_positions(self, start: int) -> np.ndarray:
        return start + np.arange(self.config.number("block_rows") + 1)

    def read_out(self, x: np.ndarray) -> np.ndarray:
        return super().read_out(x)[:-1]


class NoWindow(dflash.Drafter):
    def visible(self, layer: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        seen = np.ones((len(query), len(key)), dtype=bool)
        return seen if not self.config.causal[layer] else seen & (query[:, None] >= key[None, :])


class WindowOneShort(dflash.Drafter):
    def visible(self, layer: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        seen = super().visible(layer, query, key)
        window = self.config.window[layer]
        return seen & (np.abs(query[:, None] - key[None, :]) < window - 1) if window else seen


class AllCausal(dflash.Drafter):
    def visible(self, layer: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        return super().visible(layer, query, key) & (query[:, None] >= key[None, :])


class NoneCausal(dflash.Drafter):
    def visible(self, layer: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        window = self.config.window[layer]
        return np.abs(query[:, None] - key[None, :]) < (window or 10**9)


class RatioAmplitude(dflash.Drafter):
    def amplitude(self) -> float:
        return 1.0


class InterleavedPairs(dflash.Drafter):
    def rotate(self, x: np.ndarray, position: np.ndarray) -> np.ndarray:
        order = np.arange(x.shape[-1]).reshape(-1, 2).T.reshape(-1)  # evens, then odds
        y = super().rotate(x[..., order], position)
        return y[..., np.argsort(order)]


class NoYarn(dflash.Drafter):
    def rotate(self, x: np.ndarray, position: np.ndarray) -> np.ndarray:
        plain = dict.fromkeys((f for f in self.config.fields if f.startswith("rope_")), 0.0)
        keep = {"rope_theta": self.config.fields["rope_theta"], "rope_amplitude": self.config.fields["rope_amplitude"]}
        fields = {**self.config.fields, **plain, **keep}
        other = dflash.DraftConfig(fields, self.config.target_layers, self.config.window, self.config.causal)
        mine, self.config = self.config, other
        try:
            return super().rotate(x, position)
        finally:
            self.config = mine


class NoHiddenNorm(dflash.Drafter):
    def features(self, taps: np.ndarray) -> np.ndarray:
        return self.linear(taps, "fc")


class ContextThroughInputNorm(dflash.Drafter):
    def attention(self, h, feature, layer, context, block):  # type: ignore[no-untyped-def]
        feature = self.rms_norm(feature, f"layers.{layer}.input_layernorm.weight")
        return super().attention(h, feature, layer, context, block)


class NoKeyNorm(dflash.Drafter):
    def rms_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x if name.endswith("k_norm.weight") else super().rms_norm(x, name)


class NoQueryNorm(dflash.Drafter):
    def rms_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x if name.endswith("q_norm.weight") else super().rms_norm(x, name)


class KeysAndValuesSwapped(dflash.Drafter):
    def key_value(self, h: np.ndarray, layer: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = super().key_value(h, layer, position)
        return v, k


class HeadsInterleaved(dflash.Drafter):
    """Keys read as [head_dim, heads]."""

    def key_value(self, h: np.ndarray, layer: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = super().key_value(h, layer, position)
        return k, v.reshape(len(v), v.shape[2], v.shape[1]).transpose(0, 2, 1)


class LastPositionMissing(dflash.Drafter):
    """A feature that arrives one round late: the context ends a position early."""

    def attention(self, h, feature, layer, context, block):  # type: ignore[no-untyped-def]
        return super().attention(h, feature[:-1], layer, context[:-1], block)


class StaleFeature(dflash.Drafter):
    """The newest position holds the feature of the one before: a rejected branch's, or a reused slot's."""

    def features(self, taps: np.ndarray) -> np.ndarray:
        c = super().features(taps)
        c[-1] = c[-2]
        return c


class NoDraftCache(dflash.Drafter):
    """Only the block: the context was lost, as behind a prefix cache that knows nothing of drafts."""

    def attention(self, h, feature, layer, context, block):  # type: ignore[no-untyped-def]
        return super().attention(h, feature[:0], layer, context[:0], block)


FAILURES = [value for value in list(globals().values()) if isinstance(value, type) and value.__base__ is dflash.Drafter]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__)
def test_a_known_failure_is_seen(failure: type[dflash.Drafter]) -> None:
    """Catches a comparison too weak for the failure: its error must stand far above the tolerance."""
    p, seen, taps = watched("yarn_windows")
    broken = p.oracle(failure)
    assert logit_error(seen, lambda root, at: broken.logits(root, taps[:at])) > 100 * TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_of_the_next_layer_are_seen(shift: int) -> None:
    """Catches layer ids counted from 1, or hidden states that begin with the embedding: 5.56 instead of 6.61 accepted
    tokens in one report, and no error anywhere."""
    p, seen, _ = watched("plain")
    oracle, layers = p.oracle(), int(p.target.fields["num_hidden_layers"])
    taps = p.taps(seen.session.tokens, [(i + shift) % layers for i in p.draft.taps])
    assert logit_error(seen, lambda root, at: oracle.logits(root, taps[:at])) > 100 * TOLERANCE


def test_taps_in_another_order_are_seen() -> None:
    """Catches taps that are sorted before fc, which takes them in the config's order."""
    p, seen, _ = watched("yarn_windows")
    oracle = p.oracle()
    taps = p.taps(seen.session.tokens, sorted(p.draft.taps))
    assert logit_error(seen, lambda root, at: oracle.logits(root, taps[:at])) > 100 * TOLERANCE
