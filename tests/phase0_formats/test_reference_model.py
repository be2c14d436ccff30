"""The oracle's model against itself: algebraically equal forms agree, and every known mistake is far outside
the tolerance that engine tests use.

Each mistake below is one that a released engine or loader has made. It is built into the oracle on purpose; a
test fails if the tolerance of 1e-5 * max(1, largest |logit|) could not tell it from the right model.
"""

from __future__ import annotations

import numpy as np
import pytest

from harness.golden import hashing, models
from harness.reference import config as fields
from harness.reference import ddtree, quant, rope, round
from harness.reference.model import LayerCache, Model, best_first, silu

TOLERANCE = 1e-5

# K2-like: YaRN with a softmax correction and, unlike K2, an amplitude that is not 1; small embeddings and
# latents, so that each eps carries weight.
CONFIG = dict(models.TINY.config) | {
    "vocab_size": 160,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "n_group": 2,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}
TOKENS = [int(t) for t in hashing.integers("model/tokens", (48,), 0, 160)]


def make_weights():
    made = models.weights(models.Shape("reference", 0, CONFIG), 0)
    made["model.embed_tokens.weight"] = made["model.embed_tokens.weight"] * np.float32(2.0**-5)
    for name in made:
        if name.endswith(("kv_a_proj_with_mqa.weight", "q_a_proj.weight")):
            made[name] = made[name] * np.float32(2.0**-4)
        if name.endswith("e_score_correction_bias"):
            made[name] = made[name] - np.float32(1.0)  # choice values below zero
    return made


WEIGHTS = make_weights()


def quantise_experts(scale_dtype):
    out = {}
    for name, value in WEIGHTS.items():
        if ".mlp.experts." in name:
            words, scale = quant.quantize_w4a16(value, scale_dtype)
            out[name.removesuffix(".weight") + ".qw"], out[name.removesuffix(".weight") + ".sc"] = (
                words,
                scale,
            )
        else:
            out[name] = value
    return out


INT4 = quantise_experts("bf16")


def logits(kind=Model, weights=INT4, config=None, **options):
    return kind(config or CONFIG, weights, **options).forward(TOKENS, range(len(TOKENS))).logits


@pytest.fixture(scope="module")
def truth():
    return logits()


def allowed(truth):
    return TOLERANCE * max(1.0, float(np.abs(truth).max()))


# ------------------------------------------------------------------------------------------------------------
# what is equal


def test_absorbed_attention_is_expanded_attention(truth):
    """A transposed kv_b slice or a scale on one side only breaks the identity."""
    assert np.abs(logits(absorbed=True) - truth).max() < 1e-12


@pytest.mark.parametrize("absorbed", [False, True])
def test_float32_is_within_the_tolerance(truth, absorbed):
    """The tolerance must leave room for float32, or engines could not meet it."""
    single = logits(dtype=np.float32, absorbed=absorbed)
    assert single.dtype == np.float32
    assert np.abs(single - truth).max() < allowed(truth)


def test_int4_is_float_with_dequantised_weights(truth):
    """Codes and scales must act as the matrix they stand for."""
    dense = dict(INT4)
    for name in [n for n in INT4 if n.endswith(".qw")]:
        stem = name.removesuffix(".qw")
        dense[f"{stem}.weight"] = quant.dequantize(dense.pop(name), dense.pop(f"{stem}.sc"))
    assert np.array_equal(logits(weights=dense), truth)


def test_bf16_weights_are_widened():
    """uint16 arrays are bf16 bits; read as integers they would be huge."""
    bits = {k: quant.bf16_bits(v) for k, v in WEIGHTS.items()}
    wide = {k: quant.from_bf16_bits(v) for k, v in bits.items()}
    assert np.array_equal(logits(weights=bits), logits(weights=wide))


@pytest.mark.parametrize("cut", [1, 7, 47])
def test_chunks_do_not_matter(truth, cut):
    """A cache that holds latents before the norm, or keys before RoPE, shows when a later chunk reads it."""
    model = Model(CONFIG, INT4)
    first = model.forward(TOKENS[:cut], range(cut))
    second = model.forward(TOKENS[cut:], range(cut, len(TOKENS)), cache=first.cache)
    assert np.abs(np.concatenate([first.logits, second.logits]) - truth).max() < 1e-12


def random_tree(nodes):
    table = hashing.integers("model/tree", (12, 4), 0, 160)
    logp = -np.cumsum(hashing.integers("model/logp", (12, 4), 1, 40), axis=1).astype(np.float32) / 32
    return ddtree.build_tree(TOKENS[-1], table, logp, nodes, 12)


