"""Speed of a model: prompts and decoding, plain and with draft trees, beside what the memory can do.

A test is llama-bench's: `pp512` computes a prompt of 512 tokens, `tg128` generates 128 tokens one after another,
`@ d4096` means that 4096 tokens lie before it. Each is run once to warm up and then a number of times. Generation is
greedy and goes past end tokens, so that every run does the same work; a run with draft trees must emit the tokens of
the plain one (law 2), or the benchmark fails.

Bytes are counted from the weights as they lie on the device. A forward over one row reads exactly so many; over
several rows of a mixture of experts it reads at least the experts of one row, and the figure is marked as a lower
bound. Beside it stands what the same device reads at that moment, measured between the runs. More than that (with the
share that the last cache could serve, and TOLERANCE) cannot be, and is an error; where a forward reads less than four
times the last cache, its figure says nothing about the memory and is labelled `in cache`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import Any, Literal

from . import _native
from .engine import Engine
from .errors import fail

__all__ = ["Decoding", "Footprint", "Measurement", "Roofline", "Runner", "Workload"]

Budget = int | Literal["auto"]
COLD = 4  # times the last cache that a forward must read to be a measurement of the memory
TOLERANCE = 0.10  # of the measured bandwidth: two measurements on one machine differ by as much
READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # of one measurement of the memory


@dataclass(frozen=True)
class Workload:
    """One line of the table. `n`: tokens computed (pp) or generated (tg); `depth`: tokens before them."""

    kind: Literal["pp", "tg"]
    n: int
    depth: int = 0
    drafter: str = "none"
    budget: Budget = 0

    @property
    def name(self) -> str:
        """`tg128 @ d4096`, as llama-bench writes it."""
        return f"{self.kind}{self.n}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def decoding(self) -> str:
        return "plain" if self.drafter == "none" else "ddtree"


@dataclass(frozen=True)
class Footprint:
    """Bytes that a forward reads (cpp/engine/footprint.h)."""

    dense: int
    head: int
    embed_row: int
    expert: int
    position: int
    experts: int
    top_k: int
    moe_layers: int

    @classmethod
    def of(cls, engine: Engine) -> Footprint:
        return cls(**engine.native.footprint)

    def least(self, rows: int, prefix: int, head: bool = True) -> int:
        """Of one forward over `rows` rows that see `prefix` positions. Exact where `exact(rows)`."""
        read = self.dense + (self.head if head else 0) + rows * self.embed_row + prefix * self.position
        return read + self.top_k * self.expert

    def exact(self, rows: int) -> bool:
        return rows == 1 or self.moe_layers == 0


class Roofline:
    """What the device's memory can do, measured on it between the runs; the judge of every figure."""

    def __init__(self, read: Callable[[int, int], float], cache: int, size: int) -> None:
        """`read(bytes, passes)`: bytes per second; `cache`: bytes of the last one, 0 where unknown; `size`: bytes of
        one measurement."""
        self._read, self.cache, self._size = read, cache, size
        self.best = 0.0  # bytes per second, of all measurements

    @classmethod
    def of(cls, engine: Engine) -> Roofline:
        native = engine.native
        cache = native.last_level_cache
        return cls(native.read_rate, cache, max(READ_BYTES[native.device], 2 * COLD * cache))

    def measure(self, passes: int = 2) -> float:
        """Bytes per second now."""
        rate = self._read(self._size, passes)
        self.best = max(self.best, rate)
        return rate

    def beside(self, working_set: float) -> float:
        """The memory's rate for a run that was just timed; not measured again where it judges nothing."""
        return self.best if self.state(working_set) == "in cache" and self.best else self.measure()

    def state(self, working_set: float) -> str:
        """`cold`, `in cache`, or `unknown` where the machine does not say how large its cache is."""
        if self.cache == 0:
            return "unknown"
        return "cold" if working_set > COLD * self.cache else "in cache"

    def check(self, name: str, working_set: float, rate: float, seen: float) -> float:
        """Refuses a rate that cannot be. `working_set`: bytes that one pass reads; `rate`: bytes per second that were
        found; `seen`: the best bandwidth that was measured beside them. Returns `seen`, or more where another look at
        the memory finds more. Raises EngineError."""
        if self.state(working_set) != "cold":
            return seen
        if rate > self.limit(working_set, seen):
            seen = max(seen, self.measure(20))
        if rate > (limit := self.limit(working_set, seen)):
            fail(
                "internal",
                f"{name}: {rate / 1e9:.1f} GB/s is more than this device reads ({seen / 1e9:.1f} GB/s measured, "
                f"{limit / 1e9:.1f} GB/s allowed): the clock or the count of bytes is wrong",
            )
        return seen

    def limit(self, working_set: float, seen: float) -> float:
        """Bytes per second: what the memory gives, and the cache what it may still hold of the pass before."""
        return seen * (1 + TOLERANCE) * (1 + self.cache / working_set)


