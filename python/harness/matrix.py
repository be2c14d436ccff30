"""python -m harness.matrix: golden model bundles x backends x decoders, one line a leg.

    PASS  model_int4_tiny2  cpu  ddtree  tokens=24/24 exact  max_abs_logit_diff=8.2e-06  target_forwards=3
    bits=plain

A leg passes where the tokens are the bundle's, the logits behind them are within 1e-5 * max(1, largest
|logit|) of the float64 oracle's, and the target ran as often as it should: once a token plainly, as the
bundle says with draft trees (replayed at budget 64). Tree legs must also have the plain leg's logits bit for
bit. On CUDA both precisions run. Legs in bf16 (cuda/bf16) cannot have a float32 oracle's tokens: rounding moves
logits, and on random weights now and then a router to another expert, which moves them far. They are judged
along the bundle's own text by the median over positions of the largest difference, 3e-2 * max(1, largest
|logit|) at most; their tree legs by the plain leg's bits. docs/numerics.md ("Judging a decoding") states the rule,
and kdtree-verify judges by the same.
A leg that cannot run says NOT RUN with the reason and counts for nothing.
Exit code 0: all that ran passed; 1: one failed; 2: nothing ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import kdtree_engine
from harness.golden import drafts, generate
from kdtree_engine import _native, kdtr
from kdtree_engine.engine import Engine
from kdtree_engine.errors import EngineError

BACKENDS = ("cpu", "cuda")
DECODERS = ("plain", "ddtree")
PRECISIONS = {"cpu": ("f32",), "cuda": ("f32", "bf16")}
TOLERANCE = {"f32": 1e-5, "bf16": 3e-2}
Status = Literal["PASS", "FAIL", "NOT RUN"]
Array = npt.NDArray[Any]


@dataclass
class Leg:
    """One bundle on one backend by one decoder, and what came of it.

    `tokens_equal`: leading tokens that are the bundle's, of `tokens_expected`; `exact`: all of them and no
    more. `bits`: of tree legs, whether the
    logits are the plain leg's bit for bit ("plain", "DIFFER", or "not compared" where the plain leg did not
    run).
    """

    bundle: str
    backend: str
    decoder: str
    precision: str = "f32"
    status: Status = "NOT RUN"
    reasons: list[str] = field(default_factory=list)
    tokens_equal: int = 0
    tokens_expected: int = 0
    exact: bool = False
    max_abs_logit_diff: float | None = None
    median_abs_logit_diff: float | None = None
    allowed_logit_diff: float | None = None
    target_forwards: int | None = None
    accepted_lengths: list[int] = field(default_factory=list)
    bits: str | None = None
    device: str | None = None

    def record(self) -> dict[str, Any]:
        """For JSON, which has no NaN: null then."""
        difference = self.max_abs_logit_diff
        known = difference is not None and bool(np.isfinite(difference))
        return asdict(self) | {"max_abs_logit_diff": difference if known else None}

    def line(self) -> str:
        """For people; columns separated by two blanks."""
        several = len(PRECISIONS[self.backend]) > 1
        backend = f"{self.backend}/{self.precision}" if several else self.backend
        head = [self.status, self.bundle, backend, self.decoder]
        if self.status == "NOT RUN":
            head[0] = f"NOT RUN ({'; '.join(self.reasons)})"
            return "  ".join(head)
        exact = "exact" if self.exact else "DIFFER"
        head.append(f"tokens={self.tokens_equal}/{self.tokens_expected} {exact}")
        if self.max_abs_logit_diff is not None:
            head.append(f"max_abs_logit_diff={self.max_abs_logit_diff:.1e}")
        if self.median_abs_logit_diff is not None:
            head.append(f"median={self.median_abs_logit_diff:.1e}")
        if self.target_forwards is not None:
            head.append(f"target_forwards={self.target_forwards}")
        if self.bits is not None:
            head.append(f"bits={self.bits}")
        return "  ".join(head + ([f"({'; '.join(self.reasons)})"] if self.reasons else []))


@dataclass(frozen=True)
class Decoded:
    """tokens; logits float32 [tokens, vocab] behind them; target forwards; tokens emitted per round; `along`,
    in bf16: logits float32 [expected tokens, vocab] along the bundle's own text."""

    tokens: list[int]
    logits: npt.NDArray[np.float32]
    target_forwards: int
    accepted_lengths: list[int]
    along: npt.NDArray[np.float32] | None = None


