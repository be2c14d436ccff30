"""What golden bundles promise, and that the manifest notices when one of them changes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.golden import drafts, generate, hashing, manifest, models
from harness.reference import config, ddtree, quant, round
from harness.reference.model import Model


@pytest.fixture(scope="module", params=generate.MODELS)
def bundle(request):
    return request.param, generate.contiguous(generate.GENERATORS[request.param]())


def model_of(tensors, **options):
    fields = {k.removeprefix("config."): v.item() for k, v in tensors.items() if k.startswith("config.")}
    return Model(fields, tensors, **options)


# ------------------------------------------------------------------------------------------------------------
# inputs


def test_split_mix_known_answers():
    """First outputs of the published generator from state 0: a wrong constant would go unnoticed
    otherwise."""
    assert [f"{int(x):016x}" for x in hashing.split_mix(0, 3)] == [
        "e220a8397b1dcdaf",
        "6e789e6aa1b965f4",
        "06c45d188009454f",
    ]
    assert hashing.stream_of("") == 0xCBF29CE484222325
    assert hashing.stream_of("a") == 0xAF63DC4C8601EC8C


def test_inputs_are_dyadic():
    """Weights are exact in bf16, so that a bf16 engine must give the float32 engine's bits."""
    for name, value in models.weights(models.TINY, 0).items():
        assert np.array_equal(quant.from_bf16_bits(quant.bf16_bits(value)), value), name


def test_bounded_integers_stay_in_bounds():
    x = hashing.integers("bounds", (5000,), -3, 4)
    assert sorted(set(x.tolist())) == list(range(-3, 4))


# ------------------------------------------------------------------------------------------------------------
# model bundles


def test_plain_run_is_what_the_weights_say(bundle):
    """Absorbed attention in float32, an engine's way, must reach the stored logits within the engine's
    tolerance, and every greedy step must be decided by more than that tolerance can turn."""
    _, t = bundle
    plain = round.decode_plain(model_of(t, dtype=np.float32, absorbed=True), t["prompt.tokens"].tolist(), 24)
    assert plain.tokens == t["plain.tokens"].tolist()
    largest = float(np.abs(t["plain.logits"]).max())
    assert np.abs(plain.logits - t["plain.logits"]).max() <= 1e-5 * max(1.0, largest)
    assert plain.gap.min() >= models.SMALLEST_GAP - 2e-5 * largest
    assert t["plain.logits"].shape == (24, t["config.vocab_size"])
    assert len(set(plain.tokens)) >= models.FEWEST_DISTINCT


def test_config_has_exactly_the_fields(bundle):
    _, t = bundle
    names = {k.removeprefix("config.") for k in t if k.startswith("config.")}
    assert names == set(config.INTEGER_FIELDS) | set(config.REAL_FIELDS)
    assert all(
        t[f"config.{k}"].dtype == np.int64 and t[f"config.{k}"].shape == () for k in config.INTEGER_FIELDS
    )
    assert all(t[f"config.{k}"].dtype == np.float64 for k in config.REAL_FIELDS)


def test_int4_bundles_quantise_what_they_should(bundle):
    """MLA, router, embedding and head stay float; experts, shared expert and dense MLP are INT4 in INT4
    bundles."""
    name, t = bundle
    stems = {k.removesuffix(".qw") for k in t if k.endswith(".qw")}
    expected = {k.removesuffix(".weight") for k in models.weights(models.SHAPES[name.split("_")[2]], 0)}
    expected = {k for k in expected if ".mlp." in k and k.endswith("_proj")}
    assert stems == (expected if "int4" in name else set())
    for stem in stems:
        assert t[f"{stem}.sc"].dtype == np.float32
        assert f"{stem}.weight" not in t


def test_int4_says_something_else_than_fp32():
    """An engine that ignored the quantised weights' rounding, or loaded the float ones, would pass
    otherwise."""
    for shape in models.SHAPES:
        fp32, int4 = models.pair(shape)
        assert fp32.tokens != int4.tokens


