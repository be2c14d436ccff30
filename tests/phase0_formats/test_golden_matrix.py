"""The matrix must fail where an engine is wrong, and must never call something passed that did not run."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from harness import demo, matrix
from harness.golden import generate
from harness.matrix import Decoded, Leg, judge


@pytest.fixture(scope="module")
def golden():
    return generate.GENERATORS["model_int4_tiny"]()


def right(golden, decoder="plain"):
    forwards = 24 if decoder == "plain" else int(golden["ddtree.target_forwards"])
    lengths = [1] * 23 if decoder == "plain" else golden["accept.length"].tolist()
    return Decoded(golden["plain.tokens"].tolist(), golden["plain.logits"].copy(), forwards, lengths)


def changed(run, **fields):
    return Decoded(**(vars(run) | fields))


def judged(golden, run, decoder="plain", plain=None):
    leg = Leg("model_int4_tiny", "cpu", decoder)
    judge(leg, golden, run, plain)
    return leg


def test_right_runs_pass(golden):
    leg = judged(golden, right(golden))
    assert leg.status == "PASS"
    columns = leg.line().split("  ")
    assert columns[:4] == ["PASS", "model_int4_tiny", "cpu", "plain"]
    assert columns[4:] == ["tokens=24/24 exact", "max_abs_logit_diff=0.0e+00", "target_forwards=24"]
    tree = judged(golden, right(golden, "ddtree"), "ddtree", right(golden))
    assert tree.status == "PASS"
    assert tree.line().endswith("target_forwards=3  bits=plain")


def test_wrong_token(golden):
    run = right(golden)
    run.tokens[5] += 1
    leg = judged(golden, run)
    assert leg.status == "FAIL"
    assert "tokens=5/24 DIFFER" in leg.line()


@pytest.mark.parametrize("cut", [slice(None, 23), slice(None, 0)])
def test_missing_tokens(golden, cut):
    """Fewer tokens, all of them right, is not the bundle's text."""
    run = right(golden)
    assert judged(golden, changed(run, tokens=run.tokens[cut], logits=run.logits[cut])).status == "FAIL"


def test_additional_token(golden):
    run = right(golden)
    more = changed(run, tokens=[*run.tokens, 1], logits=np.concatenate([run.logits, run.logits[:1]]))
    leg = judged(golden, more)
    assert leg.status == "FAIL"
    assert "tokens=24/24 DIFFER" in leg.line()


@pytest.mark.parametrize("value", [1e-4, np.nan, np.inf])
def test_logit_off(golden, value):
    """NaN compares false with everything: the comparison must be written so that false means failed."""
    run = right(golden)
    run.logits[3, 7] += np.float32(value)
    assert judged(golden, run).status == "FAIL"


def test_logit_within_the_tolerance(golden):
    run = right(golden)
    run.logits[3, 7] += np.float32(1e-5)
    assert judged(golden, run).status == "PASS"


def test_tree_leg_compares_bits(golden):
    """A difference far below the tolerance still breaks losslessness."""
    run = right(golden, "ddtree")
    run.logits[3, 7] = np.nextafter(run.logits[3, 7], np.float32(9))
    leg = judged(golden, run, "ddtree", right(golden))
    assert leg.status == "FAIL"
    assert leg.bits == "DIFFER"


def test_tree_leg_without_a_plain_run(golden):
    assert judged(golden, right(golden, "ddtree"), "ddtree", None).status == "FAIL"


def test_forwards_and_rounds_count(golden):
    """Right tokens at the price of plain decoding are a failure of the tree decoder."""
    run, plain = right(golden, "ddtree"), right(golden)
    assert judged(golden, changed(run, target_forwards=24), "ddtree", plain).status == "FAIL"
    assert judged(golden, changed(run, accepted_lengths=[20, 3]), "ddtree", plain).status == "FAIL"
    assert judged(golden, changed(plain, target_forwards=23)).status == "FAIL"