def test_tree_rows_equal_their_ancestor_chains():
    """Each node of a tree must compute what decoding its path alone computes: siblings must not be seen, and
    positions go by depth, not by row."""
    model, tree, start = Model(CONFIG, INT4), random_tree(20), len(TOKENS) - 1
    prefix = model.forward(TOKENS[:-1], range(start))
    seen = np.concatenate([np.ones((21, start), dtype=bool), ddtree.visible(tree.parent)], axis=1)
    out = model.forward(tree.token, start + tree.depth, seen, prefix.cache)
    for node in range(21):
        chain = tree.token[ddtree.ancestors(tree.parent, node)].tolist()
        alone = model.forward(chain, range(start, start + len(chain)), cache=prefix.cache)
        assert np.abs(out.logits[node] - alone.logits[-1]).max() < 1e-12, node


@pytest.mark.parametrize("budget", [0, 1, 5, 33, 64])
def test_ddtree_decoding_is_plain_decoding(budget):
    """Tables with the truth at changing ranks: an accepted row committed to the wrong place, or a bonus token
    skipped, changes what follows."""
    model = Model(CONFIG, INT4)
    plain = round.decode_plain(model, TOKENS, 20)

    def draft(root, position):
        at = position - len(TOKENS) + 1
        token = hashing.integers(f"model/draft/{position}", (6, 3), 0, 160)
        for d, true in enumerate(plain.tokens[at : at + 1 + position % 6]):
            token[d, (position + d) % 3] = true
        logp = np.tile(np.array([-0.75, -1.0, -1.25], dtype=np.float32), (6, 1))
        return ddtree.build_tree(root, token, logp, budget, 6)

    tree = round.decode_ddtree(model, TOKENS, 20, draft)
    assert tree.tokens == plain.tokens
    assert np.abs(tree.logits - plain.logits).max() < 1e-12
    assert sum(len(r.accepted.emitted) for r in tree.rounds) == 19
    assert (tree.target_forwards < 20) == (budget > 0)


# ------------------------------------------------------------------------------------------------------------
# what is wrong


def config_with(**changes):
    return lambda: logits(config=CONFIG | changes)


def subclass(**methods):
    return lambda: logits(type("Mistake", (Model,), methods))


def with_weights(change):
    return lambda: logits(weights={k: change(k, v) for k, v in INT4.items()})


def bf16(x):
    return quant.from_bf16_bits(quant.bf16_bits(x))


def bias_in_weights(self, score, chosen, name):
    return Model.combine_weights(self, self.choice(score, name), chosen, name)


def normalised_over_all(self, score, chosen, name):
    return (
        Model.combine_weights(self, score, chosen, name)
        * np.take_along_axis(score, chosen, -1).sum(axis=-1, keepdims=True)
        / score.sum(axis=-1, keepdims=True)
    )


def best_of_group(self, choice):
    grouped = choice.reshape(len(choice), 2, -1)
    inside = grouped.max(axis=-1) == grouped.max(axis=(1, 2))[:, None]
    return np.where(inside[..., None], grouped, -np.inf).reshape(choice.shape)


def masked_to_zero(self, choice):
    limited = Model.limited_to_groups(self, choice)
    return np.where(np.isinf(limited), 0.0, limited)


def shared_scaled(self, h, name):
    if name.endswith("shared_experts"):
        return Model.mlp(self, h, name) * self.config["routed_scaling_factor"]
    return Model.mlp(self, h, name)


def silu_on_up(self, x, name):
    gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
    return self.linear(gate * silu(up), f"{name}.down_proj")


def weight_on_the_input(self, h, name):
    chosen, weight = self.route(h, f"{name}.gate")
    y = self.mlp(h, f"{name}.shared_experts")
    for slot in range(chosen.shape[1]):
        for row, expert in enumerate(chosen[:, slot]):
            y[row] += self.mlp(h[row : row + 1] * weight[row, slot], f"{name}.experts.{expert}")[0]
    return y


def latent_without_norm(self, h, name, position):
    ckv = self.linear(h, f"{name}.kv_a_proj_with_mqa")
    entry = Model.latent(self, h, name, position)
    return LayerCache(ckv[:, :64], entry.rope)


def rope_part_normed(self, h, name, position):
    entry = Model.latent(self, h, name, position)
    scale = 1 / np.sqrt((entry.rope**2).mean(axis=-1, keepdims=True) + 1e-6)
    return LayerCache(entry.latent, entry.rope * scale)


