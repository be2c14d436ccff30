"""kdtree generate: text, JSON, streaming, prompts."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import tiny_models
from command import ARGV, environment, kdtree

STATS = {"target_forwards", "rounds", "accepted_lengths", "seconds", "tokens_per_second"}
SECONDS = {"prefill", "draft", "build", "verify", "accept", "commit"}


def generated(model: Path, *options: str) -> dict:
    run = kdtree("generate", model, "--json", "--ignore-eos", "--max-tokens", "40", *options)
    assert run.code == 0, run.err
    return run.json


def test_json_has_the_documented_fields(folder: Path) -> None:
    """Catches a renamed or missing field: other people's scripts read these names."""
    value = generated(folder, "--prompt", "the cat sat on the mat, the cat sat on")
    assert set(value) == {"prompt_tokens", "tokens", "text", "stop_reason", "stats"}
    assert value["prompt_tokens"] == list(b"the cat sat on the mat, the cat sat on")
    assert len(value["tokens"]) == 40 and value["stop_reason"] == "length"
    stats = value["stats"]
    assert set(stats) >= STATS and set(stats["seconds"]) == SECONDS
    assert stats["target_forwards"] == stats["rounds"] + 1 == len(stats["accepted_lengths"]) + 1
    assert 1 + sum(stats["accepted_lengths"]) == 40
    assert stats["tokens_per_second"] > 0


def test_text_mode_prints_the_json_text(folder: Path) -> None:
    """Catches pieces lost, doubled or reordered on the way to stdout, and logs that land in the text."""
    options = ("--prompt", "ab", "--ignore-eos", "--max-tokens", "60")
    text = kdtree("generate", folder, *options)
    assert text.code == 0
    expected = kdtree("generate", folder, *options, "--json").json["text"]
    assert text.out in (expected, expected + "\n")
    assert "60 tokens" in text.err and len(text.err.splitlines()) == 1


@pytest.mark.parametrize("drafter", ["none", "planted", "auto"])
@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--top-k", "50", "--seed", "5")])
def test_drafter_and_budget_do_not_reach_the_output(
    folder: Path, drafter: str, sampling: tuple[str, ...]
) -> None:
    """Catches an option that the command line loses, or that reaches the sampler and should not."""
    options = ("--prompt", "to be or not to be, to be", *sampling)
    expected = generated(folder, *options, "--drafter", "none")
    got = generated(folder, *options, "--drafter", drafter, "--budget", "16", "--threads", "1")
    assert got["tokens"] == expected["tokens"] and got["text"] == expected["text"]
    if drafter == "planted":
        assert got["stats"]["target_forwards"] < expected["stats"]["target_forwards"]
    if sampling:
        assert expected["tokens"] != generated(folder, *options[:2], "--drafter", "none")["tokens"]


def test_prompt_file_stdin_and_tokens_are_the_same_prompt(folder: Path, tmp_path: Path) -> None:
    """Catches a prompt source that changes the text (a stripped newline, a wrong encoding)."""
    text = "zwölf Boxkämpfer\n"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    expected = generated(folder, "--prompt", text)["tokens"]
    assert generated(folder, "--prompt-file", str(file))["tokens"] == expected
    tokens = ",".join(str(b) for b in text.encode())
    assert generated(folder, "--prompt-tokens", tokens)["tokens"] == expected
    stdin = kdtree(
        "generate", folder, "--json", "--ignore-eos", "--max-tokens", "40", "--prompt-file", "-", stdin=text
    )
    assert stdin.json["tokens"] == expected


def test_bundle_runs_on_its_own_prompt(bundle: Path) -> None:
    """Catches a bundle's stored prompt being ignored, or winning over a given one."""
    assert generated(bundle)["prompt_tokens"] == list(range(40, 52))
    assert generated(bundle, "--prompt-tokens", "1,2")["prompt_tokens"] == [1, 2]


def test_model_without_text_prints_token_ids(tmp_path: Path) -> None:
    """Catches silence, or a crash, where a vocabulary is too small for bytes and there is no tokenizer."""
    config = tiny_models.CONFIG | {"vocab_size": 100, "eos_token_id": 99}
    bundle = tiny_models.write_bundle(tmp_path / "small.kdtr", config)
    options = (bundle, "--prompt-tokens", "1,2,3", "--max-tokens", "9")
    tokens = kdtree("generate", *options, "--json").json["tokens"]
    assert [int(t) for t in kdtree("generate", *options).out.split()] == tokens


