"""The page of results: nothing unmeasured, nothing that a file smuggles in, a sentence for a damaged file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.report.__main__ import main
from harness.report.compare import common
from harness.report.document import html, markdown
from harness.report.fields import ResultError
from harness.report.page import build
from harness.report.results import Run, read, read_all

HERE = Path(__file__).resolve().parents[2] / "bench" / "results"


def bench(median: float, iqr: float = 0.0, name: str = "test_x", **info: Any) -> dict[str, Any]:
    return {
        "name": name,
        "fullname": f"bench/phase1_kernels/test_bench.py::{name}",
        "stats": {"median": median, "min": median, "iqr": iqr, "rounds": 9},
        "extra_info": {"path": "avx2", **info},
    }


def run_file(folder: Path, name: str, *benchmarks: dict[str, Any]) -> Path:
    file = folder / name
    file.write_text(
        json.dumps({"machine_info": {"machine": "x86_64"}, "datetime": "2026-01-02T03:04:05", "benchmarks": benchmarks})
    )
    return file


def runs(*files: Path) -> list[Run]:
    found = [read(f) for f in files]
    assert all(isinstance(r, Run) for r in found)
    return [r for r in found if isinstance(r, Run)]


Report = Callable[..., tuple[int, str]]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Report:
    """report(ARGUMENTS…) in an empty folder: exit code and what went to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err

    return run


def test_committed_results_make_a_page(tmp_path: Path, report: Report) -> None:
    """Catches a committed record that the report cannot read, or a page that needs the network."""
    code, said = report(str(HERE), "--out", "page.html", "--md", "page.md")
    assert code == 0, said
    page = (tmp_path / "page.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page), "something is fetched from outside"
    assert "<script src" not in page and "@import" not in page and "url(http" not in page
    assert "24 passed" in page and "bit for bit" in page
    assert (tmp_path / "page.md").read_text().startswith("# ")
    assert "passed over" not in said.lower() and "Passed over" not in page


def test_every_committed_record_is_in_the_page(tmp_path: Path) -> None:
    """Catches a record of a script in bench/ that the report leaves out: its figures were in no page at all."""
    page = html(build(read_all([HERE]), "t"))
    for file in HERE.glob("*.json"):
        assert f"results/{file.name}</td>" in page
    pairs = json.loads((HERE / "drafting_pairs_h200.json").read_text())["cells"]["code, greedy"]
    best = pairs["clock"]["auto_against_best_fixed"]
    assert f"{best['median']:.2f} ({best['low']:.2f}–{best['high']:.2f})" in page
    rows = json.loads((HERE / "int4_accuracy.json").read_text())["rows"]
    assert all(f"{row['bits_per_byte']:.5f}" in page for row in rows)
    kernels = json.loads((HERE / "h200_profile.json").read_text())["kernels"]
    assert f"{kernels[0]['us']:.1f}" in page


def test_a_record_that_lacks_a_figure_is_refused(tmp_path: Path, report: Report) -> None:
    """Catches a damaged record that becomes half a table."""
    record = json.loads((HERE / "int4_accuracy.json").read_text())
    del record["rows"][2]["bits_per_token"]
    (tmp_path / "int4.json").write_text(json.dumps(record))
    code, said = report("int4.json")
    assert code == 1 and said == "error: int4.json: rows[2].bits_per_token is missing; a number was expected\n"


def test_markdown_has_what_pictures_show(tmp_path: Path) -> None:
    """Catches a heading with nothing below it: Markdown left pictures out, and the roofline was one."""
    op = {"name": "linear", "rows": 8, "us": 10.0, "bytes": 16.0e6, "flops": 64.0e6}
    record = {"device": "a GPU", "date": "2026-01-02", "replays": 9, "read_gb_per_second": 4000.0, "results": [op]}
    (tmp_path / "ops.json").write_text(json.dumps(record))
    document = build(read_all([HERE, tmp_path]), "t")
    text = markdown(document)
    roofline = text[text.index("## Roofline") :].split("\n## ")[0]
    assert "memory 4000.0 GB/s" in roofline
    assert "| linear, rows 8 | 4 | 6400.0 | 16000.0 | 40 % | memory |" in roofline
    for section in document.sections:
        assert section.blocks
        assert re.search(rf"^## {re.escape(section.title)}\n\n\S", text.replace("\\", ""), re.M), section.title


def test_nothing_measured_is_nothing_shown(tmp_path: Path) -> None:
    """Catches figures made up where there are none: a lone run of benchmarks has no matrix, no laws and no roofline."""
    file = run_file(tmp_path, "a.json", bench(1e-3))
    page = html(build(read_all([file]), "t"))
    assert page.count("NOT RUN") >= 2  # matrix and laws
    assert "PASS" not in page and "identical" not in page and "GB/s" not in page


@pytest.mark.parametrize(
    ("latents", "said"),
    [(True, "tokens, logits, latents identical"), (None, "tokens, logits identical"), (False, "1 DIFFER")],
)
def test_what_was_not_compared_is_not_identical(tmp_path: Path, latents: bool | None, said: str) -> None:
    """Catches latents called identical in a run that did not look at them."""
    leg = {"budget": 8, "tokens_equal": True, "logits_equal": True, "latents_equal": latents, "longest": 3}
    file = tmp_path / "laws.json"
    file.write_text(json.dumps({"shape": "tiny", "device": "d", "prompt": 4, "tokens": 9, "budgets": [leg]}))
    page = html(build(read_all([file]), "t"))
    assert re.findall(r"(?:tokens, logits[a-z, ]* identical|[0-9]+ DIFFER)", page) == [said]


def test_cuda_figures_have_a_roofline(tmp_path: Path) -> None:
    """Catches operations and bytes of kdtree-bench-cuda that the page drops, and a roof made up where none was read."""
    op = {"name": "linear w4 7168x4096", "rows": 8, "us": 12.0, "floor_us": 3.8, "bytes": 16.5e6, "flops": 4.7e8}
    unknown = {"name": "accept", "rows": 65, "us": 1.4, "floor_us": 0.0, "bytes": 0.0, "flops": 0.0}
    record: dict[str, Any] = {"device": "a GPU", "date": "2026-01-02", "replays": 9, "results": [op, unknown]}
    file = tmp_path / "ops.json"
    file.write_text(json.dumps(record | {"read_gb_per_second": 4400.0}))
    page = html(build(read_all([file]), "t"))
    assert "Roofline" in page and "memory 4400.0 GB/s" in page
    assert "linear w4 7168x4096, rows 8: 39166.7 GFLOP/s at 28 operations a byte" in page
    assert "accept, rows 65: " not in page
    file.write_text(json.dumps(record))
    assert "Roofline" not in html(build(read_all([file]), "t"))


def test_text_of_results_is_escaped(tmp_path: Path) -> None:
    """Catches a name of a benchmark, a machine or a file that becomes part of the page."""
    evil = "<script>alert(1)</script>"
    file = run_file(tmp_path, "a.json", bench(1e-3, name=f"test_{evil}", path=evil))
    document = build(read_all([file]), evil)
    assert "<script>alert" not in html(document)
    assert "&lt;script&gt;" in html(document)
    assert "<script>alert" not in markdown(document)


def test_a_run_compared_with_itself_is_within_noise(tmp_path: Path) -> None:
    """Catches a comparison that calls equal runs faster or slower, and one that misses a doubled time."""
    old = run_file(tmp_path, "old.json", bench(1e-3, iqr=1e-5))
    twice = run_file(tmp_path, "new.json", bench(2e-3, iqr=1e-5))
    a, b = runs(old, twice)
    assert [c.verdict for c in common(a, a)] == ["within noise"]
    assert [c.verdict for c in common(a, b)] == ["slower"]
    assert [c.verdict for c in common(b, a)] == ["faster"]


def test_noise_widens_what_counts_as_equal(tmp_path: Path) -> None:
    """Catches a verdict from medians alone: times that spread by half of themselves prove no five per cent."""
    a, b = runs(
        run_file(tmp_path, "a.json", bench(1e-3, iqr=5e-4)), run_file(tmp_path, "b.json", bench(1.05e-3, iqr=5e-4))
    )
    assert [c.verdict for c in common(a, b)] == ["within noise"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON"]),
        ("[]", ["list"]),
        ('{"legs": 3}', ["legs", "list"]),
        ('{"legs": [{"status": "MAYBE"}]}', ["legs[0]", "status", "PASS"]),
        ('{"machine_info": {}, "benchmarks": [{"name": 3}]}', ["benchmarks[0]", "object"]),
        ('{"results": [{"us": -1, "name": "x", "rows": 1}], "replays": 1, "device": "d"}', ["[0].us", "at least"]),
        ('{"results": [{"us": NaN, "name": "x", "rows": 1}], "replays": 1, "device": "d"}', ["[0].us", "number"]),
        ('{"schema": "other/9", "results": []}', ["schema", "kdtree-bench/1"]),
        ("[" * 100000, ["nested"]),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, report: Report, text: str, words: list[str]) -> None:
    """Catches a traceback, or half a page, from a file that is cut or was never a result."""
    (tmp_path / "bad.json").write_text(text)
    code, said = report("bad.json")
    assert code == 1 and not (tmp_path / "report.html").exists()
    assert said.startswith("error: bad.json") and said.count("\n") == 1, said
    for word in words:
        assert word in said


def test_unknown_json_is_passed_over_in_a_folder_and_refused_by_name(tmp_path: Path, report: Report) -> None:
    """Catches a folder refused for a file of another kind, and a file that is silently left out."""
    run_file(tmp_path, "a.json", bench(1e-3))
    (tmp_path / "other.json").write_text('{"some": "thing", "cells": {}}')
    found = read_all([tmp_path])
    sentence = f"{tmp_path / 'other.json'}: no result of a kind that is known here; it holds some, cells"
    assert len(found.runs) == 1 and found.passed_over == [sentence]
    code, said = report(".")
    assert code == 0
    assert said == "passed over: other.json: no result of a kind that is known here; it holds some, cells\n"
    with pytest.raises(ResultError, match=r"other\.json"):
        read_all([tmp_path / "other.json"])


def test_wrong_usage_and_unwritable_pages_end_in_a_sentence(tmp_path: Path, report: Report) -> None:
    """Catches a page that is half written, and a missing folder that ends in a traceback."""
    run_file(tmp_path, "a.json", bench(1e-3))
    usages = ((["none"], 1), ([], 2), (["a.json", "--out", "no/such/page.html"], 1), (["--nonsense"], 2))
    for arguments, code in usages:
        got, said = report(*arguments)
        assert got == code and said, (arguments, said)