def test_bf16_is_judged_along_the_bundles_text(golden):
    """A bf16 leg may go its own way where tokens are nearly tied; most positions must agree, trees have its bits."""
    plain = changed(right(golden), along=golden["plain.logits"] + np.float32(0.01))
    plain.along[4] += 3  # one router chose another expert
    leg = Leg("model_int4_tiny", "cuda", "plain", "bf16")
    judge(leg, golden, changed(plain, tokens=plain.tokens[:5] + [0] * 19), None)
    assert leg.status == "PASS" and "cuda/bf16" in leg.line() and "tokens=5/24 DIFFER" in leg.line()
    leg = Leg("model_int4_tiny", "cuda", "plain", "bf16")
    judge(leg, golden, changed(plain, along=np.roll(plain.along, 1, axis=1)), None)
    assert leg.status == "FAIL"
    other = changed(plain, logits=plain.logits + np.float32(1e-7))
    leg = Leg("model_int4_tiny", "cuda", "ddtree", "bf16")
    judge(leg, golden, other, plain)
    assert leg.status == "FAIL" and leg.bits == "DIFFER"


def test_nothing_ran_is_exit_code_2(capsys, tmp_path, monkeypatch):
    """A build without CUDA, asked for CUDA alone, must not look green."""
    monkeypatch.setattr(matrix, "unavailable", lambda backend: "no device here")
    file = tmp_path / "report.json"
    assert matrix.main(["--backend", "cuda", "--bundle", "model_int4_tiny", "--json", str(file)]) == 2
    out = capsys.readouterr().out
    assert out.count("NOT RUN (no device here)") == 4  # both precisions
    assert "0 passed, 0 failed, 4 not run" in out
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["passed"], report["not_run"]) == (0, 4)
    assert all(leg["status"] == "NOT RUN" and leg["reasons"] for leg in report["legs"])


@pytest.mark.parametrize("arguments", [["--backend", "gpu"], ["--bundle", "model_nonsense"]])
def test_unknown_names(arguments, capsys):
    assert matrix.main(arguments) == 2
    assert arguments[1] in capsys.readouterr().err


def test_matrix_on_the_cpu(capsys, tmp_path):
    """All four bundles, both decoders, on this machine's CPU."""
    file = tmp_path / "report.json"
    code = matrix.main(["--backend", "cpu", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("PASS  model_") == 8
    legs = json.loads(file.read_text(encoding="utf-8"))["legs"]
    assert all(leg["tokens_equal"] == 24 for leg in legs)
    assert all(leg["target_forwards"] <= 3 for leg in legs if leg["decoder"] == "ddtree")


def test_a_broken_file_fails_its_legs(capsys, tmp_path):
    """A bundle that cannot be read is a failure, not a leg that was not run."""
    (tmp_path / "model_int4_tiny.kdtr").write_bytes(b"not a bundle")
    arguments = ["--backend", "cpu", "--bundle", "model_int4_tiny", "--dir", str(tmp_path)]
    assert matrix.main(arguments) == 1
    assert capsys.readouterr().out.count("FAIL  model_int4_tiny") == 2


def test_folder_without_the_bundles_is_no_failed_leg(tmp_path, capsys):
    """Catches a wrong --dir that is reported as an engine whose tokens differ."""
    assert matrix.main(["--backend", "cpu", "--bundle", "model_int4_tiny", "--dir", str(tmp_path)]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and "model_int4_tiny.kdtr" in seen.err


def test_demo_of_a_bundle_that_is_no_model(capsys):
    """Catches a traceback where the name of a golden bundle of kernels is given."""
    with pytest.raises(SystemExit) as end:
        demo.main(["--bundle", "kernel_route"])
    assert end.value.code == 2 and "no model bundle 'kernel_route'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["demo", "golden"])
def test_unwritable_folder_is_a_sentence(module, tmp_path):
    """Catches a traceback where bundles cannot be written."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", f"harness.{module}", "--bundle", "kernel_accept"]
    if module == "demo":
        command[-1] = "model_int4_tiny"
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "file" / "folder")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"error: {tmp_path}/file/folder: Not a directory"
