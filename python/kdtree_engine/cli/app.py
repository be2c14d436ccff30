"""Commands and their options; how every command ends."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer

from kdtree_engine.cli import console, exits
from kdtree_engine.cli import options as o
from kdtree_engine.cli.interrupt import Interruptible

app = typer.Typer(
    name="kdtree",
    help="Speculative decoding with draft trees (DDTree), bit for bit the output of plain decoding.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kdtree_engine.cli.version import package_version

        print(f"kdtree {package_version()}")
        raise typer.Exit(exits.OK)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        raise exits.UsageProblem("a command is missing; kdtree --help lists them")


@app.command()
def generate(
    model: o.Model = None,
    prompt: o.Prompt = None,
    prompt_file: o.PromptFile = None,
    prompt_tokens: o.PromptTokens = None,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = 0,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    logprobs: o.Logprobs = None,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    draft_option: o.DraftOption = None,
    budget: o.Budget = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "auto",
    rounding: o.Rounding = "exact",
    latent_norm_eps: o.LatentNormEps = None,
    threads: o.Threads = 0,
    context: o.Context = None,
    trace: o.Trace = None,
    json: o.Json = False,
) -> int:
    """Continue a prompt and stream the text to stdout.

    Without a MODEL the demo model runs, which comes with the package, and its drafter.
    A .kdtr bundle that holds a prompt of its own runs on that where no prompt is given.
    """
    arguments = dict(locals())
    from kdtree_engine.cli import generate as command

    options = o.RunOptions.from_arguments(arguments, demo=True)
    with Interruptible() as interruption:  # from here on `execute` answers every signal, with --json too
        return command.execute(options, interruption)


@app.command()
def chat(
    model: o.Model = None,
    system: o.System = None,
    chat_template: o.ChatTemplate = None,
    thinking: o.Thinking = None,
    max_tokens: o.MaxTokens = 4096,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = 0,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    draft_option: o.DraftOption = None,
    budget: o.Budget = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "auto",
    rounding: o.Rounding = "exact",
    latent_norm_eps: o.LatentNormEps = None,
    threads: o.Threads = 0,
    context: o.Context = None,
    json: o.Json = False,
) -> int:
    """Talk to a model: one question a line from stdin, answers streamed to stdout.

    Ctrl-C stops the answer and not the program. /reset forgets the conversation, /exit or the end of stdin
    leaves; a question that begins with a slash is written with two.
    """
    arguments = dict(locals())
    arguments |= dict.fromkeys(("prompt", "prompt_file", "prompt_tokens", "logprobs"))
    from kdtree_engine.cli import chat as command

    own = {name: arguments.pop(name) for name in ("system", "chat_template", "thinking")}
    with Interruptible() as interruption:
        return command.execute(o.RunOptions.from_arguments(arguments), **own, interruption=interruption)


@app.command()
def verify(
    model: o.Model = None,
    prompt: o.Prompt = None,
    prompt_file: o.PromptFile = None,
    prompt_tokens: o.PromptTokens = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = 0,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    logprobs: o.Logprobs = None,
    drafter: o.Drafter = "planted",
    draft_model: o.DraftModel = None,
    draft_option: o.DraftOption = None,
    budget: o.Budget = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "auto",
    rounding: o.Rounding = "exact",
    latent_norm_eps: o.LatentNormEps = None,
    threads: o.Threads = 0,
    context: o.Context = None,
    json: o.Json = False,
) -> int:
    """Decode plainly and with draft trees, and compare tokens and logits bit for bit.

    Without a MODEL the demo model is verified.
    With --budget auto (the default) several fixed budgets run, and the engine's own choice. Exit code 1:
    a difference (the first one is named); 2: nothing was tested, because no draft was accepted.
    """
    arguments = dict(locals())
    from kdtree_engine.cli import verify as command

    with Interruptible() as interruption:
        return command.execute(o.RunOptions.from_arguments(arguments, demo=True), interruption)


@app.command()
def bench(
    model: o.Model = None,
    n_prompt: o.NPrompt = "512",
    n_gen: o.NGen = "128",
    n_depth: o.NDepth = None,
    repetitions: o.Repetitions = 5,
    prompt_file: o.PromptFile = None,
    drafter: o.Drafter = "auto",
    draft_model: o.DraftModel = None,
    draft_option: o.DraftOption = None,
    budget: o.Budgets = "auto",
    device: o.Device = "auto",
    precision: o.Precision = "auto",
    rounding: o.Rounding = "exact",
    latent_norm_eps: o.LatentNormEps = None,
    threads: o.Threads = 0,
    format: o.Format = "md",
) -> int:
    """Measure tokens per second: prompts, plain decoding, decoding with draft trees.

    Without a MODEL the demo model is measured, with its drafter.
    The columns are llama-bench's, and the accepted length, bytes read and how much of the memory's own rate
    that is. A figure above what the memory gives is an error.
    """
    arguments = dict(locals())
    from kdtree_engine.cli import bench as command

    with Interruptible():
        return command.execute(command.Options.from_arguments(arguments))


@app.command()
def perplexity(
    model: o.Model = None,
    text: o.Text = None,
    window: o.Window = None,
    stride: o.Stride = None,
    limit: o.Limit = None,
    device: o.Device = "auto",
    precision: o.Precision = "auto",
    rounding: o.Rounding = "exact",
    latent_norm_eps: o.LatentNormEps = None,
    threads: o.Threads = 0,
    json: o.Json = False,
) -> int:
    """Score a text: bits per byte, bits per token, perplexity.

    Without a MODEL the demo model scores it.
    Long texts are scored by windows that overlap; every token but the first counts once.
    """
    arguments = dict(locals())
    from kdtree_engine.cli import perplexity as command

    with Interruptible():
        return command.execute(command.Options.from_arguments(arguments))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Hugging Face folder, or a .kdtr bundle.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New folder, or a new file NAME.kdtr.")],
    to: o.To = "int4",
    scales: o.Scales = "mse",
    rest: o.Rest = "same",
    shard_size: o.ShardSize = "4GiB",
    threads: o.Threads = 0,
    json: o.Json = False,
) -> int:
    """Convert a checkpoint: routed experts to INT4, everything to floating point, or only the container.

    A stopped conversion goes on where it was when the same command runs again.
    """
    arguments = dict(locals())
    from kdtree_engine.cli import convert as command

    with Interruptible():
        return command.execute(command.Options.from_arguments(arguments))


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Hugging Face folder, or a .kdtr file.")],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not patterns of names, however many there are.")
    ] = False,
    json: o.Json = False,
) -> int:
    """Show what a model or file holds and needs, without reading its weights."""
    from kdtree_engine.cli import inspect as command

    return command.execute(path, json, tensors)


@app.command()
def doctor(json: o.Json = False) -> int:
    """Report version, build, CPU, memory and optional packages, and what this machine will use."""
    from kdtree_engine.cli import doctor as command

    return command.execute(json)


def _is_usage_error(e: Exception) -> bool:
    """Whether `e` is the option parser's own error.

    typer carries its parser with it or takes it from click, depending on the version, so the type has no
    one name; what both have is the method that prints the error and the exit code that rates it.
    """
    return hasattr(e, "format_message") and hasattr(e, "exit_code")


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code. Every error is one sentence on stderr."""
    try:
        console.prepare_streams()
        result: Any = app(args=arguments, prog_name="kdtree", standalone_mode=False)
        sys.stdout.flush()
        return int(result or 0)
    except exits.UsageProblem as e:
        console.error(str(e))
        return exits.USAGE
    except exits.Failure as e:
        console.error(str(e))
        return exits.FAILED
    except (exits.Interrupted, KeyboardInterrupt) as e:
        console.log("cancelled")
        return e.exit_code if isinstance(e, exits.Interrupted) else exits.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`kdtree … | head`). Point stdout elsewhere: the interpreter
        # flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.FAILED
    except MemoryError as e:
        console.error(f"out of memory: {e}" if str(e) else "out of memory")
        return exits.FAILED
    except Exception as e:
        return _failed(e)


def _failed(e: Exception) -> int:
    from kdtree_engine.errors import EngineError

    if os.environ.get("KDTREE_TRACEBACK") == "1":
        raise e
    if _is_usage_error(e):
        console.error(e.format_message().rstrip("."))  # type: ignore[attr-defined]  # see _is_usage_error
        return exits.USAGE
    if isinstance(e, EngineError):
        console.error(str(e))
    elif isinstance(e, OSError):
        # The files that a command writes carry their names; what is left is the output itself.
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        where = f"{e.filename}: " if e.filename else "stdout cannot be written: " if full else ""
        console.error(f"{where}{e.strerror or e}")
    else:
        console.error(
            f"internal error, a bug of kdtree: {type(e).__name__}: {e} (KDTREE_TRACEBACK=1 shows where)"
        )
    return exits.FAILED


def main() -> None:
    """Entry point of the ``kdtree`` command."""
    sys.exit(run(sys.argv[1:]))
