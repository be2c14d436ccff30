"""Files of results as typed values: benchmarks, matrices, laws, traces, records, and what a deploy brought back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from harness.report.fields import Fields, ResultError, parse, read_text
from harness.report.origin import Origin, dated
from harness.report.records import Record, read_record
from harness.report.rounds import Round, TraceError, read_trace

SUFFIXES = (".json", ".jsonl")
CUDA_PHASE, MODEL_PHASE = "cuda kernels", "models"


@dataclass(frozen=True)
class Figure:
    """One benchmark of one run. Seconds of the median and the best round; `noise`: of the median, relative, None where
    the file does not say; rates in 10^9 a second, None where they were not measured."""

    phase: str
    name: str
    seconds: float
    best: float
    rounds: int | None = None
    noise: float | None = None
    bytes: float | None = None
    exact: bool = True
    flops: float | None = None
    gb_per_second: float | None = None
    percent_of_read: float | None = None
    floor_percent: float | None = None
    floor_by: str = ""
    cache: str = ""
    read: float | None = None
    sgemm: float | None = None
    accepted: float | None = None
    tokens_per_second: float | None = None
    spread: float | None = None  # of tokens_per_second: standard deviation
    drafter: str = ""
    budget: str = ""
    note: str = ""

    @property
    def gflops(self) -> float | None:
        return None if self.flops is None else self.flops / self.seconds / 1e9


@dataclass(frozen=True)
class Run:
    """Benchmarks that ran together. `read`, `sgemm`: the best that the machine gave, 10^9 a second."""

    origin: Origin
    figures: list[Figure]
    device: str = ""

    def best(self, of: Callable[[Figure], float | None]) -> float | None:
        return max((v for f in self.figures if (v := of(f)) is not None), default=None)


@dataclass(frozen=True)
class Leg:
    bundle: str
    backend: str
    precision: str
    decoder: str
    status: str
    text: str


@dataclass(frozen=True)
class Matrix:
    origin: Origin
    legs: list[Leg]

    def count(self, status: str) -> int:
        return sum(leg.status == status for leg in self.legs)


@dataclass(frozen=True)
class Law:
    """One model: what was compared, in how many budgets, and how many of those differ. latents: they were compared
    too, in every budget."""

    name: str
    device: str
    prompt: int
    tokens: int
    budgets: int
    different: int
    longest: int | None  # accepted path; None where the record does not say
    latents: bool


@dataclass(frozen=True)
class Laws:
    origin: Origin
    models: list[Law]


@dataclass(frozen=True)
class Trace:
    origin: Origin
    rounds: list[Round]


@dataclass(frozen=True)
class Deploy:
    """deploy.json: `steps` with seconds and exit code."""

    origin: Origin
    digest: str
    code: int
    steps: list[tuple[str, float, int]]


Result = Run | Matrix | Laws | Trace | Deploy | Record


@dataclass
class Results:
    """Everything that was read, in the order of the files' dates."""

    runs: list[Run] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)
    laws: list[Laws] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    deploys: list[Deploy] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)  # a sentence each

    @property
    def all(self) -> list[Result]:
        return [*self.matrices, *self.laws, *self.runs, *self.traces, *self.deploys, *self.records]

    def sort(self) -> None:
        """Oldest first."""

        def age(result: Result) -> tuple[str, str]:
            return result.origin.date, str(result.origin.file)

        for results in (self.runs, self.matrices, self.laws, self.traces, self.deploys, self.records):
            results.sort(key=age)


