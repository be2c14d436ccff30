"""Chat templates: from messages to the text that a model was trained to see.

A template is a program that came with a checkpoint, in the language of jinja2. It runs in jinja2's sandbox: no
attribute of an object that is not plain data, no file, no import; it gets copies of what it is given, and the
size of what it makes is bounded. Variables, filters and white-space rules are those that templates are written
for: ``messages``, ``tools``, ``add_generation_prompt``, the special tokens (``bos_token``), ``tojson`` without
escapes, ``raise_exception``, ``strftime_now``; lines of blocks leave no line breaks.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import load_json, read_regular
from .errors import EngineError, fail

if TYPE_CHECKING:
    import jinja2

__all__ = ["MAX_OUTPUT", "MAX_STEPS", "ChatTemplate", "Message", "load_template"]

Message = Mapping[str, Any]
"""``role``, ``content`` and whatever else a template asks for (``name``, ``reasoning_content``)."""

MAX_OUTPUT = 1 << 24
"""Characters that a template may make: more than any context holds."""

MAX_STEPS = 2_000_000
"""Rounds of loops and calls that a template may take: a second or two; a long conversation takes thousands."""

_MAX_FILE = 1 << 20
_WIDE = re.compile(r"[0-9]{6}|\*|\{[^}]*\{")  # in a format: a width of a million, or one that is an argument
_WIDTHS = ("batch", "center", "indent", "slice", "wordwrap")  # filters that take one
_MAX_POWER = 64  # exponent of a power in a template
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model folder: ``chat_template.jinja``, else the one in tokenizer_config.json (of
    several, the one called ``default``). None where there is none. Raises EngineError as ChatTemplate does."""
    config_path = folder / "tokenizer_config.json"
    config = load_json(config_path) if config_path.exists() else {}
    tokens = _special_tokens(config, config_path)
    file = folder / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(read_template(file), str(file), tokens)
    where = f"{config_path}: chat_template"
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if "default" not in named:
            fail("bad_file", f"{where} lists {len(source)} templates, but none is called default")
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        fail("bad_file", f"{where} is no text")
    return ChatTemplate(source, where, tokens)


def read_template(file: Path) -> str:
    """The text of a template's file; EngineError ``io`` or ``bad_file``."""
    try:
        return read_regular(file, _MAX_FILE).decode()
    except UnicodeDecodeError as error:
        fail("bad_file", f"{file} is not UTF-8 at byte {error.start}", error)


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """bos_token and its like: a text each, or an object with the text in ``content``."""
    found = {}
    for key in _SPECIAL_KEYS:
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(value, str):
            fail("bad_file", f"{path}: {key} is {value!r}; expected a text")
        if value is not None:
            found[key] = value
    return found


class ChatTemplate:
    """A compiled template. `source` is its text, `where` what messages call it, `tokens` the special tokens
    that it can name (``bos_token``).

    Raises EngineError: ``unsupported`` without the package jinja2, ``bad_file`` for a text that is no
    template.
    """

    def __init__(self, source: str, where: str, tokens: Mapping[str, str] | None = None) -> None:
        self.where = where
        self._tokens = dict(tokens or {})
        environment, errors = _environment(where)
        try:
            self._template: jinja2.Template = environment.from_string(source)
        except errors.TemplateSyntaxError as error:
            fail("bad_file", f"{where}, line {error.lineno}: {error.message}", error)
        except (errors.TemplateError, RecursionError, ValueError) as error:
            fail("bad_file", f"{where} is no template: {error}", error)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, with the opening of the next answer if `add_generation_prompt`.

        `variables` are whatever this template asks for (``thinking=False``). Everything is handed over as
        copies of plain data. Raises EngineError: ``invalid_argument`` where the template refuses the
        conversation, ``bad_file`` where the template itself fails.
        """
        _, errors = _environment(self.where)
        given = {
            **self._tokens,
            "messages": list(messages),
            "tools": list(tools) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            plain = json.loads(json.dumps(given))
        except (TypeError, ValueError, RecursionError) as error:
            fail("invalid_argument", f"messages and variables of a template must be plain data: {error}", error)
        parts: list[str] = []
        size = 0
        _steps.left = MAX_STEPS
        try:
            for part in self._template.generate(plain):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT:
                    fail("bad_file", f"{self.where}: the template makes more than {MAX_OUTPUT} characters")
        except EngineError:
            raise
        except _Refused as error:
            fail("invalid_argument", f"{self.where}: the template refuses the conversation: {error}", error)
        except errors.SecurityError as error:
            fail("bad_file", f"{self.where}: the template does what it may not: {error}", error)
        except Exception as error:  # whatever a program can do wrong
            kind = "" if isinstance(error, errors.TemplateError) else f"{type(error).__name__}: "
            fail("bad_file", f"{self.where}: the template fails: {kind}{error}", error)
        text = "".join(parts)
        if not text.isascii() and (at := re.search("[\ud800-\udfff]", text)) is not None:
            fail("bad_file", f"{self.where}: the template makes half a character (a lone surrogate) at {at.start()}")
        return text


_steps = threading.local()
"""``left``: what the rendering on this thread may still do."""


class _Refused(Exception):
    """A template called raise_exception."""


def _refuse(message: object) -> None:
    raise _Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment(where: str) -> tuple[jinja2.Environment, Any]:
    """The sandbox, and the module of jinja2's exceptions."""
    try:
        import jinja2
    except ImportError as error:
        hint = "pip install 'kdtree-engine[hf]'"
        fail("unsupported", f"the chat template {where} needs the package jinja2: {hint}", error)
    return _sandbox(), jinja2.exceptions