def rope_part_first(self, h, name, position):
    q = self.linear(
        self.latent_norm(self.linear(h, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj"
    )
    q = q.reshape(len(h), 4, -1)
    return q[..., 16:], self.rotate(q[..., :16], position)


def keys_only_halves(self, h, name, position):
    entry = Model.latent(self, h, name, position)
    order = np.r_[0:16:2, 1:16:2]
    return LayerCache(entry.latent, entry.rope[:, order])


def kv_b_values_first(name, value):
    if name.endswith("kv_b_proj.weight"):
        return np.roll(value.reshape(4, 64, -1), 32, axis=1).reshape(value.shape)
    return value


def kv_b_by_kind(name, value):
    if name.endswith("kv_b_proj.weight"):
        return value.reshape(2, 4, 32, -1).transpose(1, 0, 2, 3).reshape(value.shape)
    return value


def nibbles_high_first(name, value):
    if name.endswith(".qw"):
        return quant.pack(quant.unpack(value).reshape(len(value), -1, 8)[..., ::-1].reshape(len(value), -1))
    return value


def dequantised_in_bf16(self, words, scale):
    return bf16(quant.dequantize(words, scale))


def unsigned_codes(self, words, scale):
    return quant.dequantize(words, scale) + np.repeat(scale, quant.GROUP, axis=1)


NEVER_YARN = {
    "rope_factor": 0.0,
    "rope_original_max_position_embeddings": 0.0,
    "rope_beta_fast": 0.0,
    "rope_beta_slow": 0.0,
    "rope_mscale": 0.0,
    "rope_mscale_all_dim": 0.0,
}
PLAIN_SCALE = float(48**-0.5)
CORRECTION = rope.softmax_scale(CONFIG) / PLAIN_SCALE

MISTAKES = {
    # norms
    "latent eps from rms_norm_eps": config_with(latent_norm_eps=1e-5),
    "every eps 1e-6": config_with(rms_norm_eps=1e-6),
    "eps outside the root": subclass(
        rms_norm=lambda self, x, name, eps: (
            x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps) * self.weights[f"{name}.weight"]
        )
    ),
    "latent cached before its norm": subclass(latent=latent_without_norm),
    "rope part of the latent normed too": subclass(latent=rope_part_normed),
    # RoPE and YaRN
    "RoPE pairs as halves": config_with(rope_interleave=0),
    "keys permuted, queries not": subclass(latent=keys_only_halves),
    "no softmax correction": subclass(softmax_scale=lambda self: PLAIN_SCALE),
    "softmax correction m instead of m^2": subclass(softmax_scale=lambda self: PLAIN_SCALE * CORRECTION**0.5),
    "softmax scale of the nope part alone": subclass(softmax_scale=lambda self: float(32**-0.5) * CORRECTION),
    "amplitude left out": config_with(rope_mscale=CONFIG["rope_mscale_all_dim"]),
    "no YaRN at all": config_with(**NEVER_YARN),
    "betas swapped": config_with(rope_beta_fast=1.0, rope_beta_slow=32.0),
    "beta_fast defaulted to 1": config_with(rope_beta_fast=1.0),
    "factor of another release": config_with(rope_factor=16.0),
    "keys one position late": subclass(
        rotate=lambda self, x, position: Model.rotate(self, x, position + (x.ndim == 2)),
    ),
    # attention
    "query as rope then nope": subclass(query=rope_part_first),
    "kv_b values before keys": with_weights(kv_b_values_first),
    "kv_b all keys, then all values": with_weights(kv_b_by_kind),
    # router
    "bias in the combine weight": subclass(combine_weights=bias_in_weights),
    "bias ignored in the choice": subclass(choice=lambda self, score, name: score),
    "weights normalised over all experts": subclass(combine_weights=normalised_over_all),
    "weights not normalised": config_with(norm_topk_prob=0),
    "scaling factor left out": config_with(routed_scaling_factor=1.0),
    "softmax instead of sigmoid": subclass(
        scores=lambda self, x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    ),
    "no groups": config_with(n_group=1, topk_group=1),
    "group score by its best": subclass(limited_to_groups=best_of_group),
    "other groups masked to zero": subclass(limited_to_groups=masked_to_zero),
    # experts
    "no shared expert": config_with(n_shared_experts=0),
    "shared expert scaled": subclass(mlp=shared_scaled),
    "silu on up": subclass(mlp=silu_on_up),
    "router weight on the expert's input": subclass(moe=weight_on_the_input),
    "one dense layer too many": lambda: logits(
        weights=INT4
        | {
            f"model.layers.1.mlp.{p}_proj.weight": WEIGHTS[f"model.layers.0.mlp.{p}_proj.weight"]
            for p in ("gate", "up", "down")
        },
        config=CONFIG | {"first_k_dense_replace": 2},
    ),
    # INT4
    "q*s rounded to bf16": subclass(dequantized=dequantised_in_bf16),
    "offset 7 instead of 8": subclass(dequantized=unsigned_codes),
    "highest nibble first": with_weights(nibbles_high_first),
    "scales of the neighbouring group": with_weights(
        lambda k, v: np.roll(v, 1, axis=1) if k.endswith(".sc") else v
    ),
    # whole model
    "norm after the head left out": subclass(
        layer_norm=lambda self, x, name: x if name == "model.norm" else Model.layer_norm(self, x, name)
    ),
    "head tied to the embedding": with_weights(
        lambda k, v: WEIGHTS["model.embed_tokens.weight"] if k == "lm_head.weight" else v
    ),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_tolerance_tells_a_mistake(truth, name):
    """Each at least three times the tolerance away at some position."""
    difference = float(np.abs(MISTAKES[name]() - truth).max())
    assert difference > 3 * allowed(truth), f"{name}: {difference:.1e}, allowed {allowed(truth):.1e}"


def test_sizes_of_the_mistakes_are_ordered(truth):
    """What a coarser comparison could still see: bf16 noise of about 3e-2 hides eps and weight rounding, not
    RoPE."""
    size = {name: float(np.abs(MISTAKES[name]() - truth).max()) for name in MISTAKES}
    assert size["q*s rounded to bf16"] < 3e-2 < size["RoPE pairs as halves"]
    assert size["q*s rounded to bf16"] < size["bias in the combine weight"]


def test_eps_on_small_latents():
    """eps has its own test: at latents of 1e-3 its size decides the result, at latents of 1 hardly a
    digit."""
    model = Model(CONFIG, INT4)
    name = "model.layers.0.self_attn.kv_a_layernorm"
    for scale, low, high in ((1e-3, 0.2, 0.9), (1.0, 1e-7, 1e-4)):
        x = hashing.dyadic("model/eps", (4, 64), 255, 8).astype(np.float64) * scale
        right, other = model.rms_norm(x, name, 1e-6), model.rms_norm(x, name, 1e-5)
        assert low < np.abs(right - other).max() / np.abs(right).max() < high


def test_noaux_tc_by_hand():
    """Selection by biased score inside the best group, weights by plain score: worked out on paper."""
    config = CONFIG | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 2.0}
    model = Model(config, WEIGHTS)
    logit = np.log(np.array([[0.9, 0.2, 0.3, 0.1, 0.6, 0.5, 0.4, 0.2]]))
    logit = logit - np.log1p(-np.exp(logit))  # sigmoid gives the numbers above
    bias = np.array([-0.8, 0.0, 0.0, 0.0, -0.2, 0.0, 0.3, 0.0])
    # choice: .1 .2 .3 .1 | .4 .5 .7 .2 -> group sums .5 and 1.2 -> second group -> experts 6 and 5
    model.weights["gate.e_score_correction_bias"] = bias
    model.weights["gate.weight"] = np.eye(8)
    expert, weight = model.route(logit, "gate")
    assert expert.tolist() == [[6, 5]]
    assert np.allclose(weight, [[2.0 * 0.4 / 0.9, 2.0 * 0.5 / 0.9]])


def test_softmax_greedy_by_hand():
    """V2: probabilities over all experts, best two, no normalisation; a group counts by its best expert."""
    config = CONFIG | {"scoring": fields.SOFTMAX_GREEDY, "norm_topk_prob": 0, "routed_scaling_factor": 16.0}
    config |= {"n_group": 4, "topk_group": 2}
    model = Model(config, WEIGHTS)
    model.weights["gate.weight"] = np.eye(8)
    p = np.array([[0.30, 0.01, 0.02, 0.17, 0.16, 0.16, 0.08, 0.10]])
    expert, weight = model.route(np.log(p), "gate")
    assert expert.tolist() == [[0, 3]]  # by sums the third group, 4 and 5, would displace the second
    assert np.allclose(weight, 16.0 * p[0, [0, 3]] / p.sum())


def test_ties_go_to_the_lower_index():
    assert best_first(np.array([[1.0, 3.0, 3.0, 0.0, 3.0]]), 4).tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("rope_theta"), "rope_theta"),
        (lambda c: c.update(rope_scaling=1.0), "rope_scaling"),
        (lambda c: c.update(n_group=1.5), "n_group"),
    ],
)
def test_config_is_exact(change, message):
    """A default for a missing number would be fluent and wrong."""
    config = dict(CONFIG)
    change(config)
    with pytest.raises(ValueError, match=message):
        Model(config, INT4)


def test_missing_and_misshapen_weights_are_named():
    without = {k: v for k, v in INT4.items() if k != "lm_head.weight"}
    with pytest.raises(KeyError, match="lm_head"):
        Model(CONFIG, without)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        Model(CONFIG, INT4 | {"lm_head.weight": WEIGHTS["lm_head.weight"].T})