def read_all(paths: Sequence[Path]) -> Results:
    """Files, and every result in folders. A file that was named must be a result; in a folder JSON of another kind is
    passed over with a sentence, a damaged file is not. Raises ResultError and OSError."""
    found = Results()
    for path in paths:
        if not path.exists():
            raise ResultError(f"{path} does not exist; expected a file of results or a folder")
        inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
        for file in inside:
            result = read(file)
            if result is None:
                said = f"{file}: no result of a kind that is known here; {_holds(file)}"
                if not path.is_dir():
                    raise ResultError(said)
                found.passed_over.append(said)
                continue
            match result:
                case Run():
                    found.runs.append(result)
                case Matrix():
                    found.matrices.append(result)
                case Laws():
                    found.laws.append(result)
                case Trace():
                    found.traces.append(result)
                case Deploy():
                    found.deploys.append(result)
                case Record():
                    found.records.append(result)
    found.sort()
    return found


def _holds(file: Path) -> str:
    """`it holds a, b, c`: what a file has instead."""
    text = read_text(file)
    value = parse(text.split("\n", 1)[0] if file.suffix == ".jsonl" else text, file)
    names = [name if len(name) <= 40 else name[:40] + "…" for name in value] if isinstance(value, dict) else []
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"it holds {shown}" if names else "it holds nothing"


def read(file: Path) -> Result | None:
    """One file; None where it is JSON of another kind. Raises ResultError and OSError."""
    text = read_text(file)
    if file.suffix == ".jsonl":
        first = Fields(parse(text.split("\n", 1)[0], file, "line 1"), file, "line 1")
        if "round" in first:
            try:
                return Trace(Origin(file, "trace"), read_trace(file))
            except TraceError as error:
                raise ResultError(str(error)) from None
        if "schema" in first:
            lines = [parse(line, file, f"line {i}") for i, line in enumerate(text.splitlines(), 1)]
            return kdtree_bench(Fields({**first.value, "results": lines}, file))
        return None
    value = parse(text, file)
    if not isinstance(value, dict):
        raise ResultError(f"{file}: the whole is {'a list' if isinstance(value, list) else 'no object'}")
    top = Fields(value, file)
    if "benchmarks" in value and "machine_info" in value:
        return pytest_benchmark(top)
    if "schema" in value and "results" in value:
        return kdtree_bench(top)
    if "results" in value and "replays" in value:
        return cuda_bench(top)
    if "legs" in value:
        return matrix(top)
    if "shape" in value and "budgets" in value:
        return Laws(Origin(file, "laws", *dated(top)), [law(top, top.text("shape"))])
    if "runs" in value and "tokens_compared" in value:
        runs = top.item("runs")
        models = [law(runs.item(name), name) for name in runs.value]
        return Laws(Origin(file, "laws", *dated(top), machine=top.maybe_text("gpu") or ""), models)
    if "digest" in value and "steps" in value:
        return deploy(top)
    return read_record(top)


# -- benchmarks ----------------------------------------------------------------------------------------------------


def pytest_benchmark(top: Fields) -> Run:
    """A file of `pytest bench --benchmark-json`."""
    machine = top.item("machine_info")
    cpu = machine.maybe_item("cpu")
    brand = (cpu.maybe_text("brand_raw") if cpu else None) or machine.maybe_text("machine") or "unknown"
    commit_info = top.maybe_item("commit_info")
    date, commit = dated(top)
    if commit_info is not None and "id" in commit_info:
        commit = commit_info.text("id")[:9] + ("-dirty" if commit_info.value.get("dirty") is True else "")
    date = (top.maybe_text("datetime") or date)[:10]
    figures, device = [], ""
    for b in top.items("benchmarks"):
        figure, path = _benchmark(b)
        figures.append(figure)
        device = device or path
    origin = Origin(top.file, "pytest-benchmark", date, commit, f"{brand}, {device}" if device else brand)
    return Run(origin, figures, device)