def decode(engine: Engine, golden: Mapping[str, Array], decoder: str, precision: str) -> Decoded:
    """Greedy, as many tokens as the bundle has. EngineError where the engine cannot."""
    session = engine.session()
    result = session.generate(
        prompt_tokens=[int(t) for t in golden["prompt.tokens"]],
        max_tokens=len(golden["plain.tokens"]),
        ignore_eos=True,
        logprobs=1,  # which keeps the logits
        drafter="none" if decoder == "plain" else "replay",
        budget=0 if decoder == "plain" else drafts.BUDGET,
    ).run()
    along = None
    if precision != "f32":
        prompt, expected = ([int(t) for t in golden[name]] for name in ("prompt.tokens", "plain.tokens"))
        along = engine.session().score(prompt + expected[:-1])[len(prompt) - 1 :]
    return Decoded(
        result.tokens,
        np.array(session.native.logits(), dtype=np.float32),
        int(result.stats["target_forwards"]),
        [int(n) for n in result.stats["accepted_lengths"]],
        along,
    )


def judge(leg: Leg, golden: Mapping[str, Array], run: Decoded, plain: Decoded | None) -> None:
    """Fill in a leg from what was decoded. plain: the plain leg's run, for tree legs; None where it did not
    run."""
    expected = [int(t) for t in golden["plain.tokens"]]
    leg.tokens_expected = len(expected)
    agree = [a == b for a, b in zip(run.tokens, expected, strict=False)]
    leg.tokens_equal = agree.index(False) if False in agree else len(agree)
    leg.exact = run.tokens == expected
    reference = golden["plain.logits"].astype(np.float64)
    leg.allowed_logit_diff = TOLERANCE[leg.precision] * max(1.0, float(np.abs(reference).max()))
    # After a wrong token the text is another: decoding is compared up to there.
    logits = run.along if run.along is not None else run.logits
    rows = min(len(logits), len(expected) if run.along is not None else leg.tokens_equal + 1, len(expected))
    with np.errstate(invalid="ignore"):
        difference = np.abs(logits[:rows].astype(np.float64) - reference[:rows])
    leg.max_abs_logit_diff = float(difference.max(initial=0.0))
    judged = leg.max_abs_logit_diff
    if run.along is not None:
        judged = float(np.median(difference.max(axis=1)))
        leg.median_abs_logit_diff = judged
    if not judged <= leg.allowed_logit_diff:
        leg.reasons.append(f"logits differ by more than {leg.allowed_logit_diff:.1e}")
    if run.logits.shape != reference.shape:
        leg.reasons.append(f"logits have shape {list(run.logits.shape)}, expected {list(reference.shape)}")
    if run.along is None:
        judge_tokens(leg, golden, run)
    leg.target_forwards, leg.accepted_lengths = run.target_forwards, run.accepted_lengths
    if leg.decoder == "ddtree":
        judge_bits(leg, run, plain)
    leg.status = "FAIL" if leg.reasons else "PASS"


def judge_tokens(leg: Leg, golden: Mapping[str, Array], run: Decoded) -> None:
    """What only a leg with the oracle's own tokens can be held to: tokens, forwards, rounds."""
    if not leg.exact:
        leg.reasons.append(f"{len(run.tokens)} tokens, the first {leg.tokens_equal} as expected")
    forwards = leg.tokens_expected if leg.decoder == "plain" else int(golden["ddtree.target_forwards"])
    if run.target_forwards != forwards:
        leg.reasons.append(f"{run.target_forwards} target forwards, expected {forwards}")
    if leg.decoder == "ddtree":
        rounds = [int(n) for n in golden["accept.length"]]
        if run.accepted_lengths != rounds:
            leg.reasons.append(f"rounds emitted {run.accepted_lengths}, expected {rounds}")


