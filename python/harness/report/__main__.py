"""python -m harness.report [PATH...] [--compare OLD NEW]: results as one HTML page and as Markdown.

PATH is a file of results or a folder with some (default: bench/results and reports). `python -m harness.report tree
FILE` draws the rounds of a trace.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.report.document import html, markdown
from harness.report.fields import ResultError
from harness.report.page import build
from harness.report.results import Results, Run, read, read_all
from harness.report.rounds import TraceError, read_trace
from harness.report.tree import page

DEFAULT = ("bench/results", "reports")


def main(arguments: list[str]) -> int:
    """Runs the command; the exit code: 0 done, 1 a file that cannot be read or written, 2 usage (argparse)."""
    try:
        return tree(arguments[1:]) if arguments[:1] == ["tree"] else report(arguments)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror or error}", file=sys.stderr)
    except (ResultError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def report(arguments: list[str]) -> int:
    """The page of results."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", help="file of results, or folder with some")
    out = Path("report.html")
    parser.add_argument("--out", metavar="FILE.html", type=Path, default=out, help="default: report.html")
    parser.add_argument("--md", metavar="FILE.md", type=Path, help="the same as Markdown, too")
    parser.add_argument("--compare", metavar=("OLD", "NEW"), type=Path, nargs=2, help="two files of benchmarks")
    parser.add_argument("--title", default="kdtree-engine: results")
    given = parser.parse_args(arguments)
    paths: list[Path] = given.paths or [p for p in map(Path, DEFAULT) if p.is_dir()]
    if not paths and not given.compare:
        parser.error(f"no PATH is given, and neither {' nor '.join(DEFAULT)} is here")
    if not given.paths and given.compare:
        paths = []
    results = read_all(paths)
    pair = None
    if given.compare:
        pair = benchmarks(given.compare[0]), benchmarks(given.compare[1])
        known = {r.origin.file.resolve() for r in results.runs}
        for run in pair:  # each file once, also where one is compared with itself
            if (file := run.origin.file.resolve()) not in known:
                known.add(file)
                results.runs.append(run)
        results.runs.sort(key=lambda r: (r.origin.date, str(r.origin.file)))
    if not results.all:
        raise ResultError(f"{', '.join(map(str, paths))}: no results are in there")
    document = build(results, given.title, pair)
    write(given.out, html(document))
    if given.md is not None:
        write(given.md, markdown(document))
    print(f"{given.out}: {summary(results)}")
    for said in results.passed_over:
        print(f"passed over: {said}", file=sys.stderr)
    return 0


def benchmarks(file: Path) -> Run:
    """A file that --compare can take. Raises ResultError."""
    result = read(file)
    if not isinstance(result, Run):
        raise ResultError(f"{file}: no benchmarks are in it, so it cannot be compared")
    return result


def summary(results: Results) -> str:
    """`2 runs of benchmarks, 1 matrix`."""
    names = (
        (results.runs, "run of benchmarks", "runs of benchmarks"),
        (results.matrices, "matrix", "matrices"),
        (results.laws, "check of the laws", "checks of the laws"),
        (results.traces, "trace", "traces"),
        (results.deploys, "deploy", "deploys"),
        (results.records, "record", "records"),
    )
    return ", ".join(f"{len(found)} {one if len(found) == 1 else many}" for found, one, many in names if found)


def write(file: Path, text: str) -> None:
    """Whole or not at all. Raises OSError."""
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def tree(arguments: list[str]) -> int:
    """The rounds of a trace as pictures."""
    parser = argparse.ArgumentParser(prog="python -m harness.report tree")
    parser.add_argument("file", metavar="FILE", type=Path, help="what kdtree generate --trace FILE wrote")
    parser.add_argument("--out", metavar="FILE.html", type=Path, help="default: FILE with the suffix .html")
    parser.add_argument("--rounds", metavar="A-B", default="", help="only these rounds, counted from 0")
    given = parser.parse_args(arguments)
    first, last = 0, sys.maxsize
    if given.rounds:
        a, _, b = given.rounds.partition("-")
        if not a.isdecimal() or not (b or a).isdecimal():
            parser.error(f"--rounds is {given.rounds!r}; write 3-10, or 3")
        first, last = int(a), int(b or a)
        if last < first:
            parser.error(f"--rounds is {given.rounds!r}; the first must not come after the last")
    all_rounds = read_trace(given.file)
    out: Path = given.out or given.file.with_suffix(".html")
    if out.resolve() == given.file.resolve():
        parser.error(f"{out} is the trace itself; name another file with --out")
    rounds = [r for r in all_rounds if first <= r.number <= last]
    if not rounds:
        numbers = [r.number for r in all_rounds]
        raise TraceError(f"{given.file} has the rounds {min(numbers)} to {max(numbers)}; --rounds is {given.rounds}")
    write(out, page(rounds, given.file.name))
    print(f"{out}: {len(rounds)} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