@dataclass
class Measurement:
    """What came of a test. `seconds`: of each repetition; `forwards` and `rows` (of all forwards together): of one
    repetition; `read`: bytes per second that the memory gave meanwhile, the best."""

    test: Workload
    seconds: list[float]
    forwards: int
    rows: int
    bytes: int  # of one repetition, all forwards
    exact: bool
    read: float
    cache: str
    accepted_lengths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.test.n / s for s in self.seconds]

    @property
    def bandwidth(self) -> float:
        """Bytes per second, at the median repetition."""
        return self.bytes / median(self.seconds)

    def record(self) -> dict[str, Any]:
        """As plain data (docs/cli.md names the fields)."""
        rates, t = self.rates, self.test
        return {
            "test": t.name,
            "kind": t.kind,
            "n": t.n,
            "depth": t.depth,
            "decoding": t.decoding,
            "drafter": t.drafter,
            "budget": t.budget,
            "repetitions": len(rates),
            "seconds": self.seconds,
            "tokens_per_second": {
                "mean": mean(rates),
                "sd": stdev(rates) if len(rates) > 1 else 0.0,
                "median": median(rates),
                "best": max(rates),
            },
            "forwards": self.forwards,
            "rows_per_forward": self.rows / self.forwards,
            "accepted_length": mean(self.accepted_lengths) if self.accepted_lengths else None,
            "accepted_lengths": self.accepted_lengths,
            "bytes_per_forward": self.bytes / self.forwards,
            "bytes_are": "exact" if self.exact else "at least",
            "floor_seconds": self.bytes / self.read if self.cache == "cold" else None,
            "gb_per_second": self.bandwidth / 1e9,
            "read_gb_per_second": self.read / 1e9,
            "percent_of_read": 100 * self.bandwidth / self.read if self.cache == "cold" else None,
            "cache": self.cache,
        }