def judge_bits(leg: Leg, run: Decoded, plain: Decoded | None) -> None:
    """Law 2: a tree leg has the plain leg's tokens and logits, bit for bit."""
    if plain is None:
        leg.bits = "not compared"
        leg.reasons.append("there is no plain run to compare the bits with")
        return
    same = plain.tokens == run.tokens and plain.logits.tobytes() == run.logits.tobytes()
    leg.bits = "plain" if same else "DIFFER"
    if not same:
        leg.reasons.append("logits are not the plain run's bits")


def run_pair(path: Path, backend: str, precision: str) -> Iterator[Leg]:
    """The legs of one bundle on one backend in one precision."""
    legs = [Leg(path.stem, backend, decoder, precision) for decoder in DECODERS]
    reason = unavailable(backend)
    engine: Engine | None = None
    if reason is None:
        try:
            engine = Engine.load(path, device=backend, precision=precision)
        except EngineError as error:
            if error.code != "unsupported":
                for leg in legs:
                    leg.status, leg.reasons = "FAIL", [str(error)]
                yield from legs
                return
            reason = str(error)
    if engine is None:
        for leg in legs:
            leg.reasons = [reason or "no engine"]
        yield from legs
        return
    golden = kdtr.read(path)
    plain: Decoded | None = None
    for leg in legs:
        leg.device = engine.description
        try:
            run = decode(engine, golden, leg.decoder, precision)
        except EngineError as error:
            leg.status, leg.reasons = "FAIL", [str(error)]
        else:
            judge(leg, golden, run, plain)
            plain = plain or run
        yield leg


def unavailable(backend: str) -> str | None:
    """Why a backend is not in this build, None where it is."""
    info = _native.build_info()
    if backend == "cuda" and not info["cuda"]:
        return "built without CUDA: " + str(info["cuda_reason"]).removeprefix("no ").strip("()")
    return None


def write_bundles(names: list[str], folder: Path) -> None:
    """Generate bundles into a folder."""
    for name in names:
        kdtr.write(folder / f"{name}.kdtr", generate.contiguous(generate.GENERATORS[name]()))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=",".join(BACKENDS), metavar="cpu,cuda", help="default: all")
    parser.add_argument("--bundle", nargs="+", metavar="NAME", help="default: all model bundles")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="read bundles from here instead of making them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit code."""
    args = parse(argv)
    backends, names = args.backend.split(","), args.bundle or list(generate.MODELS)
    for value, known, what in (
        *((b, BACKENDS, "backend") for b in backends),
        *((n, generate.MODELS, "model bundle") for n in names),
    ):
        if value not in known:
            print(f"no {what} {value!r}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    if args.dir is not None and (missing := [n for n in names if not (args.dir / f"{n}.kdtr").is_file()]):
        print(f"{args.dir} has no {missing[0]}.kdtr; python -m harness.golden --out DIR makes it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made:
        folder = args.dir or Path(made)
        if args.dir is None:
            write_bundles(names, folder)
        legs: list[Leg] = []
        for name in names:
            for backend in backends:
                for precision in PRECISIONS[backend]:
                    for leg in run_pair(folder / f"{name}.kdtr", backend, precision):
                        print(leg.line(), flush=True)
                        legs.append(leg)
    count = {status: sum(leg.status == status for leg in legs) for status in ("PASS", "FAIL", "NOT RUN")}
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['NOT RUN']} not run")
    if args.json is not None:
        report = {
            "version": kdtree_engine.__version__,
            "build": dict(_native.build_info()),
            "passed": count["PASS"],
            "failed": count["FAIL"],
            "not_run": count["NOT RUN"],
            "legs": [leg.record() for leg in legs],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if count["FAIL"]:
        return 1
    return 0 if count["PASS"] else 2


if __name__ == "__main__":
    from harness.guard import guarded

    sys.exit(guarded(main))
