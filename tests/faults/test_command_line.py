"""Bad input through the command line: one sentence that names the thing, an exit code, no traceback.

What a checkpoint or file can have wrong in itself is tested where those are read; here it is that the
sentence arrives.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from command import ARGV, Run, assert_refused, environment, kdtree

from kdtree_engine import demo_model

USAGE = 2


def generate(model: Path | str, *options: str, **env: str) -> Run:
    given = ("--prompt", "abc") if not any(o.startswith("--prompt") for o in options) else ()
    return kdtree("generate", model, *given, *options, **env)


# -- the command line itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-tokens", "-5"), ("--max-tokens", "-5")),
        (("--max-tokens", "0"), ("--max-tokens", "0")),
        (("--max-tokens", "many"), ("--max-tokens",)),
        (("--max-tokens", "1" + "0" * 30), ("--max-tokens",)),
        (("--temperature", "-0.5"), ("--temperature", "-0.5")),
        (("--temperature", "nan"), ("--temperature", "nan")),
        (("--temperature", "inf"), ("--temperature", "inf")),
        (("--top-k", "-1"), ("--top-k", "-1")),
        (("--top-k", "99999999999"), ("--top-k",)),
        (("--top-p", "0"), ("--top-p",)),
        (("--top-p", "1.5"), ("--top-p", "1.5")),
        (("--min-p", "nan"), ("--min-p",)),
        (("--seed", "-1"), ("--seed", "-1")),
        (("--seed", str(2**64)), ("--seed", str(2**64 - 1))),
        (("--threads", "-2"), ("--threads", "-2")),
        (("--threads", "99999999999"), ("--threads",)),
        (("--context", "0"), ("--context", "0")),
        (("--context", "-10"), ("--context", "-10")),
        (("--budget", "65"), ("--budget", "65", "64")),
        (("--budget", "-1"), ("--budget", "-1")),
        (("--budget", "some"), ("--budget", "some", "auto")),
        (("--logprobs", "2"), ("--logprobs", "--json")),
        (("--logprobs", "-2", "--json"), ("--logprobs", "-2")),
        (("--stop", ""), ("--stop", "empty")),
        (("--drafter", "magic"), ("--drafter", "magic", "ngram")),
        (("--drafter", "dflash"), ("--drafter dflash", "--draft-model")),
        (("--draft-option", "window=3"), ("--draft-option", "--draft-model")),
        (("--draft-model", "d", "--draft-option", "window"), ("--draft-option", "KEY=VALUE")),
        (("--draft-model", "d", "--draft-option", "window=3", "--draft-option", "window=4"), ("window", "twice")),
        (("--device", "tpu"), ("--device", "tpu", "cpu")),
        (("--device", "cuda:x"), ("--device", "cuda:x")),
        (("--prompt", ""), ("prompt is empty",)),
        (("--prompt-tokens", ""), ("prompt is empty",)),
        (("--prompt-tokens", "1,two"), ("--prompt-tokens", "two")),
        (("--prompt-tokens", "1,-2"), ("--prompt-tokens", "-2")),
        (("--prompt-tokens", "1,,2"), ("--prompt-tokens",)),
        (("--prompt", "a", "--prompt-tokens", "1"), ("--prompt and --prompt-tokens",)),
        (("--nonsense",), ("--nonsense",)),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_options_that_make_no_sense(folder: Path, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Catches a wrong value that is clamped, ignored, or ends in a traceback."""
    assert_refused(generate(folder, *options), *words, code=USAGE)


@pytest.mark.parametrize("arguments", [(), ("destroy",), ("generate",), ("chat",), ("perplexity",), ("inspect",)])
def test_missing_or_unknown_command(arguments: tuple[str, ...]) -> None:
    """Catches a usage error that prints pages, or nothing, in place of a sentence."""
    assert_refused(kdtree(*arguments), code=USAGE)


