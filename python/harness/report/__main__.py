"""python -m harness.report tree FILE [--out FILE.html] [--rounds A-B]: the rounds of a trace as pictures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.report.rounds import TraceError, read_trace
from harness.report.tree import page


def main(arguments: list[str]) -> int:
    """Runs the command; the exit code: 0 done, 1 a file that cannot be read or written, 2 usage (argparse)."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tree = commands.add_parser("tree", help="draw the rounds of a trace (kdtree generate --trace FILE)")
    tree.add_argument("file", metavar="FILE", type=Path)
    tree.add_argument("--out", metavar="FILE.html", type=Path, help="default: FILE with the suffix .html")
    tree.add_argument("--rounds", metavar="A-B", default="", help="only these rounds, counted from 0")
    given = parser.parse_args(arguments)
    first, last = 0, sys.maxsize
    if given.rounds:
        a, _, b = given.rounds.partition("-")
        if not a.isdecimal() or not (b or a).isdecimal():
            parser.error(f"--rounds is {given.rounds!r}; write 3-10, or 3")
        first, last = int(a), int(b or a)
    out: Path = given.out or given.file.with_suffix(".html")
    try:
        rounds = [r for r in read_trace(given.file) if first <= r.number <= last]
        if not rounds:
            raise TraceError(f"{given.file} has no rounds to draw")
        out.write_text(page(rounds, given.file.name), encoding="utf-8")
    except (OSError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {len(rounds)} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
