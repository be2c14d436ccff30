"""Engine: a model, loaded and ready, with its tokenizer. ::

    engine = Engine.load("path/to/model")
    session = engine.session()
    for event in session.generate("Once upon a time", max_tokens=64):
        print(event.text, end="", flush=True)

An engine is immutable and may have any number of sessions; what changes while text is generated lives in
them. Any thread may use any of them. Computing calls of one engine take turns, one prompt chunk or one round
each, in the order in which they ask; a call that waits lets other Python threads run. So threads share the
engine's speed, and none of them changes what another one gets, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _native
from .checkpoint import ROUNDINGS, Bundle, Progress, Rounding, naming, open_checkpoint
from .config import ModelConfig, check_eos
from .draft_model import DraftModel, DraftOptions
from .errors import EngineError, fail
from .sampling import integer
from .session import Session
from .tokenizer import ByteTokenizer, Tokenizer, generation_eos, load_tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Engine"]


class Engine:
    """A loaded model. Made by :meth:`load`.

    ``path``; ``config`` (the numbers of the model); ``tokenizer``, None where the model has none and its
    vocabulary is too small for bytes; ``eos_token_ids``, the tokens that end a text; ``recorded``, what a
    bundle holds beside its model (a prompt, draft tables); ``draft_width``, how many tokens a position the
    draft model's table has in :meth:`drafter`.
    """

    def __init__(
        self,
        native: _native.Engine,
        path: Path,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        context: int = 0,
        recorded: Mapping[str, npt.NDArray[Any]] | None = None,
        draft_width: int | None = None,
    ) -> None:
        self.native = native
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._context = context
        self._executor: tuple[int, _native.Executor] | None = None
        self._opening = threading.Lock()  # of `_executor`: two sessions must not take the same vacancy
        self.recorded = dict(recorded or {})
        self.draft_width = draft_width or DraftOptions.NUMBERS["width"][0]

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        threads: int = 0,
        context: int | None = None,
        progress: Progress | None = None,
        latent_norm_eps: float | None = None,
        rounding: Rounding = "exact",
        precision: str = "",
        draft_model: str | Path | None = None,
        draft_options: DraftOptions | None = None,
    ) -> Engine:
        """Load a Hugging Face folder or a .kdtr bundle.

        `device`: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``: CUDA where this build and this machine
        have it, else the CPU. `threads` of the CPU, 0 for one per usable core. `context`: how many tokens a
        session may hold unless it asks for another number; None is the smaller of the model's limit and
        8192. `progress` is called with (bytes loaded, bytes in all). `latent_norm_eps`: see
        ``config.DEFAULT_LATENT_NORM_EPS``; None takes that default, or what a bundle says. `rounding` of
        quantised weights: ``"exact"`` keeps the value code x scale (INT4 stays INT4), ``"bf16"`` rounds it to
        bf16 and stores that, as libraries do which dequantise (docs/numerics.md).
        `precision` of matrix operands and latent cache: ``"f32"`` anywhere, ``"bf16"`` on CUDA, ``""`` the
        device's default (bf16 on CUDA). `draft_model`: the folder of a DFlash draft model for
        this target, which then proposes; `draft_options` decides what its config leaves open.

        Raises EngineError; nothing stays behind then.
        """
        integer(threads, "threads", 0, 1024)
        if rounding not in ROUNDINGS:
            fail("invalid_argument", f"rounding is {rounding!r}; expected one of {', '.join(ROUNDINGS)}")
        with ExitStack() as files:
            checkpoint = files.enter_context(open_checkpoint(path, latent_norm_eps))
            config = checkpoint.config
            draft = None
            if draft_model is not None:
                draft = files.enter_context(DraftModel(draft_model, draft_options))
                draft.check_target(int(config["num_hidden_layers"]))
            wanted = integer(context, "context", 2, _positions(config)) if context is not None else 0
            tokenizer, eos = text_side(checkpoint.path, config)
            checkpoint.check_extent()
            with naming(checkpoint.path, "bad_model"):
                builder = _builder(config, device, threads, precision)
            if draft is not None:
                c = draft.config
                with naming(draft.path, "bad_model"):
                    loader = builder.add_draft_model(dict(c.fields), c.target_layers, c.window, c.causal)
                draft.load_into(loader, progress)
            checkpoint.load_into(builder, progress, rounding)
            native = builder.finish()
            recorded = checkpoint.recorded() if isinstance(checkpoint, Bundle) else None
        width = draft_options.width if draft_options is not None else None
        return cls(native, checkpoint.path, config, tokenizer, eos, wanted, recorded, width)

    @property
    def device(self) -> str:
        return self.native.device

    @property
    def description(self) -> str:
        """Device, instruction set and threads, for people and records."""
        return self.native.description

    @property
    def weight_bytes(self) -> int:
        return self.native.weight_bytes

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def session(self, context: int | None = None) -> Session:
        """A new, empty session for up to `context` tokens, prompt and answer together.

        Its memory is taken here, after the sum has been compared with what there is: EngineError
        ``out_of_memory`` has the numbers. None is the engine's own number. When a session is gone, its memory,
        with all that was recorded for a GPU, waits for the next one of the same size, and is given back when
        one of another size is asked for.
        """
        limit = self._context
        if context is not None:
            limit = integer(context, "context", 2, _positions(self.config))
        with self._opening:
            if self._executor is None or self._executor[0] != limit or not self._executor[1].vacant:
                self._executor = None  # before the next one asks what is free
                self._executor = (limit, _native.Executor(self.native, limit))
            return Session(self, _native.Session(self._executor[1]), limit)

    def encode(self, text: str, *, start: bool = True, special: bool = False) -> list[int]:
        """Tokens of `text`: see ``tokenizer.Tokenizer.encode``."""
        return self.text_tokenizer("text").encode(text, start=start, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens left out."""
        return self.text_tokenizer("text").decode(tokens)

    def text_tokenizer(self, purpose: str) -> Tokenizer:
        """The tokenizer; EngineError ``unsupported``, naming what it was for, where there is none."""
        if self.tokenizer is None:
            why = (
                "has neither tokenizer.json nor tiktoken.model"
                if self.path.is_dir()
                else f"has only {self.vocab_size} tokens, no text"
            )
            instead = "; give prompt tokens instead" if purpose in ("text", "a text prompt") else ""
            fail("unsupported", f"{self.path} {why}: {purpose} needs a tokenizer{instead}")
        return self.tokenizer

    def drafter(self, name: str) -> _native.Drafter | None:
        """The drafter called `name`, None for ``"none"``.

        ``"ngram"`` looks the text's last tokens up in the text. ``"dflash"`` asks the draft model that was
        loaded beside the target. ``"auto"`` is both in one tree where there is a draft model, and ``"ngram"``
        where there is none. ``"replay"`` plays the draft tables that a golden bundle recorded. ``"planted"``
        needs a known continuation, which :meth:`Session.generate` finds by decoding plainly first.
        """
        if name == "auto" and self.native.draft_config is not None:
            return _native.CombinedDrafter([_native.DFlashDrafter(self.draft_width), _native.NgramDrafter()])
        if name in ("auto", "ngram"):
            return _native.NgramDrafter()
        if name == "none":
            return None
        if name == "replay":
            return self._replay()
        if name == "dflash":
            if self.native.draft_config is None:
                fail("invalid_argument", "the drafter dflash needs a draft model, and none was loaded")
            return _native.DFlashDrafter(self.draft_width)
        fail("invalid_argument", f"drafter {name!r} is not known; known: {', '.join(DRAFTERS)}")

    def _replay(self) -> _native.Drafter:
        missing = [name for name in _REPLAY if name not in self.recorded]
        if missing:
            fail("unsupported", f"{self.path} has no recorded drafts ({missing[0]}) for the drafter replay")
        position, tokens, logp = (self.recorded[name] for name in _REPLAY)
        return _native.ReplayDrafter(
            np.ascontiguousarray(position, np.int32),
            np.ascontiguousarray(tokens, np.int32),
            np.ascontiguousarray(logp, np.float32),
        )