def test_drafts_cover_every_root(bundle):
    """Any budget may start a round at any position of the run: each has a table, in order, with unique
    siblings."""
    _, t = bundle
    start = len(t["prompt.tokens"])
    assert t["draft.position"].tolist() == list(range(start, start + 24))
    assert t["draft.tokens"].shape == t["draft.logp"].shape == (24, drafts.DEPTH, drafts.WIDTH)
    assert (np.diff(t["draft.logp"], axis=2) <= 0).all() and (t["draft.logp"] < 0).all()
    assert (np.exp(t["draft.logp"].astype(np.float64)).sum(axis=2) <= 1.0).all()
    assert np.array_equal(t["draft.logp"] * 64, np.rint(t["draft.logp"] * 64))
    for row in t["draft.tokens"].reshape(-1, drafts.WIDTH):
        assert len(set(row.tolist())) == drafts.WIDTH


def test_ddtree_run_is_the_plain_run(bundle):
    """Replays the stored rounds from tables and plain tokens alone: trees, walks, and at most 3 forwards."""
    _, t = bundle
    tokens, start = t["plain.tokens"].tolist(), len(t["prompt.tokens"])
    done, branches = 1, 0
    for r, position in enumerate(t["tree.position"].tolist()):
        assert position == start + done - 1
        at = position - start
        tree = ddtree.build_tree(tokens[at], t["draft.tokens"][at], t["draft.logp"][at], 64, 64)
        n = tree.count + 1
        assert n == t["tree.count"][r] + 1
        for field in ("token", "parent", "depth", "weight"):
            assert np.array_equal(t[f"tree.{field}"][r, :n], getattr(tree, field)), field
        kept = int(t["accept.length"][r])
        path = t["accept.path"][r, :kept].tolist()
        assert ddtree.ancestors(tree.parent, path[-1]) == path
        assert tree.token[path[1:]].tolist() == tokens[done : done + kept - 1]
        assert t["accept.tokens"][r, :kept].tolist() == tokens[done : done + kept]
        assert (t["accept.path"][r, kept:] == -1).all() and (t["accept.tokens"][r, kept:] == -1).all()
        branches += drafts.branches_on(tree, path)
        done += kept
    assert done == 24
    assert branches > 0
    assert t["ddtree.target_forwards"] == len(t["tree.position"]) + 1 <= models.MOST_FORWARDS


# ------------------------------------------------------------------------------------------------------------
# kernel bundles


def test_tree_build_has_a_case_for_every_rule():
    cases = generate.cases(generate.KERNELS["kernel_tree_build"]())
    assert len(cases) >= 27
    assert {int(inputs["budget"]) for inputs, _ in cases.values()} >= {0, 1, 64}
    assert any(np.isnan(inputs["table_logp"]).any() for inputs, _ in cases.values())
    assert any(np.isinf(inputs["table_logp"]).any() for inputs, _ in cases.values())
    assert any((outputs["source"] == 3).any() for _, outputs in cases.values())
    assert max(int(outputs["depth"].max()) for _, outputs in cases.values()) == 64


def test_route_cases_hold_ties():
    """Without exact ties the rule "lower id first" is never asked for."""
    cases = generate.cases(generate.KERNELS["kernel_route"]())
    for name in ("sigmoid_ties", "softmax_ties"):
        expert = cases[name][1]["expert"]
        assert (expert[:, 0] % 2 == 0).all() and np.array_equal(expert[:, 1], expert[:, 0] + 1)


def test_attention_reads_the_ancestors_only():
    """Moving a key that a row does not see must not move the row; the stored output must follow a loop over
    keys."""
    cases = generate.cases(generate.KERNELS["kernel_tree_attention"]())
    inputs, outputs = cases["tree_063"]
    latent = outputs["o"].shape[2]
    for row in (0, 13, 64):
        chain = ddtree.ancestors(inputs["parent"], row)
        keys = np.concatenate([inputs["committed"], inputs["scratch"][chain]]).astype(np.float64)
        for head in range(2):
            s = keys @ inputs["q"][row, head].astype(np.float64) * float(inputs["scale"])
            p = np.exp(s - s.max())
            assert np.allclose((p / p.sum()) @ keys[:, :latent], outputs["o"][row, head], atol=1e-6)


