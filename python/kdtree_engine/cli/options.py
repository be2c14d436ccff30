"""The options that `generate` and `verify` share, and what is checked before a model is opened."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kdtree_engine.cli.exits import Failure, UsageProblem

MAX_BUDGET = 64  # nodes of one tree: kMaxNodes of the native engine
DRAFTERS = ("auto", "dflash", "ngram", "replay", "planted", "none")

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Hugging Face folder, or a .kdtr bundle.", show_default=False),
]
Prompt = Annotated[str | None, typer.Option(help="Text to continue.", show_default=False)]
PromptFile = Annotated[
    str | None,
    typer.Option(metavar="F|-", help="Read the text from a file, or from stdin (-).", show_default=False),
]
PromptTokens = Annotated[
    str | None, typer.Option(metavar="1,2,3", help="Token ids instead of text.", show_default=False)
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(metavar="T", help="0: greedy.")]
TopK = Annotated[int, typer.Option(metavar="K", help="Keep the K likeliest tokens; 0: all.")]
TopP = Annotated[
    float, typer.Option(metavar="P", help="Keep the likeliest tokens of total probability P; 1: all.")
]
MinP = Annotated[
    float, typer.Option(metavar="P", help="Keep tokens of at least P times the likeliest's probability.")
]
Seed = Annotated[int, typer.Option(metavar="S", help="Of the sampling noise.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.", show_default=False),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end-of-text tokens.")]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="With --json: log-probabilities of the N likeliest tokens.", show_default=False
    ),
]
Drafter = Annotated[str, typer.Option(metavar="|".join(DRAFTERS), help="Who proposes the draft trees.")]
DraftModel = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of a DFlash draft model for MODEL.", show_default=False),
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="How to read what its config leaves open; may be repeated.",
        show_default=False,
    ),
]
Budget = Annotated[str, typer.Option(metavar="auto|N", help=f"Draft nodes per round, 0 to {MAX_BUDGET}.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where the model runs.")]
Precision = Annotated[
    str,
    typer.Option(metavar="auto|f32|bf16", help="Of matrix operands and cache; auto: bf16 on CUDA, f32 on CPU."),
]
Rounding = Annotated[
    str, typer.Option(metavar="exact|bf16", help="Of INT4 and fp8 weights; bf16 takes 16 bits a weight.")
]
LatentNormEps = Annotated[
    float | None, typer.Option(metavar="E", help="Of q_a_layernorm and kv_a_layernorm.", show_default="1e-6")
]
Threads = Annotated[int, typer.Option(metavar="N", help="CPU threads; 0: one per core.")]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="Prompt and generated tokens together, at most.", show_default=False),
]
Text = Annotated[
    str | None,
    typer.Option(metavar="F|-", help="File with the text, UTF-8, or stdin (-).", show_default=False),
]
Window = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens that a window computes.", show_default="2048")
]
Stride = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens between windows; fewer: more context.", show_default="half a window"),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Only the first N tokens.", show_default=False)]
To = Annotated[
    str,
    typer.Option(
        metavar="int4|bf16|f32|same", help="What becomes of the weights; same: only the container changes."
    ),
]
Scales = Annotated[
    str, typer.Option(metavar="mse|minmax", help="INT4 scales: least squared error, or largest magnitude / 7.5.")
]
Rest = Annotated[
    str, typer.Option(metavar="same|bf16|f32", help="With int4: type of all that is not a routed expert.")
]
ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest file of a folder: 500MiB, 4GiB, or bytes.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", show_default=False)]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Template in place of the model's own (jinja2).", show_default=False),
]
Thinking = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Ask the template for it; left out: its own default."),
]
Trace = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write what each round did, one JSON object a line.", show_default=False),
]
NPrompt = Annotated[
    str, typer.Option("--n-prompt", "-p", metavar="N,N", help="Tests of prompts of N tokens; 0: none.")
]
NGen = Annotated[str, typer.Option("--n-gen", "-n", metavar="N,N", help="Tests that generate N tokens; 0: none.")]
NDepth = Annotated[
    str | None,
    typer.Option(
        "--n-depth", "-d", metavar="N,N", help="Tokens that lie before a test.", show_default="0, or the prompt"
    ),
]
Repetitions = Annotated[int, typer.Option("--repetitions", "-r", metavar="N", help="Runs of each test.")]
Budgets = Annotated[
    str, typer.Option("--budget", metavar="auto|N,...", help=f"Draft nodes per round, 0 to {MAX_BUDGET}; a test each.")
]
Format = Annotated[
    str, typer.Option("--format", "-o", metavar="md|csv|json|jsonl", help="Of the results on stdout.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def default_model(arguments: dict[str, Any]) -> None:
    """Without a MODEL it is the demo model, with its own draft model where the command takes one and its drafter asks
    it. Raises EngineError where this installation left it out."""
    if arguments["model"] is not None:
        return
    from kdtree_engine.demo import demo_model

    built_in = demo_model()
    arguments["model"] = str(built_in.target)
    if arguments.get("draft_model") is None and arguments.get("drafter") in ("auto", "dflash"):
        arguments["draft_model"] = str(built_in.draft)


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked to do, checked. Built by `from_arguments` only."""

    model: str
    prompt: (
        str | None
    )  # text; exactly one of prompt and prompt_tokens is set, or neither (the model's own prompt)
    prompt_tokens: list[int] | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: list[str]
    ignore_eos: bool
    logprobs: int | None
    drafter: str
    draft_model: str | None
    draft_options: dict[str, str]
    budget: int | Literal["auto"]
    device: str
    precision: str
    rounding: str
    latent_norm_eps: float | None
    threads: int
    context: int | None
    json: bool
    trace: str | None = None

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any], demo: bool = False) -> RunOptions:
        """Checks the values as typer delivers them. `demo`: without a MODEL it is the demo model, with its drafter.

        Raises
        ------
        UsageProblem
            An option that no model could make sense of; the sentence names it.
        Failure
            A prompt file that cannot be read.
        """
        a = dict(arguments)
        if demo:
            default_model(a)
        if a["model"] is None:
            raise UsageProblem("MODEL is missing; give a Hugging Face folder or a .kdtr bundle")
        within("--max-tokens", a["max_tokens"], 1, 2**31 - 1)
        within("--top-k", a["top_k"], 0, 2**31 - 1)
        within("--threads", a["threads"], 0, 1024)
        within("--context", a["context"], 1, 2**31 - 1)
        within("--logprobs", a["logprobs"], 0, 1024)
        within("--seed", a["seed"], 0, 2**64 - 1)
        within("--temperature", a["temperature"], 0.0, 1e6)
        within("--top-p", a["top_p"], 0.0, 1.0)
        within("--min-p", a["min_p"], 0.0, 1.0)
        if a["top_p"] == 0.0:
            raise UsageProblem(
                "--top-p is 0, which keeps no token; use 1 to keep all, or --temperature 0 for greedy"
            )
        if a["logprobs"] is not None and not a["json"]:
            raise UsageProblem("--logprobs needs --json: plain text has no place for them")
        check_drafter(a["drafter"], a["draft_model"])
        a["draft_options"] = draft_options(a.pop("draft_option"), a["draft_model"])
        check_device(a["device"])
        check_precision(a["precision"])
        check_weights(a["rounding"], a["latent_norm_eps"])
        a["stop"] = list(a["stop"] or [])
        if any(not text for text in a["stop"]):
            raise UsageProblem("--stop is an empty text, which every output contains; leave it out")
        a["budget"] = check_budget(a["budget"])
        a["prompt"], a["prompt_tokens"] = _prompt(a["prompt"], a.pop("prompt_file"), a["prompt_tokens"])
        return cls(**a)


