"""Model bundles: two shapes, each in float32 and with INT4 weights.

A bundle holds the weights under the checkpoint's names, `config.*`, a prompt, the 24 tokens that plain greedy
decoding emits with the logits behind them, draft tables for every position that a round may start from, and
what a DDTree run at budget 64 does with them. Weights come from hashes; a salt is searched so that every
greedy step is decided by at least 1e-3 (no rounding difference can turn a token) and the INT4 model says
something else than the float32 model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.golden import drafts, hashing
from harness.reference import config as fields
from harness.reference import ddtree, quant, round
from harness.reference.model import Model

Array = npt.NDArray[Any]
TOKENS = 24
SMALLEST_GAP = 1e-3
FEWEST_DISTINCT = 8
MOST_FORWARDS = 3


@dataclass(frozen=True)
class Shape:
    """A model's config and the length of its prompt (chosen so that the run crosses a page border)."""

    name: str
    prompt: int
    config: Mapping[str, float | int]


TINY = Shape(
    name="tiny",
    prompt=53,
    config={
        "vocab_size": 320,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring": fields.SIGMOID_NOAUX_TC,
        "norm_topk_prob": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "latent_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": 1,
        "rope_factor": 8.0,
        "rope_original_max_position_embeddings": 64.0,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "rope_mscale": 1.0,
        "rope_mscale_all_dim": 0.75,
        "max_position_embeddings": 512,
    },
)

# Other head widths, no query compression, expert groups, NeoX pairs without YaRN, widths that are no multiple
# of 16.
TINY2 = Shape(
    name="tiny2",
    prompt=115,
    config={
        "vocab_size": 400,
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "q_lora_rank": 0,
        "kv_lora_rank": 72,
        "qk_nope_head_dim": 40,
        "qk_rope_head_dim": 24,
        "v_head_dim": 48,
        "intermediate_size": 320,
        "moe_intermediate_size": 96,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "n_group": 2,
        "topk_group": 1,
        "scoring": fields.SIGMOID_NOAUX_TC,
        "norm_topk_prob": 1,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-6,
        "latent_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_interleave": 0,
        "rope_factor": 0.0,
        "rope_original_max_position_embeddings": 0.0,
        "rope_beta_fast": 0.0,
        "rope_beta_slow": 0.0,
        "rope_mscale": 0.0,
        "rope_mscale_all_dim": 0.0,
        "max_position_embeddings": 256,
    },
)
SHAPES = {shape.name: shape for shape in (TINY, TINY2)}


def weights(shape: Shape, salt: int) -> dict[str, Array]:
    """float32 weights of a shape, each an integer of at most 8 bits times a power of two (exact in bf16)."""
    made: dict[str, Array] = {}
    for name, size in fields.weight_shapes(shape.config).items():
        stream = f"{shape.name}/{salt}/{name}"
        if name.endswith("e_score_correction_bias"):
            made[name] = hashing.dyadic(stream, size, 32, 8)
        elif len(size) == 1:
            made[name] = np.float32(1.0) + hashing.dyadic(stream, size, 32, 7)
        elif name == "model.embed_tokens.weight":
            made[name] = hashing.of_rms(stream, size, 1.0)
        else:
            made[name] = hashing.of_rms(stream, size, 1.25 * float(size[1]) ** -0.5)
    return made


def is_int4(name: str) -> bool:
    """What INT4 bundles quantise: routed experts, shared expert and dense MLP; not the router."""
    return name.endswith("_proj.weight") and ".mlp." in name


def quantised(made: Mapping[str, Array]) -> dict[str, Array]:
    """The same weights with INT4 matrices: NAME.qw and NAME.sc instead of NAME.weight, scales float32."""
    out: dict[str, Array] = {}
    for name, value in made.items():
        if is_int4(name):
            stem = name.removesuffix(".weight")
            out[f"{stem}.qw"], out[f"{stem}.sc"] = quant.quantize_w4a16(value)
        else:
            out[name] = value
    return out


@dataclass(frozen=True)
class Run:
    """A model's plain run: TOKENS tokens and as many more as the last draft table reaches."""

    weights: dict[str, Array]
    model: Model
    plain: round.Plain

    @property
    def tokens(self) -> list[int]:
        """The tokens of the bundle."""
        tokens: list[int] = self.plain.tokens[:TOKENS]
        return tokens

    def usable(self) -> bool:
        """Every step is decided clearly, and the text is no stutter."""
        return bool(self.plain.gap.min() >= SMALLEST_GAP) and len(set(self.tokens)) >= FEWEST_DISTINCT


def prompt_of(shape: Shape) -> list[int]:
    """The prompt, the same for every salt."""
    vocab = int(shape.config["vocab_size"])
    return [int(x) for x in hashing.integers(f"{shape.name}/prompt", (shape.prompt,), 0, vocab)]


def run_plain(shape: Shape, made: dict[str, Array]) -> Run:
    """Decode plainly in float64, expanded attention."""
    model = Model(shape.config, made)
    return Run(made, model, round.decode_plain(model, prompt_of(shape), TOKENS + drafts.DEPTH))


