"""kdtree inspect, doctor, --version, --help, and the streams they write to."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
import tiny_models
from command import ARGV, environment, kdtree


def test_version_and_help() -> None:
    """Catches a command line that cannot even start."""
    version = kdtree("--version")
    assert version.code == 0 and re.fullmatch(r"kdtree \d+\.\d+\.\d+\S*\n", version.out) and version.err == ""
    text = kdtree("--help")
    assert text.code == 0 and all(verb in text.out for verb in ("generate", "verify", "inspect", "doctor"))


@pytest.mark.parametrize("command", ["generate", "verify", "chat", "perplexity", "bench", "convert", "inspect"])
def test_documented_options_exist(command: str) -> None:
    """Catches an option that docs/cli.md promises and the command does not have, and the other way round."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    tables = [
        part for part in text.split("\n## ") if part.startswith("Options of") and f"`{command}`" in part.split("\n")[0]
    ]
    rows = [line.split("|")[1] for table in tables for line in table.splitlines() if line.startswith("| `-")]
    documented = {option for row in rows for option in re.findall(r"`(?:-\w, )?(--[a-z0-9-]+)", row)}
    shown = set()
    for line in kdtree(command, "--help", COLUMNS="200").out.splitlines():
        if re.match(r"  (-\w, )?--", line):
            shown |= {option for option in re.findall(r"--[a-z0-9-]+", line.split("  ")[1])}
    assert shown - {"--help"} == documented


def test_environment_variables_are_documented() -> None:
    """Catches an environment variable that some source reads and docs/cli.md does not list."""
    root = Path(__file__).parents[2]
    table = (root / "docs" / "cli.md").read_text(encoding="utf-8")
    names = environment_reads(root)
    assert {"KDTREE_TRACEBACK", "KDTREE_VENV"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in table] == []


def environment_reads(root: Path) -> set[str]:
    """Names that some source asks the environment for."""
    patterns = (
        r"getenv\(\"(KDTREE_[A-Z_]+)\"",
        r"environ(?:\.get\(|\[|\.setdefault\()\"(KDTREE_[A-Z_]+)\"",
        r"ENV\{(KDTREE_[A-Z_]+)\}",
        r"\$\{(KDTREE_[A-Z_]+):-",
    )
    found = set()
    for folder in ("python", "cpp", "cmake", "scripts"):
        for path in (root / folder).rglob("*"):
            if path.is_file() and path.suffix in ("", ".py", ".cpp", ".h", ".cmake", ".sh"):
                text = path.read_text(encoding="utf-8", errors="replace")
                for pattern in patterns:
                    found |= set(re.findall(pattern, text))
    return found


def test_inspect_folder_and_bundle_agree(folder: Path, bundle: Path) -> None:
    """Catches wrong sums: both containers hold the same model, float32, of a known size."""
    parameters = sum(t.size for t in tiny_models.weights().values())
    reports = [kdtree("inspect", path, "--json").json for path in (folder, bundle)]
    for report in reports:
        assert report["parameters"] == parameters
        assert report["kv_bytes_per_token"] == {"f32": 3 * (32 + 16) * 4, "bf16": 3 * (32 + 16) * 2}
        weights = {k: v for k, v in report["components"].items() if k != "config and other data"}
        assert sum(weights.values()) == 4 * parameters
        assert set(weights) == {
            "embedding", "attention", "dense MLP", "router", "routed experts", "shared experts", "norms",
            "head",
        }  # fmt: skip
    assert reports[0]["architecture"] == "deepseek_v3"
    assert reports[0]["config"] == reports[1]["config"]
    weights = tiny_models.weights()
    routed = sum(t.nbytes for name, t in weights.items() if ".experts." in name)
    assert reports[0]["components"]["routed experts"] == routed
    norms = sum(t.nbytes for name, t in weights.items() if name.endswith("norm.weight"))
    assert reports[0]["components"]["norms"] == norms


def test_inspect_for_people(bundle: Path) -> None:
    """Catches a table without tensors."""
    run = kdtree("inspect", bundle)
    assert run.code == 0 and run.err == ""
    assert "model.layers.2.mlp.experts.7.down_proj.weight" in run.out and "KV cache" in run.out


def test_doctor() -> None:
    """Catches a report that fails on this machine, or names other facts than it has."""
    value = kdtree("doctor", "--json", KDTREE_CPU_ISA="portable").json
    assert value["uses"] == {
        "device": "cpu",
        "instruction_set": "portable",
        "threads": len(os.sched_getaffinity(0)),
    }
    assert value["native"]["build"]["version"] == value["version"]
    assert value["packages"]["safetensors"] is not None
    assert kdtree("doctor").code == 0


def on_terminal(*arguments: str, **env: str) -> tuple[int, bytes]:
    """Exit code and everything that the command wrote to a terminal (stdout and stderr alike)."""
    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [*ARGV, *arguments], stdin=terminal, stdout=terminal, stderr=terminal, env=environment(**env)
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            data = os.read(controller, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not data:
            break
        seen += data
    os.close(controller)
    return child.wait(60), seen


def test_terminal_is_not_driven_by_a_models_text(folder: Path) -> None:
    """Catches control characters of the model's text that reach the terminal: a byte model emits them all."""
    options = (
        "generate",
        str(folder),
        "--prompt",
        "a",
        "--ignore-eos",
        "--max-tokens",
        "400",
        "--temperature",
        "5",
    )
    code, seen = on_terminal(*options, TERM="dumb", NO_COLOR="1")
    assert code == 0
    plain = kdtree(*options).out
    assert any(ord(c) < 0x20 and c not in "\n\t" for c in plain), "the text has no control character: a weak test"
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]", seen)
    assert b"tokens/s" in seen


def test_no_colour_where_none_is_wanted(folder: Path) -> None:
    """Catches colour codes in pipes, and on terminals where NO_COLOR is set."""
    assert "\x1b" not in kdtree("doctor").out + kdtree("inspect", folder).out
    code, seen = on_terminal("inspect", str(folder), NO_COLOR="1")
    assert code == 0 and not re.search(rb"\x1b\[[0-9;]*m", seen)