def within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN fails both comparisons
        top = str(high) if isinstance(high, int) else f"{high:.20g}"  # the format g would round 2**64 - 1
        raise UsageProblem(f"{name} is {value}; it must lie between {low:.12g} and {top}")


def check_device(device: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise UsageProblem(f"--device is {device!r}; it must be auto, cpu or cuda, or cuda:N with a number N")


def check_precision(precision: str) -> None:
    if precision not in ("auto", "f32", "bf16"):
        raise UsageProblem(f"--precision is {precision!r}; it must be auto, f32 or bf16")


def check_drafter(drafter: str, draft_model: str | None) -> None:
    if drafter not in DRAFTERS:
        raise UsageProblem(f"--drafter is {drafter!r}; it must be one of {', '.join(DRAFTERS)}")
    if drafter == "dflash" and draft_model is None:
        raise UsageProblem("--drafter dflash needs --draft-model DIR, the folder of its weights")


def draft_options(pairs: list[str] | None, draft_model: str | None) -> dict[str, str]:
    """What DraftOptions.parse takes. Raises UsageProblem."""
    if pairs and draft_model is None:
        raise UsageProblem("--draft-option is about a draft model, and there is no --draft-model")
    options: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value:
            raise UsageProblem(f"--draft-option is {pair!r}; write KEY=VALUE, for example block_size=rows")
        if key in options:
            raise UsageProblem(f"--draft-option {key} is given twice")
        options[key] = value
    return options


def check_weights(rounding: str, latent_norm_eps: float | None) -> None:
    if rounding not in ("exact", "bf16"):
        raise UsageProblem(f"--rounding is {rounding!r}; it must be exact or bf16")
    within("--latent-norm-eps", latent_norm_eps, 1e-12, 1.0)


def check_budget(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        value = int(text)
    except ValueError:
        raise UsageProblem(
            f"--budget is {text!r}; it must be auto or a number from 0 to {MAX_BUDGET}"
        ) from None
    if not 0 <= value <= MAX_BUDGET:
        raise UsageProblem(f"--budget is {value}; it must be auto or a number from 0 to {MAX_BUDGET}")
    return value


def _prompt(text: str | None, file: str | None, tokens: str | None) -> tuple[str | None, list[int] | None]:
    given = [
        name
        for name, value in (("--prompt", text), ("--prompt-file", file), ("--prompt-tokens", tokens))
        if value is not None
    ]
    if len(given) > 1:
        raise UsageProblem(f"{' and '.join(given)} contradict each other; give one of them")
    if tokens is not None:
        return None, _token_list(tokens)
    if file is not None:
        text = read_text("--prompt-file", file)
        if not text:
            raise UsageProblem(f"the prompt is empty ({'stdin' if file == '-' else file} holds no text)")
    if text is None:
        return None, None
    if not text:
        raise UsageProblem("the prompt is empty (--prompt)")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # bytes that the locale does not know arrive as lone surrogates
        try:
            return os.fsencode(text).decode("utf-8"), None
        except UnicodeError as e:
            where = f" at byte {e.start}" if isinstance(e, UnicodeDecodeError) else ""
            raise UsageProblem(f"--prompt is not valid UTF-8{where}") from None
    return text, None


def _token_list(text: str) -> list[int]:
    tokens = []
    for piece in text.split(","):
        piece = piece.strip()
        if not re.fullmatch(r"[0-9]{1,10}", piece):
            what = f"{piece!r} is no token id" if text.strip() else "the prompt is empty"
            raise UsageProblem(f"--prompt-tokens: {what}; write numbers like 1,2,3")
        tokens.append(int(piece))
    return tokens


def read_text(option: str, file: str) -> str:
    """The text in a file, or on stdin (`-`). Raises Failure naming `option`."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as e:
        raise Failure(f"{option} {file} cannot be read: {e.strerror or e}") from None
    except AttributeError:  # stdin is closed: sys.stdin is None
        raise Failure(f"{option} -: stdin is closed") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Failure(f"{option} {file} is not valid UTF-8 at byte {e.start}") from None