@cache
def _sandbox() -> jinja2.Environment:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import SandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    def step() -> None:
        _steps.left -= 1
        if _steps.left < 0:
            raise SecurityError(f"more than {MAX_STEPS} rounds of loops and calls")

    def counted(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            step()
            yield item

    def bounded(text: Any) -> Any:
        if len(text) > MAX_OUTPUT:
            raise SecurityError(f"a text of more than {MAX_OUTPUT} characters")
        return text

    def narrow(*values: object) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_OUTPUT:
                raise SecurityError(f"the width {value}")

    def narrowed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps what jinja2 notes on its filters
        def call(*args: Any, **named: Any) -> Any:
            narrow(*args, *named.values())
            return function(*args, **named)

        return call

    def formatted(form: Any, *args: Any, **named: Any) -> Any:
        if _WIDE.search(str(form)):
            raise SecurityError("a format with a width of a million or one that is an argument")
        return str(form) % (named or args)

    class Counter(NodeTransformer):
        """Puts every loop's items through `counted` and every joined text through `bounded`."""

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return nodes.Filter(node, "_bounded", [], [], None, None, lineno=node.lineno)

    class Generation(Extension):
        """``{% generation %}``, which marks answers for training, is the text inside it."""

        tags = {"generation"}  # noqa: RUF012  # what jinja2 asks for

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(SandboxedEnvironment):
        """Templates get copies, so changing lists is allowed; making huge ones is not, nor running for ever."""

        intercepted_binops = frozenset(("*", "**", "%", "+"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            return Counter().visit(super()._parse(source, name, filename))

        def call(self, context: Any, obj: Any, /, *args: Any, **named: Any) -> Any:
            step()
            if isinstance(getattr(obj, "__self__", None), (str, bytes)):
                narrow(*args, *named.values())
            return super().call(context, obj, *args, **named)

        def wrap_str_format(self, value: Any) -> Any:
            made = super().wrap_str_format(value)
            if made is not None and _WIDE.search(value.__self__):
                raise SecurityError("a format with a width of a million or one that is an argument")
            return made

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                return formatted(left, *(right if isinstance(right, tuple) else (right,)))
            if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                return bounded(left + right)
            if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= _MAX_POWER):
                raise SecurityError(f"a power with the exponent {right!r}")
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > MAX_OUTPUT:
                        raise SecurityError(f"a repetition that makes more than {MAX_OUTPUT} items")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=(Generation, "jinja2.ext.loopcontrols"))
    environment.filters |= {name: narrowed(environment.filters[name]) for name in _WIDTHS}
    environment.filters |= {"tojson": _to_json, "format": formatted, "_counted": counted, "_bounded": bounded}
    environment.globals.pop("lipsum", None)  # a maker of text for demonstrations
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment
