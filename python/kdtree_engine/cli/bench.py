"""`kdtree bench`: tokens per second in llama-bench's columns, and what the memory has to do with them."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from kdtree_engine.checkout import commit
from kdtree_engine.cli import console, exits, run
from kdtree_engine.cli import options as o
from kdtree_engine.cli.machine import nvidia_smi

if TYPE_CHECKING:
    from kdtree_engine.benchmark import Workload
    from kdtree_engine.checkpoint import Rounding
    from kdtree_engine.engine import Engine

SCHEMA = "kdtree-bench/1"
FORMATS = ("md", "csv", "json", "jsonl")
MAX_TOKENS = 1 << 22


@dataclass(frozen=True)
class Options:
    """Checked; built by `from_arguments` only."""

    model: str
    n_prompt: tuple[int, ...]
    n_gen: tuple[int, ...]
    n_depth: tuple[int, ...] | None
    repetitions: int
    prompt_file: str | None
    drafter: str
    draft_model: str | None
    draft_options: dict[str, str]
    budgets: tuple[int | Literal["auto"], ...]
    device: str
    precision: str
    rounding: str
    latent_norm_eps: float | None
    threads: int
    format: str

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> Options:
        """Checks the values as typer delivers them. Raises UsageProblem."""
        a = dict(arguments)
        o.default_model(a)
        a["n_prompt"] = tuple(n for n in _numbers("--n-prompt", a["n_prompt"]) if n)
        a["n_gen"] = tuple(n for n in _numbers("--n-gen", a["n_gen"]) if n)
        if not a["n_prompt"] and not a["n_gen"]:
            raise exits.UsageProblem("--n-prompt and --n-gen are both 0: there is nothing to measure")
        a["n_depth"] = None if a["n_depth"] is None else tuple(_numbers("--n-depth", a["n_depth"]))
        o.within("--repetitions", a["repetitions"], 1, 10_000)
        o.within("--threads", a["threads"], 0, 1024)
        o.check_drafter(a["drafter"], a["draft_model"])
        a["draft_options"] = o.draft_options(a.pop("draft_option"), a["draft_model"])
        o.check_device(a["device"])
        o.check_precision(a["precision"])
        o.check_weights(a["rounding"], a["latent_norm_eps"])
        a["budgets"] = tuple(dict.fromkeys(o.check_budget(text.strip()) for text in a.pop("budget").split(",")))
        if a["format"] not in FORMATS:
            raise exits.UsageProblem(f"--format is {a['format']!r}; it must be one of {', '.join(FORMATS)}")
        return cls(**a)


def _numbers(option: str, text: str) -> list[int]:
    numbers: list[int] = []
    for piece in text.split(","):
        if not re.fullmatch(r"[0-9]{1,9}", piece.strip()) or int(piece) > MAX_TOKENS:
            raise exits.UsageProblem(f"{option} is {text!r}; write numbers from 0 to {MAX_TOKENS}, such as 512,2048")
        numbers.append(int(piece))
    return list(dict.fromkeys(numbers))


def execute(options: Options) -> int:
    """Runs the command: one row after another, each as soon as it is measured."""
    text = None if options.prompt_file is None else o.read_text("--prompt-file", options.prompt_file)
    from kdtree_engine.benchmark import Runner

    engine = load(options)
    source = run.own_prompt(engine) or []
    if text is not None and not (source := engine.encode(text)):
        raise exits.Failure(f"--prompt-file {options.prompt_file} makes no token")
    tests = workloads(options, engine, len(source), own_prompt=text is None)
    runner = Runner(engine, source, options.repetitions)
    runner.positions(tests)
    runner.roofline.measure()
    about = description(options, engine)
    about["prompt"] = "random tokens" if not source else options.prompt_file or "the bundle's own"
    writers: dict[str, type[Writer]] = {"md": Markdown, "csv": Csv, "json": Json, "jsonl": Lines}
    write = writers[options.format](about, tests)
    for measurement in runner.run(tests):
        record = measurement.record()
        record["clocks"] = clocks(engine.native.device, engine.description)
        record["load_average"] = round(os.getloadavg()[0], 2)
        about["read_gb_per_second"] = round(runner.roofline.best / 1e9, 3)
        write.row(record)
    write.end()
    return exits.OK


def load(options: Options) -> Engine:
    """Raises EngineError."""
    from kdtree_engine.draft_config import DraftOptions
    from kdtree_engine.engine import Engine

    with console.byte_progress(f"loading {options.model}") as progress:
        return Engine.load(
            options.model,
            device=options.device,
            threads=options.threads,
            progress=progress,
            precision="" if options.precision == "auto" else options.precision,
            draft_model=options.draft_model,
            draft_options=DraftOptions.parse(options.draft_options),
            rounding=cast("Rounding", options.rounding),
            latent_norm_eps=options.latent_norm_eps,
        )


def workloads(options: Options, engine: Engine, source: int, own_prompt: bool) -> list[Workload]:
    """The tests in order: by depth, prompts first, plain decoding before the trees that must equal it."""
    from kdtree_engine.benchmark import Workload

    drafter = options.drafter
    if drafter == "auto" and options.draft_model is None:
        recorded = own_prompt and run.OWN_DRAFTS in engine.recorded and options.n_depth in (None, (source,))
        drafter = "replay" if recorded else "ngram"
    tests: list[Workload] = []
    for depth in options.n_depth if options.n_depth is not None else (source,):
        tests += [Workload("pp", n, depth) for n in options.n_prompt]
        for n in options.n_gen:
            tests.append(Workload("tg", n, depth))
            if drafter != "none":
                tests += [Workload("tg", n, depth, drafter, budget) for budget in options.budgets]
    return tests


def description(options: Options, engine: Engine) -> dict[str, Any]:
    """What all rows share."""
    from kdtree_engine import _native
    from kdtree_engine.benchmark import parameters
    from kdtree_engine.cli.doctor import cpu_report
    from kdtree_engine.cli.version import package_version

    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": package_version(),
        "commit": commit(),
        "compiler": _native.build_info()["compiler"],
        "platform": platform.platform(),
        "cpu": cpu_report()["model"],
        "model": console.visible(Path(options.model).resolve().name, keep_lines=False),
        "model_bytes": engine.weight_bytes,
        "parameters": parameters(engine),
        "backend": engine.native.device,
        "device": engine.description,
        "threads": options.threads or len(os.sched_getaffinity(0)),
        "draft_model": None if options.draft_model is None else Path(options.draft_model).resolve().name,
        "last_level_cache": engine.native.last_level_cache,
        "footprint": engine.native.footprint,
    }


def clocks(device: str, about: str) -> dict[str, float] | None:
    """Megahertz right after a test, where the machine shows them."""
    if device == "cuda":
        number = re.search(r"GPU (\d+)", about)
        argv = ["--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", "-i", number[1] if number else "0"]
        found = re.fullmatch(r"\s*(\d+),\s*(\d+)\s*", nvidia_smi(argv) or "")
        return {"sm_mhz": float(found[1]), "memory_mhz": float(found[2])} if found else None
    now = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        try:
            now.append(int(path.read_text()) / 1000)
        except (OSError, ValueError):
            continue
    return {"cpu_mhz": round(max(now), 1)} if now else None


# -- output --------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def _count(n: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)


def decoding(drafter: str, budget: int | str) -> str:
    """`plain`, or who drafts and how many nodes."""
    return "plain" if drafter == "none" else f"{drafter}, {budget}"


def _share(row: Row) -> str:
    if row["percent_of_read"] is None:
        return {"in cache": "in cache", "unknown": "?"}[row["cache"]]
    return f"{'' if row['bytes_are'] == 'exact' else '≥ '}{row['percent_of_read']:.0f} %"


class Writer(Protocol):
    """Takes rows as they are measured."""

    def __init__(self, about: Row, tests: Sequence[Workload]) -> None: ...

    def row(self, record: Row) -> None: ...

    def end(self) -> None: ...


class Markdown:
    """A table whose rows appear as they are measured."""

    columns: tuple[tuple[str, Callable[[Row, Row], str]], ...] = (
        ("model", lambda a, r: a["model"].replace("|", "\\|")),
        ("size", lambda a, r: console.byte_text(a["model_bytes"])),
        ("params", lambda a, r: _count(a["parameters"])),
        ("backend", lambda a, r: a["backend"]),
        ("threads", lambda a, r: str(a["threads"])),
        ("decoding", lambda a, r: decoding(r["drafter"], r["budget"])),
        ("test", lambda a, r: r["test"]),
        ("t/s", lambda a, r: f"{r['tokens_per_second']['mean']:.2f} ± {r['tokens_per_second']['sd']:.2f}"),
        ("accepted", lambda a, r: "" if r["accepted_length"] is None else f"{r['accepted_length']:.2f}"),
        ("GB/s", lambda a, r: f"{'' if r['bytes_are'] == 'exact' else '≥ '}{r['gb_per_second']:.1f}"),
        ("% of read", lambda a, r: _share(r)),
    )

    def __init__(self, about: Row, tests: Sequence[Workload]) -> None:
        self.about = about
        shortest = {"t/s": 20, "GB/s": 8}
        self._widths = [max(len(name), shortest.get(name, 0)) for name, _ in self.columns]
        for test in tests:  # all that is known before anything was measured
            known = {"drafter": test.drafter, "budget": test.budget, "test": test.name}
            for i, (_, cell) in enumerate(self.columns[:7]):
                self._widths[i] = max(self._widths[i], len(cell(about, known)))
        self._line([name for name, _ in self.columns])
        self._line(["-" * (w - 1) + (":" if i > 6 else "-") for i, w in enumerate(self._widths)])

    def _line(self, cells: list[str]) -> None:
        padded = (
            cell.rjust(width) if i > 6 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        )
        print("| " + " | ".join(padded) + " |", flush=True)

    def row(self, record: Row) -> None:
        self._line([cell(self.about, record) for _, cell in self.columns])

    def end(self) -> None:
        a = self.about
        rate = f"memory reads {a['read_gb_per_second']:.1f} GB/s, measured between the runs"
        print(f"\n{a['device']}; {a['cpu']}; {rate}")
        cache = console.byte_text(a["last_level_cache"]) if a["last_level_cache"] else "of unknown size"
        prompt = console.visible(a["prompt"], keep_lines=False)
        print(f"last cache {cache}; before the tests: {prompt}; {a['date']}", end="")
        print(f", commit {a['commit']}" if a["commit"] else "", flush=True)


class Json:
    """One object: what all rows share, and `results`."""

    def __init__(self, about: Row, tests: Sequence[Workload]) -> None:
        self.about = about
        self.rows: list[Row] = []

    def row(self, record: Row) -> None:
        self.rows.append(record)

    def end(self) -> None:
        print(json.dumps({**self.about, "results": self.rows}, indent=1, ensure_ascii=False), flush=True)


class Lines:
    """One object a line; each holds everything."""

    def __init__(self, about: Row, tests: Sequence[Workload]) -> None:
        self.about = about

    def row(self, record: Row) -> None:
        print(json.dumps({**self.about, **record}, ensure_ascii=False), flush=True)

    def end(self) -> None:
        pass


class Csv:
    """One line a test; lists are left to JSON."""

    def __init__(self, about: Row, tests: Sequence[Workload]) -> None:
        self.about = about
        self._head = False

    def row(self, record: Row) -> None:
        flat = dict(_flat({**self.about, **record}))
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if not self._head:
            writer.writerow(flat)
            self._head = True
        writer.writerow(["" if v is None else v for v in flat.values()])
        print(out.getvalue(), end="", flush=True)

    def end(self) -> None:
        pass


def _flat(row: Row) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if key == "clocks":  # the same columns whether there are any or not
            value = value or {}
            yield from ((name, value.get(name)) for name in ("cpu_mhz", "sm_mhz", "memory_mhz"))
        elif isinstance(value, dict):
            yield from ((f"{key}_{name}", inner) for name, inner in value.items())
        elif not isinstance(value, list):
            yield key, value
