"""python -m harness.scale: the arithmetic of scaling up, as tables, plots and documents."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.scale import documents, hardware, plots, routing, shapes, tables
from harness.scale.context import WIDTHS, Context
from harness.scale.table import render
from harness.scale.values import ScaleError

SUMMARY = ("components", "widths", "memory", "steps", "break_even")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def scale(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE]...", help="Tables to print; all: every one.")
    ] = None,
    model: Annotated[str, typer.Option(help="Built-in model, or a config.json or its folder.")] = "k2.6",
    experts: Annotated[Literal["int4", "bf16"] | None, typer.Option(help="Format of the routed experts.")] = None,
    distinct: Annotated[
        str,
        typer.Option("--routing", metavar="independent|excess:S|FILE", help="D(N); FILE: measured, JSON."),
    ] = "independent",
    system: Annotated[list[str] | None, typer.Option(help="Only this system; may be repeated.")] = None,
    widths: Annotated[str, typer.Option(metavar="N,N,...", help="Rows of a step.")] = ",".join(map(str, WIDTHS)),
    tokens: Annotated[int, typer.Option(min=0, help="Cached positions of a sequence.")] = 4096,
    tp: Annotated[int, typer.Option(min=1, help="Width of tensor parallelism inside a domain.")] = 8,
    small: Annotated[
        Literal["replicated", "sharded"], typer.Option(help="q_a, kv_a and router: read whole by every rank, or split.")
    ] = "sharded",
    form: Annotated[Literal["md", "csv", "json"], typer.Option("--format", help="Of the tables.")] = "md",
    list_tables: Annotated[bool, typer.Option("--list", help="Names of tables, models and systems.")] = False,
    plot: Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Also write the plots as SVG.")] = None,
    write_docs: Annotated[bool, typer.Option("--write-docs", help="Bring docs/ up to date, plots included.")] = False,
    check_docs: Annotated[
        bool, typer.Option("--check-docs", help="Exit code 1 where docs/ is not what this program says.")
    ] = False,
    docs: Annotated[Path, typer.Option(metavar="DIR", help="Where the documents are.")] = Path("docs"),
) -> None:
    """Bytes, memory, step times and break-even points of a model on a system, by arithmetic alone.

    Prints a summary, or the named tables. Every input stands with its source in the table `sources`.
    """
    try:
        if list_tables:
            print("tables:", *tables.TABLES)
            print("models:", *shapes.SHAPES)
            print("systems:", *hardware.SYSTEMS)
        elif write_docs or check_docs:
            _documents(docs, write_docs)
        else:
            context = _context(model, experts, distinct, system, widths, tokens, tp, small)
            chosen = list(tables.TABLES) if names == ["all"] else names or list(SUMMARY)
            print(render([tables.build(name, context) for name in chosen], form))
            if plot is not None:
                for path in plots.write(context, plot):
                    print(path, file=sys.stderr)
    except ScaleError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _context(
    model: str,
    experts: shapes.ExpertFormat | None,
    distinct: str,
    system: list[str] | None,
    widths: str,
    tokens: int,
    tp: int,
    small: Literal["replicated", "sharded"],
) -> Context:
    shape = shapes.resolve(model)
    context = Context(
        shape=shape.with_experts(experts) if experts else shape,
        routing=routing.resolve(distinct),
        widths=_widths(widths),
        tokens=tokens,
        tp=tp,
        small=small,
    )
    return replace(context, systems=tuple(map(hardware.resolve, system))) if system else context


def _widths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(width) for width in text.split(","))
    except ValueError as error:
        raise ScaleError(f"--widths {text!r}: expected integers with commas between them") from error
    if min(found) < 1 or list(found) != sorted(set(found)):
        raise ScaleError(f"--widths {text!r}: expected positive integers in ascending order")
    return found


def _documents(folder: Path, write: bool) -> None:
    if not write:
        if stale := documents.stale(folder):
            raise ScaleError(f"{', '.join(map(str, stale))}: not what this program says; run it with --write-docs")
        print("documents are up to date")
        return
    for path in documents.write(folder):
        print(path)
    try:
        for path in plots.write(Context(), folder / "img"):
            print(path)
    except ScaleError as error:
        print(f"plots left as they are: {error}", file=sys.stderr)


if __name__ == "__main__":
    app(prog_name="python -m harness.scale")