def _benchmark(b: Fields) -> tuple[Figure, str]:
    stats, info = b.item("stats"), b.item("extra_info")
    name = b.text("name").removeprefix("test_")
    middle, best = stats.number("median", 0.0), stats.number("min", 0.0)
    if middle == 0.0:
        raise ResultError(f"{b.file}: {stats.where}.median is 0; a time was expected")
    rounds = int(stats.number("rounds", 1))
    phase = next((part for part in b.text("fullname").split("::")[0].split("/") if part.startswith("phase")), "other")
    gb, old = info.maybe_item("gb_per_second"), info.maybe_item("GB/s")
    read = info.maybe_item("machine_read_gb_per_second") or info.maybe_item("machine's read")
    sgemm = info.maybe_item("machine_gflops") or info.maybe_item("machine's sgemm")
    share, floor = info.maybe_item("percent_of_read"), info.maybe_item("floor")
    rate = gb or old
    flops = info.maybe_number("flops")
    if flops is None and (ops := info.maybe_item("GFLOP/s")) is not None:
        flops = ops.number("median") * middle * 1e9
    figure = Figure(
        phase=phase,
        name=name,
        seconds=middle,
        best=best,
        rounds=rounds,
        noise=1.57 * stats.number("iqr", 0.0) / math.sqrt(rounds) / middle,  # notch of a box plot
        bytes=info.maybe_number("bytes") if gb else rate.number("median") * middle * 1e9 if rate else None,
        exact=info.value.get("bytes_are", "exact") == "exact",
        flops=flops,
        gb_per_second=rate.number("median") if rate else None,
        percent_of_read=share.number("median") if share else None,
        floor_percent=floor.number("percent") if floor else None,
        floor_by=floor.text("by") if floor else "",
        cache=info.maybe_text("cache") or "",
        read=read.number("median") if read else None,
        sgemm=sgemm.number("median") if sgemm else None,
        accepted=info.maybe_number("accepted_length"),
        tokens_per_second=info.maybe_number("tokens_per_second"),
        drafter=info.maybe_text("drafter") or "",
        budget=str(info.value.get("budget", "")),
    )
    return figure, info.maybe_text("path") or ""


def kdtree_bench(top: Fields) -> Run:
    """A file of `kdtree bench --format json` or jsonl."""
    if (schema := top.text("schema")) != "kdtree-bench/1":
        top.wrong("schema", f"kdtree-bench/1, not {schema}" if len(schema) < 40 else "kdtree-bench/1")
    model, device = top.text("model"), top.text("device")
    figures = []
    for r in top.items("results"):
        seconds = r.numbers("seconds")
        if not seconds or min(seconds) <= 0:
            r.wrong("seconds", "a list of times above 0")
        rate = r.item("tokens_per_second")
        plain = r.text("decoding") == "plain"
        who = "" if plain else f" {r.text('drafter')} {r.value.get('budget')}"
        per_forward, forwards = r.number("bytes_per_forward", 0.0), r.number("forwards", 1.0)
        figures.append(
            Figure(
                phase=MODEL_PHASE,
                name=f"{model} {r.text('test')}{who}",
                seconds=median(seconds),
                best=min(seconds),
                rounds=len(seconds),
                noise=_noise(seconds),
                bytes=per_forward * forwards,
                exact=r.text("bytes_are") == "exact",
                gb_per_second=r.number("gb_per_second", 0.0),
                percent_of_read=r.maybe_number("percent_of_read"),
                cache=r.text("cache"),
                read=r.number("read_gb_per_second", 0.0),
                accepted=r.maybe_number("accepted_length"),
                tokens_per_second=rate.number("mean", 0.0),
                spread=rate.number("sd", 0.0),
                drafter="" if plain else r.text("drafter"),
                budget="" if plain else str(r.value.get("budget")),
            )
        )
    date, commit = dated(top)
    machine = f"{top.maybe_text('cpu') or ''}, {device}".strip(", ")
    return Run(Origin(top.file, "kdtree bench", date, commit, machine), figures, device)


def _noise(seconds: list[float]) -> float:
    """Of the median of these, relative: the notch of a box plot, half the range where there are few."""
    if len(seconds) < 2:
        return 0.0
    if len(seconds) < 4:
        return (max(seconds) - min(seconds)) / 2 / median(seconds)
    low, _, high = quantiles(seconds, n=4)
    return 1.57 * (high - low) / math.sqrt(len(seconds)) / median(seconds)