def test_empty_and_unreadable_prompt_files(folder: Path, tmp_path: Path) -> None:
    """Catches an empty prompt that reaches the model, and a bad file that ends in a traceback."""
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_bytes(b"")
    binary.write_bytes(b"abc\xff\xfe")
    assert_refused(generate(folder, "--prompt-file", str(empty)), "prompt is empty", str(empty), code=USAGE)
    assert_refused(generate(folder, "--prompt-file", "-"), "prompt is empty", "stdin", code=USAGE)
    assert_refused(generate(folder, "--prompt-file", str(binary)), str(binary), "byte 3")
    assert_refused(generate(folder, "--prompt-file", str(tmp_path / "none")), "none", "No such file")
    assert_refused(generate(folder, "--prompt-file", str(tmp_path)), str(tmp_path))


def test_prompt_that_is_not_utf8(folder: Path) -> None:
    """Catches undecodable bytes on the command line ending in a UnicodeEncodeError."""
    argv = [*(a.encode() for a in ARGV), b"generate", str(folder).encode(), b"--prompt", b"a\xffb"]
    done = subprocess.run(argv, capture_output=True, env=environment(), check=False, timeout=60)
    run = Run(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert_refused(run, "--prompt", "UTF-8", code=USAGE)


# -- the model's path ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "verify", "inspect"])
def test_paths_that_are_no_model(command: str, tmp_path: Path) -> None:
    """Catches a path error without the path, and verify or inspect being less careful than generate."""
    missing, empty, text = tmp_path / "missing", tmp_path / "empty", tmp_path / "text.kdtr"
    empty.mkdir()
    text.write_text("this is no container")
    zero = tmp_path / "zero.kdtr"
    zero.write_bytes(b"")
    for path in (missing, empty, text, zero, Path("/dev/null")):
        options = () if command == "inspect" else ("--prompt-tokens", "1")
        assert_refused(kdtree(command, path, *options), str(path))
    assert "config.json" in kdtree(command, empty).err


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def with_config(folder: Path, target: Path, **changes: Any) -> Path:
    model = copy(folder, target)
    (model / "config.json").write_text(json.dumps(tiny_models.CONFIG | changes))
    return model


def test_config_faults(folder: Path, tmp_path: Path) -> None:
    """Catches a config that is guessed at: unknown architecture, broken JSON, a contradiction."""
    unknown = with_config(folder, tmp_path / "unknown", model_type="llama")
    assert_refused(generate(unknown), "llama", "deepseek_v3")
    contradiction = with_config(folder, tmp_path / "contradiction", hidden_act="gelu")
    assert_refused(generate(contradiction), "hidden_act", "gelu")
    broken = copy(folder, tmp_path / "broken")
    (broken / "config.json").write_text('{"model_type": "deepseek_v3",')
    assert_refused(generate(broken), str(broken / "config.json"))


def test_tensor_faults(folder: Path, tmp_path: Path) -> None:
    """Catches weights that are wrong and load all the same: truncated, missing, of the wrong shape, NaN."""
    from safetensors.numpy import save_file

    truncated = copy(folder, tmp_path / "truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[:-1])
    assert_refused(generate(truncated), "model.safetensors")

    name = "model.layers.1.self_attn.o_proj.weight"
    for fault in ("missing", "shape", "nan"):
        tensors = tiny_models.weights()
        if fault == "missing":
            del tensors[name]
        elif fault == "shape":
            tensors[name] = tensors[name][:, :-1].copy()
        else:
            tensors[name][3, 5] = np.nan
        model = copy(folder, tmp_path / fault)
        save_file(tensors, model / "model.safetensors")
        assert_refused(generate(model), name)


def test_nan_scale(tmp_path: Path) -> None:
    """Catches an INT4 scale that is NaN: every product with it would be."""
    tensors = tiny_models.weights()
    module = "model.layers.1.mlp.experts.2.gate_proj"
    out, width = tensors.pop(f"{module}.weight").shape
    tensors[f"{module}.qw"] = np.full((out, width // 8), 0x12345678, np.int32)
    tensors[f"{module}.sc"] = np.full((out, width // 32), 0.01, np.float32)
    good = tiny_models.write_bundle(tmp_path / "good.kdtr", tensors=tensors)
    assert generate(good, "--max-tokens", "2").code == 0
    tensors[f"{module}.sc"][3, 1] = np.nan
    bad = tiny_models.write_bundle(tmp_path / "bad.kdtr", tensors=tensors)
    assert_refused(generate(bad), str(bad), module)


def test_damaged_bundle(tmp_path: Path) -> None:
    """Catches a flipped bit in a weight that nobody notices: the checksum must."""
    path = tiny_models.write_bundle(tmp_path / "model.kdtr")
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x10
    path.write_bytes(data)
    assert_refused(generate(path), str(path))


# -- prompt and context ----------------------------------------------------------------------------------


def test_prompt_does_not_fit(folder: Path) -> None:
    """Catches a prompt that is cut, or tokens that no vocabulary has."""
    assert_refused(generate(folder, "--prompt", "x" * 50, "--context", "50"), "50")
    assert_refused(generate(folder, "--prompt", "x" * 200, "--context", "50"), "200", "50")
    vocab = str(tiny_models.VOCAB)
    assert_refused(generate(folder, "--prompt-tokens", f"1,{vocab}"), vocab)
    assert_refused(generate(folder, "--context", "100001"), "100001", "100000")


def test_text_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Catches text that is silently taken as bytes for a model whose tokens are no bytes."""
    model = copy(folder, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert_refused(generate(model), "tokenizer.json", str(model))
    (model / "tokenizer.json").write_text("{}")
    assert_refused(generate(model), "tokenizer.json", str(model))


def test_draft_model_in_the_place_of_a_target() -> None:
    """Catches advice on model types where the user only mixed the two folders up."""
    draft = demo_model().draft
    for command in (("generate", draft, "--prompt", "a"), ("inspect", draft)):
        assert_refused(kdtree(*command), str(draft), "--draft-model")


def test_drafters_that_have_nothing_to_replay(folder: Path) -> None:
    """Catches replay without draft tables quietly decoding plainly."""
    assert_refused(generate(folder, "--drafter", "replay"), "replay", str(folder))


# -- devices and memory ----------------------------------------------------------------------------------


def test_device_that_is_not_there(folder: Path) -> None:
    """Catches a quiet fall-back to the CPU where a GPU was asked for by number."""
    assert_refused(generate(folder, "--device", "cuda:97"), "CUDA")


def test_unknown_instruction_set(folder: Path) -> None:
    """Catches a misspelt KDTREE_CPU_ISA that is ignored."""
    assert_refused(generate(folder, KDTREE_CPU_ISA="mmx"), "mmx")


def test_out_of_memory_is_a_sentence(tmp_path: Path) -> None:
    """Catches a crash, or the kernel's killer, where a context needs more memory than the machine has."""
    config = tiny_models.CONFIG | {"max_position_embeddings": 1 << 24, "kv_lora_rank": 4096}  # 0.8 TB
    model = tiny_models.write_folder(tmp_path / "model", config)
    assert_refused(generate(model, "--context", str(1 << 24)), "needs", "GiB", "free")


# -- JSON ------------------------------------------------------------------------------------------------


def test_json_reports_errors_too(folder: Path, tmp_path: Path) -> None:
    """Catches scripts left without an object when a run fails after its options were accepted."""
    run = kdtree("generate", tmp_path / "missing", "--prompt", "a", "--json")
    assert run.code == 1 and run.json["stop_reason"] == "error" and "missing" in run.json["error"]
    run = generate(folder, "--prompt", "x" * 50, "--context", "10", "--json")
    assert run.code == 1 and run.json["tokens"] == [] and len(run.json["prompt_tokens"]) == 50


def test_model_that_computes_nan(folder: Path, tmp_path: Path) -> None:
    """Catches a token chosen from logits that are NaN: finite weights can still overflow."""
    from safetensors.numpy import save_file

    tensors = tiny_models.weights()
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], 3e38)
    tensors["model.norm.weight"] *= np.where(np.arange(64) % 2, 1e30, -1e30).astype(np.float32)
    model = copy(folder, tmp_path / "overflow")
    save_file(tensors, model / "model.safetensors")
    run = generate(model, "--json")
    assert run.code == 1 and run.json["stop_reason"] == "error" and run.json["tokens"] == []
    assert len(run.err.splitlines()) == 1 and run.json["error"] in run.err


def test_traceback_on_request(tmp_path: Path) -> None:
    """Catches the developer's switch being dead."""
    run = kdtree("inspect", tmp_path / "missing", KDTREE_TRACEBACK="1")
    assert run.code == 1 and "Traceback" in run.err