DRAFTERS = ("auto", "dflash", "ngram", "replay", "planted", "none")
_REPLAY = ("draft.position", "draft.tokens", "draft.logp")


def _positions(config: ModelConfig) -> int:
    return int(config["max_position_embeddings"])


def text_side(path: Path, config: ModelConfig) -> tuple[Tokenizer | None, frozenset[int]]:
    """Tokenizer and end tokens of a folder or bundle. Raises EngineError where its files contradict the model."""
    if path.is_dir():
        tokenizer = load_tokenizer(path, int(config["vocab_size"]))
        ends = tokenizer.end_tokens if tokenizer is not None else frozenset[int]()
        also = generation_eos(path)
        check_eos(also, config["vocab_size"], str(path / "generation_config.json"))
        return tokenizer, config.eos_token_ids | also | ends
    return (ByteTokenizer() if config["vocab_size"] >= 256 else None), frozenset()


def _builder(config: ModelConfig, device: str, threads: int, precision: str) -> _native.EngineBuilder:
    def on(name: str) -> _native.EngineBuilder:
        return _native.EngineBuilder(dict(config.fields), name, threads, precision=precision)

    if device == "auto" and _native.build_info()["cuda"]:
        try:
            return on("cuda")
        except EngineError as error:
            if error.code != "unsupported":  # a machine without a driver or a device has its CPU
                raise
    return on("cpu" if device == "auto" else device)