def test_stop_text_ends_the_text_before_it(folder: Path) -> None:
    """Catches a stop text that is ignored, printed, or leaves characters behind it."""
    options = ("--prompt", "qwerty")
    whole = generated(folder, *options)["text"]
    assert len(whole) >= 8
    stop = whole[5:7]
    value = generated(folder, *options, "--stop", stop)
    assert value["text"] == whole[: whole.index(stop)] and value["stop_reason"] == "stop"


def test_logprobs(folder: Path) -> None:
    """Catches log-probabilities of other tokens than the emitted ones: greedy emits the likeliest."""
    value = generated(folder, "--prompt", "abc", "--logprobs", "3")
    assert [entry["token"] for entry in value["logprobs"]] == value["tokens"]
    for entry in value["logprobs"]:
        assert len(entry["top"]) == 3 and entry["top"][0] == [entry["token"], entry["logprob"]]
        assert entry["logprob"] <= 0


def test_context_ends_generation(folder: Path) -> None:
    """Catches a context option that is not passed on."""
    value = generated(folder, "--prompt", "0123456789", "--context", "20")
    assert value["stop_reason"] == "context" and len(value["tokens"]) == 10


def test_text_streams(folder: Path) -> None:
    """Catches text that is held until the end: of a long text the first piece must come long before it."""
    argv = [*ARGV, "generate", str(folder), "--prompt", "a", "--ignore-eos", "--context", "100000"]
    argv += ["--max-tokens", "99000", "--drafter", "none"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        assert child.stdout is not None
        assert child.stdout.read(5)
        time.sleep(0.05)
        assert child.poll() is None, "the whole text came before its first characters were seen"
    finally:
        child.kill()
        child.communicate()


def test_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    """Catches `kdtree generate … | head`: a closed pipe must end the command quietly."""
    argv = [*ARGV, "generate", str(folder), "--prompt", "a", "--ignore-eos", "--max-tokens", "3000"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read().decode()
    assert child.wait(60) == 1
    assert "Traceback" not in err and "Exception" not in err, err


def in_shell(line: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command with the redirections of `line`, where "$@" stands for it."""
    done = subprocess.run(
        ["sh", "-c", line, "sh", *ARGV, *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment(), timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_closed_streams(folder: Path) -> None:
    """Catches a stream that is not there: an internal error, or a result lost because nobody reads the statistics."""
    wanted = ("generate", folder, "--prompt", "a", "--max-tokens", "3")
    assert in_shell('"$@" >&-', *wanted) == (1, "", "error: stdout is closed: the results have nowhere to go\n")
    assert in_shell('"$@" 2>&-', *wanted) == (0, kdtree(*wanted).out, "")
    assert in_shell('"$@" >&- 2>&-', *wanted) == (1, "", "")


def test_full_disk_names_what_could_not_be_written(folder: Path) -> None:
    """Catches `No space left on device` without a word of where."""
    wanted = ("generate", folder, "--prompt", "a", "--max-tokens", "3")
    for more in ((), ("--json",)):
        code, _, err = in_shell('"$@" >/dev/full', *wanted, *more)
        assert code == 1 and err.endswith("error: stdout cannot be written: No space left on device\n"), err
    code, _, err = in_shell('"$@"', *wanted, "--trace", "/dev/full")
    assert code == 1 and err == "error: /dev/full: No space left on device\n"


def test_least_context_is_the_engines(folder: Path) -> None:
    """Catches two different lower bounds in the sentences about one option."""
    for value in ("1", "999999999"):
        assert "expected an integer from 2 to " in kdtree("generate", folder, "--prompt", "a", "--context", value).err


def test_bundle_made_of_a_model_with_text_says_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    """Catches a tokenizer that is lost without a word: the bundle then takes text as bytes and answers nonsense."""
    done = kdtree("convert", folder, tmp_path / "made.kdtr", "--to", "same")
    assert done.code == 0 and "holds no tokenizer" in done.err and "--prompt-tokens" in done.err
    back = kdtree("convert", tmp_path / "made.kdtr", tmp_path / "back", "--to", "same")
    assert back.code == 0 and back.err == ""


def test_prompt_is_utf8_in_any_locale(folder: Path) -> None:
    """Catches a prompt that is refused, as what it is not, because the locale is ASCII."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = kdtree("generate", folder, "--prompt", "ü", "--max-tokens", "1", "--json", **ascii_only)
    assert done.code == 0 and done.json["prompt_tokens"] == generated(folder, "--prompt", "ü")["prompt_tokens"]
