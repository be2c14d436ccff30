"""From results to a report: what was checked, what was measured, and nothing else."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.report import acceptance, plots
from harness.report.compare import Comparison, common, compare, only_in
from harness.report.document import Block, Cell, Document, Heading, Picture, Section, Table, Text, number
from harness.report.origin import Origin
from harness.report.records import Record
from harness.report.results import (
    CUDA_PHASE,
    MODEL_PHASE,
    Figure,
    Law,
    Laws,
    Matrix,
    Result,
    Results,
    Run,
    Trace,
)

LOOKS = {"PASS": "good", "FAIL": "bad", "NOT RUN": "look"}
VERDICTS = {"faster": "good", "slower": "bad", "within noise": "soft", "spread unknown": "soft"}


def build(results: Results, title: str, pair: tuple[Run, Run] | None = None) -> Document:
    """The whole report; `pair`: two runs to compare, the old one first."""
    sections = [
        _comparison(*pair) if pair else None,
        _matrices(results.matrices),
        _laws(results.laws),
        *_phases(results.runs),
        _rooflines(results.runs),
        _acceptance(results.traces, results.runs),
        *_records(results.records),
        _deploys(results),
        _files(results),
    ]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    dates = sorted({r.origin.date for r in results.all if r.origin.date})
    span = f", measured {dates[0]} to {dates[-1]}" if dates else ""
    document = Document(title, f"{len(results.all)} files of results{span}; written {now}.")
    document.cards = _cards(results, pair)
    document.sections = [s for s in sections if s is not None]
    return document


def _cards(results: Results, pair: tuple[Run, Run] | None) -> list[tuple[str, str, str]]:
    cards = []
    if results.matrices:
        passed, failed, absent = (sum(m.count(s) for m in results.matrices) for s in LOOKS)
        text = f"{passed} passed" + (f", {failed} FAILED" if failed else "")
        cards.append((text, f"legs of the matrix; {absent} not run", "bad" if failed else "good"))
    else:
        cards.append(("NOT RUN", "matrix", "look"))
    if results.laws:
        models = [m for laws in results.laws for m in laws.models]
        different = sum(m.different for m in models)
        text = f"{different} differ" if different else "bit for bit"
        what = f"{sum(m.budgets for m in models)} runs with trees against plain decoding (laws)"
        cards.append((text, what, "bad" if different else "good"))
    else:
        cards.append(("NOT RUN", "laws", "look"))
    if results.runs:
        figures = sum(len(r.figures) for r in results.runs)
        machines = len({r.origin.machine for r in results.runs})
        cards.append((str(figures), f"benchmarks in {len(results.runs)} runs on {machines} machines", ""))
    else:
        cards.append(("NOT RUN", "benchmarks", "look"))
    if pair is not None:
        verdicts = [c.verdict for c in common(*pair)]
        slower, faster = verdicts.count("slower"), verdicts.count("faster")
        cards.append((f"{slower} slower, {faster} faster", f"of {len(verdicts)} compared", "bad" if slower else ""))
    return cards


def _about(origin: Origin) -> str:
    """Machine, date, commit: what is known."""
    commit = f"commit {origin.commit}" if origin.commit else "commit not recorded"
    return "; ".join(part for part in (origin.machine, origin.date, commit) if part)


# -- checks --------------------------------------------------------------------------------------------------------


def _matrices(matrices: Sequence[Matrix]) -> Section | None:
    if not matrices:
        return None
    section = Section("Matrix")
    for m in matrices:
        columns = list(dict.fromkeys((leg.backend, leg.precision, leg.decoder) for leg in m.legs))
        by_place = {(leg.bundle, leg.backend, leg.precision, leg.decoder): leg for leg in m.legs}
        rows = []
        for bundle in dict.fromkeys(leg.bundle for leg in m.legs):
            row = [Cell(bundle)]
            for column in columns:
                leg = by_place.get((bundle, *column))
                row.append(Cell("", "soft") if leg is None else Cell(leg.status, LOOKS[leg.status], title=leg.text))
            rows.append(row)
        head = ["bundle", *(f"{backend} {precision} {decoder}" for backend, precision, decoder in columns)]
        section.blocks += [Text(_about(m.origin), "soft"), Table(head, rows)]
        reasons = sorted({f"{leg.status}: {leg.text}" for leg in m.legs if leg.status != "PASS"})
        section.blocks += [Text(reason, LOOKS[reason.split(":")[0]]) for reason in reasons[:8]]
    return section


def _same(model: Law) -> str:
    """What was found identical: latents only where they were compared."""
    return "tokens, logits, latents identical" if model.latents else "tokens, logits identical"


def _laws(all_laws: Sequence[Laws]) -> Section | None:
    if not all_laws:
        return None
    section = Section("Laws")
    section.blocks.append(Text("Decoding with draft trees against plain decoding, by memcmp."))
    for laws in all_laws:
        rows = [
            [
                Cell(m.name),
                Cell(m.device, "soft"),
                number(str(m.prompt)),
                number(str(m.tokens)),
                number(str(m.budgets)),
                number("–" if m.longest is None else str(m.longest)),
                Cell(f"{m.different} DIFFER", "bad") if m.different else Cell(_same(m), "good"),
            ]
            for m in laws.models
        ]
        head = ("model", "device", "prompt", "tokens", "budgets", "longest path", "bits")
        section.blocks += [Text(_about(laws.origin), "soft"), Table(head, rows)]
    return section


# -- benchmarks ----------------------------------------------------------------------------------------------------


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def _phases(runs: Sequence[Run]) -> Iterable[Section]:
    """A section for each phase, a table for each machine in it, with what the earlier commits had."""
    phases = sorted({f.phase for r in runs for f in r.figures}, key=lambda p: (not p.startswith("phase"), p))
    titles = {CUDA_PHASE: "CUDA kernels", MODEL_PHASE: "Models (kdtree bench)"}
    for phase in phases:
        section = Section(titles.get(phase, phase.replace("_", ": ", 1).replace("_", " ")))
        for machine in dict.fromkeys(r.origin.machine for r in runs):
            here = [r for r in runs if r.origin.machine == machine and any(f.phase == phase for f in r.figures)]
            if here:
                section.blocks += _phase(phase, here)
        yield section


Column = tuple[str, Cell | None]


def _phase(phase: str, runs: Sequence[Run]) -> Iterable[Block]:
    history: dict[str, list[tuple[Run, Figure]]] = {}
    for run in runs:  # by date: the last one is the newest
        for figure in run.figures:
            if figure.phase == phase:
                history.setdefault(figure.name, []).append((run, figure))
    rows = [_figure(entries) for entries in history.values()]
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    table = [[row.get(name, Cell("")) for name in names] for row in rows]
    yield Text("; then ".join(dict.fromkeys(_about(r.origin) for r in runs)), "soft")
    yield Table(names, table)
    notes = []
    if any(f.noise is not None for entries in history.values() for _, f in entries):
        notes.append("± is the noise of the median (1.57 IQR / √rounds).")
    if "% of read" in names or "GB/s" in names:
        notes.append("% of read: of what the same machine read at that time; ≥: at least so many bytes were read.")
    if any(f.drafter == "planted" for entries in history.values() for _, f in entries):
        notes.append("planted drafts come from the plain run: what the mechanism costs and gains, not a drafter.")
    if notes:
        yield Text(" ".join(notes), "soft")


COLUMNS = (
    "benchmark", "drafts", "median", "best", "t/s", "accepted", "GB/s", "% of read", "GFLOP/s", "% of floor", "note",
    "history", "against the run before",
)  # fmt: skip


def _figure(entries: Sequence[tuple[Run, Figure]]) -> dict[str, Cell]:
    """The newest figure of one benchmark; only what was measured."""
    run, f = entries[-1]
    noise = "" if f.noise is None or not f.rounds else f" ± {100 * f.noise:.1f} %"
    row = {
        "benchmark": Cell(f.name, title=_about(run.origin)),
        "median": number(_time(f.seconds) + noise, title=f"{f.rounds} rounds" if f.rounds else ""),
    }
    if f.rounds:
        row["best"] = number(_time(f.best))
    if f.drafter:
        row["drafts"] = Cell("plain" if f.drafter == "none" else f"{f.drafter}, {f.budget}")
    if f.tokens_per_second is not None:
        spread = f" ± {f.spread:.2f}" if f.spread is not None else ""
        row["t/s"] = number(f"{f.tokens_per_second:.2f}{spread}")
    if f.accepted is not None:
        row["accepted"] = number(f"{f.accepted:.2f}")
    if f.gb_per_second is not None:
        row["GB/s"] = number(f"{'' if f.exact else '≥ '}{f.gb_per_second:.1f}")
        if f.percent_of_read is not None:
            row["% of read"] = number(f"{'' if f.exact else '≥ '}{f.percent_of_read:.0f} %")
        elif f.cache in ("in cache", "unknown"):
            row["% of read"] = number({"in cache": "in cache", "unknown": "cache unknown"}[f.cache], "soft")
    if f.gflops is not None:
        row["GFLOP/s"] = number(f"{f.gflops:.1f}")
    if f.floor_percent is not None:
        row["% of floor"] = number(f"{f.floor_percent:.0f} %", title=f"bound by {f.floor_by}")
    if f.note:
        row["note"] = Cell(f.note, "soft")
    if len(entries) > 1:
        times = [figure.seconds for _, figure in entries]
        about = ", ".join(f"{r.origin.commit or r.origin.date}: {_time(g.seconds)}" for r, g in entries)
        row["history"] = Cell(
            " → ".join(_time(t) for t in times[-3:]), "soft", title=about, picture=plots.sparkline(times, about)
        )
        row["against the run before"] = _verdict(compare(entries[-2][1], f))
    return row


def _verdict(c: Comparison) -> Cell:
    bound = "" if c.bound is None else f" (noise ± {100 * c.bound:.0f} %)"
    change = f"{100 * c.change:+.0f} % time"
    return Cell(f"{c.verdict}: {change}{bound}", VERDICTS[c.verdict])


def _comparison(old: Run, new: Run) -> Section:
    section = Section("Comparison")
    section.blocks.append(Text(f"Old: {old.origin.file.name}, {_about(old.origin)}.", "soft"))
    section.blocks.append(Text(f"New: {new.origin.file.name}, {_about(new.origin)}.", "soft"))
    if old.origin.machine != new.origin.machine:
        section.blocks.append(Text("The machines are not the same: differences are theirs too.", "look"))
    found = common(old, new)
    if not found:
        section.blocks.append(Text("The two runs have no benchmark in common.", "look"))
    rows = [
        [
            Cell(c.new.name),
            number(_time(c.old.seconds)),
            number(_time(c.new.seconds)),
            number(f"{100 * c.change:+.1f} %"),
            number("" if c.bound is None else f"± {100 * c.bound:.1f} %"),
            Cell(c.verdict, VERDICTS[c.verdict]),
        ]
        for c in found
    ]
    if rows:
        section.blocks.append(Table(("benchmark", "old", "new", "change of time", "noise bound", "verdict"), rows))
        section.blocks.append(
            Text(
                "Noise bound: the noise of both medians, and how much the machine's own rates changed between the "
                "runs; 2 % at least.",
                "soft",
            )
        )
    for run, other, which in ((old, new, "old"), (new, old, "new")):
        if names := only_in(run, other):
            shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            section.blocks.append(Text(f"Only in the {which} run: {shown}.", "soft"))
    return section


def _rooflines(runs: Sequence[Run]) -> Section | None:
    section = Section("Roofline")
    for machine in dict.fromkeys(r.origin.machine for r in runs):
        newest: dict[tuple[str, str], Figure] = {}
        here = [r for r in runs if r.origin.machine == machine]
        for run in here:
            newest |= {(f.phase, f.name): f for f in run.figures}
        shown = [f for f in newest.values() if f.bytes and f.flops and f.cache == "cold"]
        reads = [f.read for f in shown if f.read]
        if not shown or not reads:
            continue
        read = max(r for run in here if (r := run.best(lambda f: f.read)) is not None)
        sgemm = max((s for run in here if (s := run.best(lambda f: f.sgemm)) is not None), default=None)
        phases = list(dict.fromkeys(f.phase for f in shown))
        colours = dict(zip(phases, itertools.cycle(plots.COLOURS), strict=False))
        points = [
            plots.Point(
                x=f.flops / f.bytes,
                y=f.flops / f.seconds / 1e9,
                about=f"{f.name}: {f.flops / f.seconds / 1e9:.1f} GFLOP/s at {f.flops / f.bytes:.2g} operations a byte",
                label=f.name,
                colour=colours[f.phase],
            )
            for f in shown
            if f.bytes and f.flops
        ]
        roof = f"memory {read:.1f} GB/s" + (f", sgemm {sgemm:.0f} GFLOP/s" if sgemm else "")
        caption = f"Medians, under what the machine itself gave (best median of a benchmark's yardsticks): {roof}."
        key = [(colours[p], p.replace("_", ": ", 1).replace("_", " ")) for p in phases]
        picture = Picture(plots.roofline(points, read, sgemm), caption, key, _under_roof(points, read, sgemm))
        section.blocks += [Text(machine, "soft"), picture]
    return section if section.blocks else None


def _under_roof(points: Sequence[plots.Point], read: float, sgemm: float | None) -> Table:
    """The points of a roofline, and how much of their roof they reach."""
    rows = []
    for point in points:
        memory = read * point.x
        bound = "operations" if sgemm is not None and sgemm < memory else "memory"
        roof = memory if sgemm is None else min(memory, sgemm)
        figures = (f"{point.x:.3g}", f"{point.y:.1f}", f"{roof:.1f}", f"{100 * point.y / roof:.0f} %")
        rows.append([Cell(point.label), *map(number, figures), Cell(bound, "soft")])
    return Table(("benchmark", "operations a byte", "GFLOP/s", "roof", "of the roof", "bound by"), rows)


# -- acceptance ----------------------------------------------------------------------------------------------------


def _acceptance(traces: Sequence[Trace], runs: Sequence[Run]) -> Section | None:
    lines: list[plots.Line] = []
    key: list[tuple[str, str]] = []
    rows: list[list[Cell]] = []
    colours = itertools.cycle(plots.COLOURS)
    for trace in traces:
        points = acceptance.curve(trace.rounds)
        if not points:
            continue
        colour, name = next(colours), trace.origin.file.name
        kind = "fixed budget" if acceptance.fixed(trace.rounds) else "chosen budget: large ones are biased"
        key.append((colour, f"{name} ({len(trace.rounds)} rounds, {kind})"))
        lines.append(plots.Line([(p.budget, p.mean) for p in points], colour, name, marks=True))
        rows += [[Cell(name), number(str(p.budget)), number(f"{p.mean:.2f}"), number(str(p.rounds))] for p in points]
    for run in runs:
        by_drafter: dict[str, list[tuple[float, float]]] = {}
        for f in run.figures:
            if f.accepted is not None and f.budget.isdecimal():
                by_drafter.setdefault(f.drafter or "plain", []).append((float(f.budget), f.accepted))
                # a step and a decoding of the same budget are different texts: each stands for itself
        for drafter, measured in by_drafter.items():
            if run.origin.kind == "kdtree bench" and len(measured) > 1:
                colour = next(colours)
                key.append((colour, f"{run.origin.file.name}: {drafter}, kdtree bench"))
                lines.append(plots.Line(sorted(measured), colour, run.origin.file.name, dashed=True, marks=True))
                name = f"{run.origin.file.name}, {drafter}"
                rows += [[Cell(name), number(f"{x:g}"), number(f"{y:.2f}"), number("–")] for x, y in sorted(measured)]
    if not lines:
        return None
    section = Section("Accepted length against budget")
    caption = (
        "Tokens emitted a round (accepted drafts and one more) over draft nodes verified. From a trace: each round's "
        "own tree cut to the budget; rounds that were cut by an end or verified fewer nodes are left out."
    )
    section.blocks.append(Picture(plots.curves(lines, ("draft nodes", "tokens a round")), caption, key))
    section.blocks.append(Table(("measured", "budget", "tokens a round", "rounds"), rows))
    return section


# -- records -------------------------------------------------------------------------------------------------------


def _records(records: Sequence[Record]) -> Iterable[Section]:
    for title in dict.fromkeys(record.title for record in records):
        section = Section(title)
        for record in records:
            if record.title == title:
                section.blocks.append(Text(_about(record.origin), "soft"))
                for sheet in record.sheets:
                    section.blocks += [Text(sheet.caption), sheet.table]
        yield section


# -- where it comes from -------------------------------------------------------------------------------------------


def _deploys(results: Results) -> Section | None:
    if not results.deploys:
        return None
    section = Section("Deploys")
    rows = [
        [
            Cell(d.origin.machine),
            Cell(d.origin.date),
            Cell(d.digest),
            Cell("done" if d.code == 0 else f"exit code {d.code}", "good" if d.code == 0 else "bad"),
            Cell(", ".join(f"{n} {s:.1f} s" + (f" FAILED ({c})" if c else "") for n, s, c in d.steps), "soft"),
        ]
        for d in results.deploys
    ]
    section.blocks.append(Table(("host", "date", "release", "end", "stages"), rows))
    return section


def _files(results: Results) -> Section:
    section = Section("Files")

    def row(r: Result) -> list[Cell]:
        o = r.origin
        where = Path(*o.file.parts[-3:])
        commit = Cell(o.commit) if o.commit else Cell("not recorded", "look")
        return [Cell(str(where)), Cell(o.kind), Cell(o.machine, "soft"), Cell(o.date), commit]

    section.blocks.append(Table(("file", "kind", "machine", "date", "commit"), [row(r) for r in results.all]))
    absent = [
        name
        for name, there in (
            ("matrix (harness.matrix)", results.matrices),
            ("laws (kdtree-laws)", results.laws),
            ("benchmarks (pytest bench, kdtree bench)", results.runs),
            ("traces (kdtree generate --trace)", results.traces),
        )
        if not there
    ]
    if absent:
        section.blocks.append(Text("NOT RUN, or not among these files: " + "; ".join(absent) + ".", "look"))
    section.blocks += [Text(f"Passed over: {said}.", "look") for said in results.passed_over]
    section.blocks.append(Heading("How to make more"))
    section.blocks.append(Text("docs/cli.md names the command behind each kind of file."))
    return section
