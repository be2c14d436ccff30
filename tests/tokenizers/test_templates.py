"""Chat templates: what they may do, what they get, and how their faults are told."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kdtree_engine import EngineError
from kdtree_engine.templates import MAX_OUTPUT, ChatTemplate, load_template

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **variables: Any) -> str:
    return ChatTemplate(source, "t.jinja", {"bos_token": "<s>"}).render(messages, **variables)


def refused(source: str, **variables: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        render(source, **variables)
    assert "t.jinja" in str(caught.value) and "\n" not in str(caught.value)
    return caught.value


# -- what templates are written for --------------------------------------------------------------------------------


def test_lines_of_blocks_leave_nothing() -> None:
    """Catches white space that reaches the model: templates are written for these two settings."""
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_variables() -> None:
    """Catches a name that templates rely on, and defaults that are not there."""
    source = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ tools }}{{ x }}{{ y is defined }}"
    assert render(source, x=3) == "<s>helloTrueNone3False"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_tojson_escapes_nothing() -> None:
    """Catches jinja2's own filter, which is made for web pages: a model would see \\u003c and \\u6c49."""
    tools = [{"name": "f", "description": "a<b>&'汉"}]
    assert render("{{ tools | tojson }}", tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_words_that_templates_use() -> None:
    """Catches loop controls, generation marks, dates and lists that grow, each of which some release needs."""
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert render("{% set ns = namespace(q=[]) %}{% set _ = ns.q.append(1) %}{{ ns.q }}") == "[1]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_data_are_copies() -> None:
    """Catches a template that changes the history that it is shown."""
    messages = [{"role": "user", "content": "a", "calls": [1]}]
    assert render("{% set _ = messages[0].calls.append(2) %}{{ messages[0].calls }}", messages) == "[1, 2]"
    assert messages[0]["calls"] == [1]


# -- where a template is ------------------------------------------------------------------------------------------


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_where_templates_are_found(tmp_path: Path) -> None:
    """Catches a source that is overlooked, and the wrong one of two."""
    assert load_template(tmp_path) is None
    write_config(tmp_path, bos_token={"content": "<s>", "special": True})
    assert load_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]
    for template, expected in (("C{{ eos_token }}", "C</s>"), (named, "D<s>")):
        write_config(tmp_path, bos_token={"content": "<s>"}, eos_token="</s>", chat_template=template)
        found = load_template(tmp_path)
        assert found is not None and found.render(HELLO) == expected
    (tmp_path / "chat_template.jinja").write_text("F{{ bos_token }}汉", encoding="utf-8")
    found = load_template(tmp_path)
    assert found is not None and found.render(HELLO) == "F<s>汉"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 3}, "chat_template is no text"),
        ({"chat_template": [{"name": "x", "template": "y"}]}, "lists 1 templates, but none is called default"),
        ({"chat_template": "{% if %}"}, "chat_template, line 1: "),
        ({"bos_token": 3}, "bos_token is 3; expected a text"),
    ],
)
def test_bad_configs(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches a traceback where the config is at fault."""
    write_config(tmp_path, **config)
    with pytest.raises(EngineError) as caught:
        load_template(tmp_path)
    assert caught.value.code == "bad_file" and message in str(caught.value)


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    """Catches binary and endless files."""
    file = tmp_path / "chat_template.jinja"
    for data, message in ((b"a\xff", "not UTF-8 at byte 1"), (b" " * ((1 << 20) + 1), "more than 1048576 bytes")):
        file.write_bytes(data)
        with pytest.raises(EngineError, match=message):
            load_template(tmp_path)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback in place of the package's name."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    error = refused("a")
    assert error.code == "unsupported" and "kdtree-engine[hf]" in str(error)


# -- faults and attacks --------------------------------------------------------------------------------------------


def test_a_template_refuses() -> None:
    """Catches a refusal (roles that must alternate, say) that looks like a fault of the file."""
    error = refused("{{ raise_exception('roles must alternate') }}")
    assert error.code == "invalid_argument" and "refuses the conversation: roles must alternate" in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].content.foo.bar }}",
        "{{ messages | nofilter }}",
        "{{ range(200000) | list }}",
        "{{ [1] + 'a' }}",
    ],
)
def test_a_template_fails(source: str) -> None:
    """Catches tracebacks: what a program can do wrong is the file's fault."""
    assert refused(source).code == "bad_file"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    """Catches a door to the interpreter or to files: whatever comes, it is an error or nothing at all."""
    try:
        text = render(source)
    except EngineError as error:
        assert error.code == "bad_file"
    else:
        assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000000 }}",
        "{{ 1000000000000 * [1] }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaa{% endfor %}{% endfor %}",
    ],
)
def test_templates_cannot_fill_memory(source: str) -> None:
    """Catches a template that makes more text than any context holds."""
    started = time.monotonic()
    error = refused(source)
    assert error.code == "bad_file" and time.monotonic() - started < 30
    assert len(render("{{ 'ab' * n }}", n=MAX_OUTPUT // 2)) == MAX_OUTPUT


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(99) }}",
        "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ [1] | batch(9999999999, 0) | list }}",
        "{{ lipsum(n=9999999) }}",
    ],
)
def test_templates_cannot_run_for_ever(source: str) -> None:
    """Catches loops that make nothing, calls that multiply, texts that double, and widths: each took the program's
    time or memory without end."""
    started = time.monotonic()
    assert refused(source).code == "bad_file" and time.monotonic() - started < 30


def test_what_counts_steps_changes_no_template() -> None:
    """Catches a counted loop that has lost what ``loop`` knows, and formats that are refused without need."""
    source = (
        "{% for m in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ loop.previtem }}"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() if v %}{{ k ~ v }}{% endfor %}"
        "{% for x in undefined_thing %}x{% else %}-{% endfor %}"
        "{{ '%05.1f|%s' % (2.25, 'x') }}{{ '{:>4}'.format(7) }}{{ 'b' | center(3) }}{{ [1] + [2] }}{{ 'a' + 'b' }}"
        "{% for n in [[1, [2]], [3]] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}"
    )
    assert render(source) == "1/3,2/3,13/32a1-002.2|x   7 b [1, 2]ab123"


def test_half_a_character_is_the_templates_fault() -> None:
    assert "surrogate" in str(refused(r"{{ '\ud800' }}"))


def test_only_plain_data_goes_in() -> None:
    """Catches an object whose methods a template could call."""
    with pytest.raises(EngineError, match="plain data") as caught:
        render("{{ x }}", x=Path("/"))
    assert caught.value.code == "invalid_argument"