class Runner:
    """Runs tests on one engine. `source`: tokens that lie before a test, again from the start where it needs more;
    without it they are random, the same ones each time."""

    def __init__(self, engine: Engine, source: Sequence[int] = (), repetitions: int = 5) -> None:
        self.engine = engine
        self.repetitions = repetitions
        self.footprint = Footprint.of(engine)
        self.roofline = Roofline.of(engine)
        self._source = list(source) or _random_tokens(engine)
        self._plain: dict[tuple[int, int], list[int]] = {}  # (depth, n): what plain decoding emits

    def prefix(self, length: int, start: int = 0) -> list[int]:
        """`length` tokens of the source."""
        size = len(self._source)
        return [self._source[i % size] for i in range(start, start + length)]

    def positions(self, tests: Sequence[Workload]) -> int:
        """That the longest test needs. Raises EngineError where the model has fewer, or a drafter is not there."""
        for name in {t.drafter for t in tests} - {"planted"}:
            self.engine.drafter(name)
        longest = max((max(1, t.depth) + t.n + 2 for t in tests), default=0)
        limit = int(self.engine.config["max_position_embeddings"])
        if longest > limit:
            worst = max(tests, key=lambda t: t.depth + t.n)
            fail("invalid_argument", f"{worst.name} needs {longest} positions; {self.engine.path} has {limit}")
        return longest

    def run(self, tests: Sequence[Workload]) -> Iterator[Measurement]:
        """One measurement after another. Raises EngineError."""
        session = self.engine.session(self.positions(tests)).native
        at = -1
        for test in tests:
            if test.depth != at:
                _fill(session, self.prefix(test.depth))
                at = test.depth
            yield self._prompt(session, test) if test.kind == "pp" else self._generate(session, test)

    def _prompt(self, session: _native.Session, test: Workload) -> Measurement:
        tokens = self.prefix(test.n, test.depth)
        seconds: list[float] = []
        each, forwards, read = 0, 0, 0.0
        for i in range(self.repetitions + 1):
            session.rewind(test.depth)
            session.append(tokens)
            session.begin(1)
            began, forwards = time.perf_counter(), 0
            while session.step().finished is None:
                forwards += 1
            spent = time.perf_counter() - began
            forwards += 1
            each = self.footprint.least(-(-test.n // forwards), test.depth, head=False)
            if i > 0:
                seconds.append(spent)
                read = max(read, self.roofline.beside(each))
        session.rewind(test.depth)
        return self._judged(
            Measurement(
                test=test,
                seconds=seconds,
                forwards=forwards,
                rows=test.n,
                bytes=forwards * each + self.footprint.head,
                exact=self.footprint.exact(-(-test.n // forwards)),
                read=read,
                cache=self.roofline.state(each),
            )
        )

    def _generate(self, session: _native.Session, test: Workload) -> Measurement:
        run = self.decoding(session, test)
        seconds: list[float] = []
        read = 0.0
        for i in range(self.repetitions + 1):
            run.reset()
            began = time.perf_counter()
            run.finish()
            spent = time.perf_counter() - began
            if i > 0:
                seconds.append(spent)
                read = max(read, self.roofline.beside(self.footprint.least(1, test.depth)))
        return self._judged(self.measurement(run, seconds, read))

    def decoding(self, session: _native.Session, test: Workload) -> Decoding:
        """A run of `test` on a session that holds what lies before it. Raises EngineError."""
        root = self.prefix(max(1, test.depth))
        return Decoding(session, test, root, self._drafter(test, root))

    def measurement(self, run: Decoding, seconds: list[float], read: float) -> Measurement:
        """Of a run that has just ended; its tokens must be plain decoding's. Raises EngineError."""
        test, tokens = run.test, run.tokens
        key = (test.depth, test.n)
        if test.drafter == "none":
            if len(tokens) > len(self._plain.get(key, ())):  # a run may have been stopped after one round
                self._plain[key] = tokens
        elif key in self._plain and tokens != self._plain[key][: len(tokens)]:
            fail("internal", f"{test.name} with the drafter {test.drafter} emitted other tokens than plain decoding")
        stats = run.session.stats
        rounds, rows = int(stats["rounds"]), int(stats["rounds"] + stats["drafted"])
        whole = rounds * self.footprint.least(1, test.depth) + (rows - rounds) * self.footprint.embed_row
        return Measurement(
            test=test,
            seconds=seconds,
            forwards=rounds,
            rows=rows,
            bytes=whole,
            exact=rows == rounds or self.footprint.moe_layers == 0,
            read=read,
            cache=self.roofline.state(whole / rounds),
            accepted_lengths=[int(n) for n in stats["accepted_lengths"]],
            tokens=tokens,
        )

    def _judged(self, m: Measurement) -> Measurement:
        what = f"{m.test.name} ({m.test.decoding})"
        m.read = self.roofline.check(what, m.bytes / m.forwards, m.bandwidth, m.read)
        return m

    def _drafter(self, test: Workload, root: list[int]) -> _native.Drafter | None:
        if test.drafter != "planted":
            return self.engine.drafter(test.drafter)
        truth = self._plain.get((test.depth, test.n))
        if truth is None:
            fail("invalid_argument", f"{test.name}: planted drafts need the plain run first")
        return _native.PlantedDrafter([*root, *truth], self.engine.vocab_size)


class Decoding:
    """Generation of `test.n` tokens behind `root`, again and again from the same place on one session."""

    def __init__(
        self, session: _native.Session, test: Workload, root: list[int], drafter: _native.Drafter | None
    ) -> None:
        self.session, self.test = session, test
        self._root, self._drafter = root, drafter

    def reset(self) -> None:
        """Up to the first token, which comes with what lies before and is no part of the time."""
        if self.test.depth == 0:
            _fill(self.session, [])
            self.session.append(self._root)
        else:
            self.session.rewind(self.test.depth)
        budget = -1 if self.test.budget == "auto" else self.test.budget
        self.session.begin(self.test.n + 1, drafter=self._drafter, budget=budget)
        while not self.session.step().tokens:
            pass

    def step(self) -> None:
        """One round."""
        self.session.step()

    def finish(self) -> None:
        """All rounds. Raises EngineError where one fails."""
        while (reason := (result := self.session.step()).finished) is None:
            pass
        if reason != "length":
            fail("internal", f"{self.test.name} ended by {reason} {result.error}".rstrip())

    @property
    def tokens(self) -> list[int]:
        """Emitted since `reset`, the first one included."""
        return self.session.tokens[len(self._root) :]


def _fill(session: _native.Session, tokens: list[int]) -> None:
    """A session that holds these tokens, computed."""
    session.rewind(0)
    if not tokens:
        return
    session.append(tokens)
    session.begin(1)
    while session.step().finished is None:
        pass
    session.rewind(len(tokens))


def _random_tokens(engine: Engine, count: int = 4096) -> list[int]:
    """The same ones each time; none that stands for an image."""
    state = 1
    found: list[int] = []
    while len(found) < count:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        token = (state >> 33) % engine.vocab_size
        if token not in engine.config.placeholders:
            found.append(token)
    return found


def parameters(engine: Engine) -> int:
    """Numbers in the tensors that the model's config implies."""
    expected = _native.EngineBuilder(dict(engine.config.fields), "cpu", 1).expected()
    return sum(math.prod(shape) for _, shape, _ in expected)