@functools.cache
def pair(shape_name: str) -> tuple[Run, Run]:
    """The float32 and the INT4 run of a shape, for the first salt at which both are usable and say different
    things.

    Raises ValueError where no salt among 200 will do.
    """
    shape = SHAPES[shape_name]
    for salt in range(200):
        fp32 = run_plain(shape, weights(shape, salt))
        if not fp32.usable():
            continue
        int4 = run_plain(shape, quantised(fp32.weights))
        if int4.usable() and int4.tokens != fp32.tokens:
            return fp32, int4
    raise ValueError(
        f"{shape_name}: no salt below 200 gives {TOKENS + drafts.DEPTH} greedy steps with gaps of at least "
        f"{SMALLEST_GAP} and {FEWEST_DISTINCT} different tokens"
    )


def config_tensors(config: Mapping[str, float | int]) -> dict[str, Array]:
    """`config.KEY` scalars: int64, or float64 where the field is real."""
    return {
        f"config.{name}": np.array(value, dtype=np.int64 if isinstance(value, int) else np.float64)
        for name, value in fields.checked(config).items()
    }


def bundle(name: str) -> dict[str, Array]:
    """The tensors of model_fp32_tiny, model_fp32_tiny2, model_int4_tiny or model_int4_tiny2."""
    _, kind, shape_name = name.split("_")
    shape = SHAPES[shape_name]
    fp32, int4 = pair(shape_name)
    run = int4 if kind == "int4" else fp32
    prompt, vocab = prompt_of(shape), int(shape.config["vocab_size"])

    tables = [
        drafts.planted(f"{name}/draft/{i}", run.plain.tokens[i + 1 : i + 1 + drafts.DEPTH], vocab)
        for i in range(TOKENS)
    ]
    tree_run = round.decode_ddtree(run.model, prompt, TOKENS, functools.partial(_tree, tables, len(prompt)))
    _check(name, run, tree_run)
    return {
        **config_tensors(shape.config),
        **run.weights,
        "prompt.tokens": np.array(prompt, dtype=np.int32),
        "plain.tokens": np.array(run.tokens, dtype=np.int32),
        "plain.logits": run.plain.logits[:TOKENS].astype(np.float32),
        "draft.position": np.arange(len(prompt), len(prompt) + TOKENS, dtype=np.int32),
        "draft.tokens": np.stack([t.token for t in tables]),
        "draft.logp": np.stack([t.logp for t in tables]),
        **_round_tensors(tree_run),
    }


def _tree(tables: list[drafts.Table], first: int, root: int, position: int) -> ddtree.Tree:
    table = tables[position - first]
    return ddtree.build_tree(root, table.token, table.logp, drafts.BUDGET, drafts.DEPTH)


def _check(name: str, run: Run, tree_run: round.Tree) -> None:
    """What a bundle promises; ValueError with the numbers where it does not hold."""
    if tree_run.tokens != run.tokens:
        raise ValueError(f"{name}: the oracle's tree run emits {tree_run.tokens}, plainly {run.tokens}")
    difference = float(np.abs(tree_run.logits - run.plain.logits[:TOKENS]).max())
    if difference > 1e-9:
        raise ValueError(
            f"{name}: logits of the oracle's tree run differ by {difference} from the plain run's"
        )
    if tree_run.target_forwards > MOST_FORWARDS:
        raise ValueError(
            f"{name}: {tree_run.target_forwards} target forwards, expected at most {MOST_FORWARDS}"
        )
    for r in tree_run.rounds:
        if drafts.branches_on(r.tree, r.accepted.path) == 0:
            raise ValueError(f"{name}: the path accepted at position {r.position} has first children only")


def _round_tensors(run: round.Tree) -> dict[str, Array]:
    """Per round, nodes padded to budget + 1 with -1 (weights with 0)."""
    width, count = drafts.BUDGET + 1, len(run.rounds)

    def padded(rows: list[Any]) -> Array:
        out = np.full((count, width), -1, dtype=np.int32)
        for line, row in zip(out, rows, strict=True):
            line[: len(row)] = row
        return out

    weight = np.zeros((count, width), dtype=np.float64)
    for line, r in zip(weight, run.rounds, strict=True):
        line[: r.tree.count + 1] = r.tree.weight
    return {
        "tree.position": np.array([r.position for r in run.rounds], dtype=np.int32),
        "tree.count": np.array([r.tree.count for r in run.rounds], dtype=np.int32),
        "tree.token": padded([r.tree.token for r in run.rounds]),
        "tree.parent": padded([r.tree.parent for r in run.rounds]),
        "tree.depth": padded([r.tree.depth for r in run.rounds]),
        "tree.weight": weight,
        "accept.length": np.array([len(r.accepted.path) for r in run.rounds], dtype=np.int32),
        "accept.path": padded([r.accepted.path for r in run.rounds]),
        "accept.tokens": padded([r.accepted.emitted for r in run.rounds]),
        "ddtree.target_forwards": np.array(run.target_forwards, dtype=np.int32),
    }