# ------------------------------------------------------------------------------------------------------------
# manifest


@pytest.fixture(scope="module")
def small():
    tensors = generate.contiguous(generate.GENERATORS["kernel_experts"]())
    return tensors, manifest.load()["kernel_experts"]


def test_every_generator_is_in_the_manifest():
    assert set(manifest.load()) == set(generate.GENERATORS)


@pytest.mark.parametrize("name", list(generate.GENERATORS))
def test_bundles_match_the_manifest(name):
    assert (
        manifest.difference(name, generate.contiguous(generate.GENERATORS[name]()), manifest.load()[name])
        is None
    )


@pytest.mark.parametrize(
    ("tensor", "change", "noticed"),
    [
        ("fp32_1_row.in.x", lambda v: v.view(np.int32).__ixor__(1), True),  # one bit of an input
        ("fp32_1_row.in.expert", lambda v: v.__iadd__(1), True),
        ("fp32_1_row.out.y", lambda v: v.__iadd__(1e-5), True),
        ("fp32_1_row.out.y", lambda v: v.__imul__(np.float32(1 + 1e-7)), False),  # another BLAS
    ],
)
def test_manifest_notices(small, tensor, change, noticed):
    tensors, expected = copy.deepcopy(small)
    change(tensors[tensor])
    message = manifest.difference("kernel_experts", tensors, expected)
    assert (message is not None and tensor in message) if noticed else message is None


def test_manifest_notices_missing_extra_and_reshaped_tensors(small):
    tensors, expected = small
    without = {k: v for k, v in tensors.items() if k != "fp32_1_row.in.x"}
    assert "not generated" in manifest.difference("b", without, expected)
    assert "not in the manifest" in manifest.difference("b", tensors | {"zz": np.zeros(1)}, expected)
    reshaped = tensors | {"fp32_1_row.out.y": tensors["fp32_1_row.out.y"].reshape(-1)}
    assert "f32[64]" in manifest.difference("b", reshaped, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_command_checks_under_any_thread_count(threads, tmp_path):
    """In a process of its own: numpy reads the thread count once."""
    names = ["model_int4_tiny", "kernel_experts", "kernel_tree_attention"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.golden", "--check", "--threads", str(threads), "--bundle", *names],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_command_fails_on_a_difference(tmp_path, monkeypatch, capsys):
    """Exit code 1 and one sentence, or CI would never notice."""
    from harness.golden import __main__ as command

    text = manifest.path().read_text(encoding="utf-8")
    entry = manifest.load()["kernel_accept"]["root_only.out.path"]
    altered = tmp_path / "manifest.json"
    altered.write_text(text.replace(f'"root_only.out.path": "{entry}"', '"root_only.out.path": "i32[1] 0"'))
    monkeypatch.setattr(manifest, "path", lambda: altered)
    assert command.main(["--check", "--bundle", "kernel_accept"]) == 1
    message = capsys.readouterr().err.strip()
    assert "root_only.out.path" in message and "\n" not in message
    assert command.main(["--check", "--bundle", "kernel_rope"]) == 0
    assert command.main(["--bundle", "nonsense"]) == 2


def test_written_bundles_read_back(tmp_path):
    """The container must return what was generated: names, types, shapes, bytes."""
    import kdtree_engine.kdtr as kdtr
    from harness.golden import __main__ as command

    assert command.main(["--out", str(tmp_path), "--bundle", "kernel_tree_build"]) == 0
    read = kdtr.read(tmp_path / "kernel_tree_build.kdtr")
    made = generate.contiguous(generate.GENERATORS["kernel_tree_build"]())
    assert set(read) == set(made)
    for name, value in made.items():
        assert read[name].dtype == value.dtype and read[name].shape == value.shape
        assert read[name].tobytes() == value.tobytes()