def cuda_bench(top: Fields) -> Run:
    """A file of kdtree-bench-cuda: device times inside graphs, cold L2. Its floor is the bytes at a read rate of the
    same kind of GPU."""
    device = top.text("device")
    read_rate = top.maybe_number("read_gb_per_second")
    figures = []
    for r in top.items("results"):
        us = r.number("us", 0.0)
        if us == 0.0:
            r.wrong("us", "a time above 0")
        floor = r.maybe_number("floor_us") or 0.0
        size = r.maybe_number("bytes") or None
        figures.append(
            Figure(
                phase=CUDA_PHASE,
                name=f"{r.text('name').strip()}, rows {r.number('rows'):.0f}",
                seconds=us / 1e6,
                best=(r.maybe_number("best_us") or us) / 1e6,
                bytes=size,
                gb_per_second=None if size is None else size / us / 1e3,
                flops=r.maybe_number("flops") or None,
                floor_percent=100 * floor / us if floor else None,
                floor_by="memory" if floor else "",
                cache=r.maybe_text("cache") or "cold",
                read=read_rate,
                note=r.maybe_text("note") or "",
            )
        )
    return Run(Origin(top.file, "kdtree-bench-cuda", *dated(top), machine=device), figures, device)


# -- checks --------------------------------------------------------------------------------------------------------


def matrix(top: Fields) -> Matrix:
    """A file of harness.matrix."""
    legs = []
    devices: dict[str, None] = {}
    for leg in top.items("legs"):
        status = leg.text("status")
        if status not in ("PASS", "FAIL", "NOT RUN"):
            leg.wrong("status", "PASS, FAIL or NOT RUN")
        reasons = leg.value.get("reasons") or []
        worst = leg.maybe_number("max_abs_logit_diff")
        forwards = leg.maybe_number("target_forwards")
        parts = [str(reason) for reason in reasons] if isinstance(reasons, list) else []
        if status != "NOT RUN":
            parts.append(f"{leg.number('tokens_equal'):.0f} of {leg.number('tokens_expected'):.0f} tokens")
            parts += [f"{forwards:.0f} forwards"] if forwards is not None else []
            parts += [f"logits within {worst:.1e}"] if worst is not None else []
        if (device := leg.maybe_text("device")) is not None:
            devices[device] = None
        bundle, backend, precision, decoder = (leg.text(n) for n in ("bundle", "backend", "precision", "decoder"))
        legs.append(Leg(bundle, backend, precision, decoder, status, ", ".join(parts)))
    machine = top.maybe_text("gpu") or "; ".join(devices)
    return Matrix(Origin(top.file, "matrix", *dated(top), machine=machine), legs)


def law(run: Fields, name: str) -> Law:
    """One model of kdtree-laws."""
    budgets = list(run.items("budgets"))
    same = ("tokens_equal", "logits_equal", "latents_equal")
    lengths = [longest for b in budgets if (longest := b.maybe_number("longest")) is not None]
    return Law(
        name=name,
        device=run.text("device"),
        prompt=int(run.number("prompt", 0)),
        tokens=int(run.number("tokens", 0)),
        budgets=len(budgets),
        different=sum(any(b.value.get(key) is False for key in same) for b in budgets),
        longest=int(max(lengths)) if lengths else None,
        latents=bool(budgets) and all(b.value.get("latents_equal") is not None for b in budgets),
    )


def deploy(top: Fields) -> Deploy:
    """deploy.json of harness.deploy."""
    steps = [(s.text("name"), s.number("seconds", 0.0), int(s.number("code"))) for s in top.items("steps")]
    origin = Origin(top.file, "deploy", *dated(top), machine=top.text("host"))
    return Deploy(origin, top.text("digest"), int(top.number("code")), steps)
