"""From one checkpoint to another: quantise the routed experts, give them floating point again, change the container. ::

    report = convert("K2-bf16", "K2-int4", to="int4", scales="mse")

A folder in, a folder or a .kdtr bundle out, or a bundle in. Routed experts become INT4 in the layout of the released
Kimi checkpoints (``weight_packed``, ``weight_scale``, ``weight_shape``); everything else of a folder stays what it
is, other files included. Memory is bounded by the pieces in work (about 100 MB a thread), disk space is taken before
it is needed, and a target is there whole or not at all; what a stopped run has finished, the next one keeps
(convert_sink.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import convert_config
from .config import load_json
from .convert_plan import RESTS, TARGETS, Job, Rest, Tally, Target, Unit, in_shards, plan, units
from .convert_sink import STATE, BundleSink, FolderSink, Sink
from .convert_source import Source, open_source
from .errors import fail
from .quantize import SCALE_RULES, ScaleRule
from .sampling import integer

__all__ = ["DEFAULT_SHARD", "ConversionReport", "convert"]

DEFAULT_SHARD = 4 << 30
"""Bytes of a shard: what a stopped run loses at most, and a size that file systems and downloads like."""

_ALGORITHM = 1  # goes up when the same command would write other bits
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".kdtr", ".tmp")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", STATE)
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ConversionReport:
    """``tensors`` and ``bytes`` of the target in ``shards``, of which ``resumed`` were there already;
    ``quantised``: matrices; ``relative_error``: root of the mean squared error over that of the weights, of all
    quantised weights, None where nothing was quantised."""

    target: Path
    tensors: int
    bytes: int
    shards: int
    resumed: int
    quantised: int
    relative_error: float | None
    seconds: float


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Target = "int4",
    scales: ScaleRule = "mse",
    rest: Rest = "same",
    shard_bytes: int = DEFAULT_SHARD,
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Convert `source`, a Hugging Face folder or a .kdtr bundle, to `target`: a bundle if its name ends in
    .kdtr, else a folder.

    `to`: ``int4`` quantises the routed experts (`scales`: see quantize.py) and leaves everything else as it is
    stored, or, by `rest`, in bf16 or f32 (fp8 becomes bf16); ``bf16`` and ``f32`` give everything floating point
    (code * scale, rounded once to bf16; a router's bias keeps its precision); ``same`` changes the container
    alone. Experts that are stored fused come out one by one. `threads`: 0 is one per usable core. `progress` is
    called with (bytes read, in all).

    Raises EngineError: what loading the source raises; ``invalid_argument`` for a target that is something else;
    ``unsupported`` for what the target cannot hold; ``not_finite`` for weights that are no numbers; ``io`` for
    what the system refuses, a full disk for one. A target is then not there; its finished part is, unless there
    is none.
    """
    for name, value, known in (("to", to, TARGETS), ("scales", scales, SCALE_RULES), ("rest", rest, RESTS)):
        if value not in known:
            fail("invalid_argument", f"{name} is {value!r}; expected one of {', '.join(known)}")
    if rest != "same" and to != "int4":
        fail("invalid_argument", f"rest is {rest!r}, which goes with int4; {to} is about every tensor")
    integer(shard_bytes, "shard_bytes", 1, 1 << 62)
    workers = integer(threads, "threads", 0, 1024) or len(os.sched_getaffinity(0))
    started = time.monotonic()
    target = Path(target)
    with open_source(Path(source)) as opened:
        shards = in_shards(plan(opened, to, rest, target.suffix == ".kdtr"), shard_bytes)
        mark = _fingerprint(opened, shards, (to, scales, rest, shard_bytes))
        try:
            with _sink(opened, target, shards, mark, to) as sink:
                resumed = len(shards) if sink.complete else len(sink.finished)
                if not sink.complete:
                    _run(sink, shards, scales, workers, progress)
                    sink.commit()
                tally = sum(sink.finished.values(), Tally())
        except OSError as error:
            what = error.strerror or str(error)
            fail("io", f"writing {error.filename or target} failed: {what} (errno {error.errno})", error)
    return ConversionReport(
        target=target,
        tensors=sum(len(job.outputs) for jobs in shards for job in jobs),
        bytes=sum(job.nbytes for jobs in shards for job in jobs),
        shards=len(shards),
        resumed=resumed,
        quantised=int(tally.matrices),
        relative_error=(tally.error / tally.power) ** 0.5 if tally.power else None,
        seconds=time.monotonic() - started,
    )


def _sink(source: Source, target: Path, shards: list[list[Job]], mark: str, to: Target) -> Sink:
    if target.suffix == ".kdtr":
        return BundleSink(target, shards, mark, source.config.fields)
    if target.exists() and source.path.exists() and target.samefile(source.path):
        fail("invalid_argument", f"{target} is the source itself; choose another name")
    jobs = [job for shard in shards for job in shard]
    if not source.path.is_dir():
        return FolderSink(target, shards, mark, convert_config.from_fields(source.config, source.path, jobs), [])
    config = convert_config.rewritten(load_json(source.path / "config.json"), to, jobs)
    companions = [
        path
        for path in sorted(source.path.iterdir())
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in _NOT_COPIED and path.name[0] != "."
    ]
    return FolderSink(target, shards, mark, config, companions)


def _fingerprint(source: Source, shards: list[list[Job]], options: tuple[object, ...]) -> str:
    """What two runs must agree on for one to go on with the other: the source's files as they are now, and what
    is made of them."""
    files = [(path.name, (s := path.stat()).st_size, s.st_mtime_ns) for path in source.files]
    config = source.path / "config.json"
    outputs = [[list(tensor) for job in jobs for tensor in job.outputs] for jobs in shards]
    known = [_ALGORITHM, options, files, config.read_text() if config.exists() else "", outputs]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _run(
    sink: Sink,
    shards: list[list[Job]],
    scales: ScaleRule,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(job.read_bytes for jobs in shards for job in jobs)
    done = 0
    for k, jobs in enumerate(shards):
        if k not in sink.finished:
            sink.begin(k)
            crew = _Crew(units(jobs), sink, scales, workers)
            try:
                while not crew.wait(_POLL_SECONDS):
                    if progress is not None:
                        progress(done + crew.read, total)
            finally:
                crew.stop()
            sink.finish(k, crew.tally)
        done += sum(job.read_bytes for job in jobs)
        if progress is not None:
            progress(done, total)


class _Crew:
    """Threads that do units until there are no more, one fails, or they are told to stop. The waiting thread is
    free for signals and the progress bar."""

    def __init__(self, work: Iterator[Unit], sink: Sink, scales: ScaleRule, workers: int) -> None:
        self.read = 0
        self.tally = Tally()
        self._work = work
        self._sink = sink
        self._scales = scales
        self._mutex = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether all is done, after `seconds` at most. Raises what a unit raised."""
        self._threads[0].join(seconds)
        if self._threads[0].is_alive():
            return False
        self.stop()  # there are no more units: only those in work are left
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Let the units in work end, and no other begin."""
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while True:
            with self._mutex:
                unit = None if self._stopped else next(self._work, None)
            if unit is None:
                return
            try:
                tally = unit.run(self._sink.write, self._scales)
            except BaseException as error:
                with self._mutex:
                    self._error = self._error or error
                    self._stopped = True
                return
            with self._mutex:
                self.tally += tally
                self.read += unit.read_bytes
