"""The documents say what the program says; the command line; the plots."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from harness.scale import documents, plots, series, tables
from harness.scale.__main__ import app
from harness.scale.context import Context
from harness.scale.figures import FIGURES
from harness.scale.shapes import MOONLIGHT
from harness.scale.table import Column, Table, render
from harness.scale.tables_cluster import LOADS, Load, best, choices
from harness.scale.values import ScaleError

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in documents.paths(DOCS)}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# ------------------------------------------------------------------------------------------------------------
# documents


def test_committed_documents_are_what_the_program_says() -> None:
    """Catches a changed number that did not reach the documents, and a table or figure edited by hand. To repair:
    python -m harness.scale --write-docs."""
    assert documents.stale(DOCS) == []


def test_every_number_of_the_documents_is_written() -> None:
    """Catches a table or figure that is not between markers: whatever stands in one is emptied and comes back."""
    for text in TEXTS.values():
        emptied = re.sub(r"(<!--=[^>]*?-->).*?(<!--/-->)", r"\1\2", text, flags=re.DOTALL)
        emptied = re.sub(r"(<!-- table [^>]*? -->\n).*?(<!-- end -->)", r"\1\2", emptied, flags=re.DOTALL)
        assert len(re.findall(r"^\|", emptied, re.MULTILINE)) <= 8  # the one table that is by hand
        assert len(emptied) < 0.75 * len(text)
        assert documents.updated(emptied) == text


def test_every_claim_of_the_summaries_is_marked() -> None:
    """Catches a claim without its kind: each item of the opening lists says modelled, measured or published."""
    for text in TEXTS.values():
        summary = text.split("## What to take away")[1].split("\n## ")[0]
        items = re.split(r"\n- ", summary)[1:]
        assert len(items) >= 4
        marked = [bool(re.search(r"\b(modelled|measured|published)\b", item, re.IGNORECASE)) for item in items]
        assert all(marked), items[marked.index(False)]


def test_every_figure_stands_somewhere() -> None:
    """Catches figures that nobody reads any more."""
    used = set(re.findall(r"<!--=([^>]*?)-->", "".join(TEXTS.values())))
    assert used == set(FIGURES)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("<!-- table components -->\n", "no end"),
        ("<!-- end -->\n", "before it"),
        ("<!--=expert-->24", "no end"),
        ("24<!--/-->", "before it"),
        ("<!-- table nothing -->\n<!-- end -->", "no table 'nothing'"),
        ("<!--=nothing-->1<!--/-->", "no figure 'nothing'"),
        ("<!-- table widths rows=1 -->\n<!-- end -->", "no table option 'rows'"),
        ("<!-- table steps systems=abacus -->\n<!-- end -->", "no system 'abacus'"),
    ],
)
def test_broken_markers_are_refused(text: str, named: str) -> None:
    """Catches a marker with a typing error, which would leave old numbers standing for ever."""
    with pytest.raises(ScaleError, match=named):
        documents.updated(text)


def test_text_between_markers_is_replaced_and_no_other() -> None:
    """Catches a replacement that eats the text around it."""
    text = "before <!--=expert-->old<!--/--> after\n<!-- table widths widths=1,2 -->\nold\n<!-- end -->\nlast"
    new = documents.updated(text)
    assert new.startswith("before <!--=expert-->24.77 MB<!--/--> after\n<!-- table widths widths=1,2 -->\n**k2.6")
    assert new.endswith("<!-- end -->\nlast") and "old" not in new and "| 4 |" not in new
    assert documents.updated(new) == new


def test_missing_documents_are_named(tmp_path: Path) -> None:
    """Catches a traceback where the program runs beside no docs/."""
    result = run("--check-docs", "--docs", tmp_path)
    assert result.exit_code == 1 and documents.DOCUMENTS[0] in result.stderr


# ------------------------------------------------------------------------------------------------------------
# plots


@pytest.mark.parametrize("name", series.PLOTS)
def test_committed_plots_show_the_current_numbers(name: str) -> None:
    """Catches a picture of older numbers: each carries the digest of what it was drawn from.

    To repair, with matplotlib: python -m harness.scale --write-docs."""
    path = DOCS / "img" / f"scale_{name}.svg"
    text = path.read_text(encoding="utf-8")
    assert plots.DIGEST + series.PLOTS[name](Context()).digest() in text
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert path.stat().st_size < 40_000
    assert f"img/scale_{name}.svg" in "".join(TEXTS.values())


def test_plots_are_drawn_the_same_twice(tmp_path: Path) -> None:
    """Catches pictures that change without their data: dates or random names in the file."""
    pytest.importorskip("matplotlib", reason="plots need the extra [report]")
    first, second = plots.write(Context(), tmp_path / "a"), plots.write(Context(), tmp_path / "b")
    assert [p.name for p in first] == [f"scale_{name}.svg" for name in series.PLOTS]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_without_a_plot_library_tables_still_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tool that is useless where matplotlib is not, and one that says nothing about it."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run("cache", "--plots", tmp_path)
    assert result.exit_code == 1 and "70,272" in result.stdout
    assert "kdtree-engine[report]" in result.stderr and len(result.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------
# tables and command line


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_in_every_format(name: str) -> None:
    """Catches a table that one of the formats cannot print, and numbers that are not finite."""
    table = tables.build(name, Context())
    assert table.rows and table.markdown().startswith(f"**{table.title}**")
    assert all(math.isfinite(cell) for row in table.rows for cell in row if isinstance(cell, (int, float)))
    assert len(list(csv.reader(io.StringIO(table.csv())))) == len(table.rows) + 1
    (record,) = json.loads(render([table], "json"))
    assert record["name"] == name
    assert [list(row.values()) for row in record["rows"]] == [list(row) for row in table.rows]


def test_markdown_escapes_and_rounds() -> None:
    """Catches a cell that breaks the table, and full precision where the column says two digits."""
    table = Table("t", "T", [Column("a"), Column("b", 1), Column("c")], [["x|y", 1234.56, None]], "modelled", ["note"])
    assert table.markdown().splitlines() == [
        "**T** (modelled)",
        "",
        "| a | b | c |",
        "|---|---|---|",
        "| x\\|y | 1,234.6 |  |",
        "",
        "note",
    ]
    assert table.csv() == "a,b,c\nx|y,1234.56,"


def test_summary_and_names() -> None:
    """Catches a default that prints nothing of use."""
    result = run()
    assert result.exit_code == 0 and "554.27" in result.stdout and "steps/s" in result.stdout
    assert run("--list").stdout.split("\n")[1] == "models: k2.6 v3 moonlight v2-lite glm-4.7-flash"


def test_other_models_and_routings(tmp_path: Path) -> None:
    """Catches options that are read and not used."""
    curve = tmp_path / "curve.json"
    points = [[1, 6], [2, 9], [64, 60]]
    curve.write_text(json.dumps({"experts": 64, "top_k": 6, "source": "trace", "points": points}), encoding="utf-8")
    arguments = ("--model", "moonlight", "--tp", 4, "--widths", "1,2", "--format", "json")
    (measured,) = json.loads(run("widths", *arguments, "--routing", curve).stdout)
    assert [row["distinct experts D(N)"] for row in measured["rows"]] == [6, 9]
    assert "trace" in measured["title"]
    (bf16,) = json.loads(run("components", *arguments, "--experts", "bf16").stdout)
    assert bf16["rows"][0]["component"] == "routed experts"
    one = run("steps", "--model", "moonlight", "--tp", 4, "--system", "h200x8", "--tokens", 0)
    assert one.exit_code == 0 and "pro6000x8" not in one.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), "no table 'nothing'"),
        (("--model", "k9"), "no model 'k9'"),
        (("--system", "abacus"), "no system 'abacus'"),
        (("--widths", "1,x"), "--widths '1,x'"),
        (("--widths", "2,1"), "ascending"),
        (("--widths", "0,1"), "positive"),
        (("steps", "--model", "moonlight"), "5.5 groups of 32"),
        (("speculation", "--model", "v3"), "K2.5's and K2.6's, not v3's"),
        (("peers", "--model", "v3"), "K2.5's and K2.6's, not v3's"),
        (("widths", "--routing", "excess:2"), "excess share 2.0"),
        (("steps", "--tp", "128"), "128"),
    ],
)
def test_refusals_are_one_sentence(arguments: tuple[str, ...], named: str) -> None:
    """Catches a traceback, or a wrong table, for a question that has no answer."""
    result = run(*arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1 and named in result.stderr


def test_break_even_of_other_models_leaves_the_drafter_out() -> None:
    """Catches K2.6's drafter being charged to a model that has none."""
    table = tables.build("break_even", Context(shape=MOONLIGHT, tp=4))
    assert not any("DFlash" in column.name for column in table.columns)


def test_best_layout_under_a_load() -> None:
    """Catches a choice that does not fit, is too slow, or is beaten by another: all choices are looked at again."""
    context = Context()
    for load in LOADS:
        for system in context.systems:
            chosen, all_choices = best(context, system, load), list(choices(context, system, load))
            if isinstance(chosen, str):
                assert not [each for each in all_choices if load.least and each.rate >= load.least]
                continue
            assert chosen in all_choices and chosen.rate >= load.least and chosen.gpus <= system.gpus
            enough = [each for each in all_choices if each.rate >= load.least]
            if load.least:
                assert chosen.dollars == min(each.dollars for each in enough)
            else:
                assert chosen.rate == max(each.rate for each in enough)
    crowd = Load("more than fits", 10_000, 262_144, 1.0)
    assert best(context, context.systems[0], crowd) == "does not fit"
    assert str(best(context, context.systems[0], LOADS[3])).startswith("too slow")
