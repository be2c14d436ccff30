"""python -m harness.golden [--out DIR] [--check] [--threads N]

Generates every golden bundle with numpy. Without --check: writes them to DIR as .kdtr files. With --check:
compares with the manifest in git, exit code 1 and one sentence on any difference; writes only if --out is
given.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

DEFAULT_OUT = Path("bundles")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.golden", description=__doc__.splitlines()[2])
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to write (default {DEFAULT_OUT}/)")
    parser.add_argument("--check", action="store_true", help="compare with the manifest")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of numpy's BLAS (default: OPENBLAS_NUM_THREADS, else 1)",
    )
    parser.add_argument("--bundle", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--update-manifest", action="store_true", help="write the manifest (after a wanted change)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    args = parse(argv)
    if args.threads is not None and args.threads < 1:
        print(f"--threads is {args.threads}, expected at least 1", file=sys.stderr)
        return 2
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        # Read once, when numpy is imported: below. The matrices are small: more threads only wait for each
        # other.
        if args.threads is not None:
            os.environ[variable] = str(args.threads)
        else:
            os.environ.setdefault(variable, "1")
    from harness.golden import generate, manifest

    names = args.bundle or list(generate.GENERATORS)
    if unknown := [n for n in names if n not in generate.GENERATORS]:
        print(f"no bundle {unknown[0]}; there are {', '.join(generate.GENERATORS)}", file=sys.stderr)
        return 2
    if args.update_manifest and args.bundle:
        print("--update-manifest writes all bundles: leave --bundle out", file=sys.stderr)
        return 2
    out = args.out or (None if args.check or args.update_manifest else DEFAULT_OUT)
    expected = manifest.load() if args.check else {}
    described: dict[str, manifest.Bundle] = {}
    for name in names:
        start = time.perf_counter()
        tensors = generate.contiguous(generate.GENERATORS[name]())
        if args.check:
            if name not in expected:
                print(f"{name}: not in the manifest {manifest.path()}", file=sys.stderr)
                return 1
            if difference := manifest.difference(name, tensors, expected[name]):
                print(difference, file=sys.stderr)
                return 1
        if args.update_manifest:
            described[name] = manifest.describe(tensors)
        if out is not None:
            import kdtree_engine.kdtr as kdtr

            out.mkdir(parents=True, exist_ok=True)
            kdtr.write(out / f"{name}.kdtr", tensors)
        size = sum(value.nbytes for value in tensors.values())
        seconds = time.perf_counter() - start
        print(f"{name}: {len(tensors)} tensors, {size / 1e6:.1f} MB, {seconds:.1f} s", file=sys.stderr)
    if args.update_manifest:
        manifest.save(described)
    if args.check and not args.bundle and (extra := sorted(set(expected) - set(names))):
        print(f"{extra[0]}: in the manifest but not generated", file=sys.stderr)
        return 1
    print(
        f"{len(names)} bundle{'s' * (len(names) != 1)}"
        + (" as in the manifest" if args.check else "")
        + (f" in {out}" if out else "")
    )
    return 0


if __name__ == "__main__":
    from harness.guard import guarded

    sys.exit(guarded(main))
