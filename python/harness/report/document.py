"""A report as sections of text, tables and pictures; written as one HTML page or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from harness.report.tree import visible

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --line: #d9dde5; --paper: #fff; --card: #f5f7fa;
  --good: #1a7f43; --bad: #c22f2f; --look: #9a6200; --c0: #1f5fbf; --c1: #c2620c; --c2: #7a3fb0; --c3: #14847a;
  --c4: #b02a6b; --c5: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ef; --soft: #9aa4b5; --line: #343b49; --paper: #14171d;
  --card: #1d222b; --good: #55c983; --bad: #ff7b7b; --look: #e5b04d; --c0: #6ea8ff; --c1: #f5a055; --c2: #c094f0;
  --c3: #4fc7bb; --c4: #f07fb2; --c5: #9aa4b5; } }
* { box-sizing: border-box; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 24px; max-width: 1200px; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 6px; }
h3 { font-size: 14px; margin: 20px 0 4px; }
p { margin: 4px 0 8px; max-width: 80em; } p.soft, .soft { color: var(--soft); }
nav { margin: 6px 0 0; } nav a { margin-right: 14px; color: var(--c0); text-decoration: none; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px;
  min-width: 150px; }
.card b { display: block; font-size: 20px; } .card span { color: var(--soft); font-size: 12px; }
.frame { overflow-x: auto; }
table { border-collapse: collapse; margin: 6px 0 10px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12px; border-bottom: 1px solid var(--line); }
th, td { padding: 3px 12px 3px 0; vertical-align: top; } td { border-bottom: 1px solid var(--line); }
th.n, td.n { text-align: right; white-space: nowrap; } td.name { font: 12px/1.6 ui-monospace, monospace; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; } .look { color: var(--look); }
svg { display: block; max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); } svg .axis { stroke: var(--line); } svg .roof { stroke: var(--ink); }
td svg { display: inline-block; vertical-align: middle; }
.key span { display: inline-block; margin-right: 16px; } .key i { display: inline-block; width: 10px; height: 10px;
  border-radius: 5px; margin-right: 5px; }
"""


@dataclass(frozen=True)
class Cell:
    """Text, how it looks (`good`, `bad`, `look`, `soft`), a number (right-aligned), what a pointer shows; a picture
    that HTML puts behind the text."""

    text: str
    look: str = ""
    number: bool = False
    title: str = ""
    picture: str = ""


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Text:
    text: str
    look: str = ""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Picture:
    """An SVG element, and what it shows as a sentence. `key`: colours (CSS variables) and their names. `table`: what
    it shows as figures, where there are no pictures and no other table has them."""

    svg: str
    caption: str
    key: Sequence[tuple[str, str]] = ()
    table: Table | None = None


Block = Table | Text | Heading | Picture


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    """`cards`: the figures at the top: value, what it is, how it looks."""

    title: str
    about: str
    cards: list[tuple[str, str, str]] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def number(text: str, look: str = "", title: str = "") -> Cell:
    """A cell that is right-aligned."""
    return Cell(text, look, number=True, title=title)


# -- HTML ----------------------------------------------------------------------------------------------------------


def text_of(value: str) -> str:
    """Escaped; control characters, which HTML has no place for, as pictures."""
    return escape(visible(value))


def html(document: Document) -> str:
    """One page that needs nothing but itself."""
    title = text_of(document.title)
    links = "".join(f'<a href="#s{i}">{text_of(s.title)}</a>' for i, s in enumerate(document.sections))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f'<h1>{title}</h1><p class="soft">{text_of(document.about)}</p>',
        f"<nav>{links}</nav>",
        '<div class="cards">' + "".join(_card(*card) for card in document.cards) + "</div>",
    ]
    for i, section in enumerate(document.sections):
        parts.append(f'<section id="s{i}"><h2>{text_of(section.title)}</h2>')
        parts += map(_html, section.blocks)
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _card(value: str, what: str, look: str) -> str:
    return f'<div class="card"><b class="{look}">{text_of(value)}</b><span>{text_of(what)}</span></div>'


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h3>{text_of(block.text)}</h3>"
    if isinstance(block, Text):
        return f'<p class="{block.look}">{text_of(block.text)}</p>'
    if isinstance(block, Picture):
        entries = (f'<span><i style="background:var({c})"></i>{text_of(name)}</span>' for c, name in block.key)
        key = f'<p class="key">{"".join(entries)}</p>' if block.key else ""
        return f'<div class="frame">{block.svg}</div>{key}<p class="soft">{text_of(block.caption)}</p>'
    numeric = [any(i < len(row) and row[i].number for row in block.rows) for i in range(len(block.head))]
    head = "".join(f"<th{' class=n' if n else ''}>{text_of(h)}</th>" for h, n in zip(block.head, numeric, strict=True))
    rows = "".join("<tr>" + "".join(_cell(c, i == 0) for i, c in enumerate(row)) + "</tr>" for row in block.rows)
    return f'<div class="frame"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(cell: Cell, first: bool) -> str:
    classes = " ".join(c for c in ("n" if cell.number else "", "name" if first else "", cell.look) if c)
    title = f' title="{text_of(cell.title)}"' if cell.title else ""
    kind = f' class="{classes}"' if classes else ""
    return f"<td{kind}{title}>{text_of(cell.text)}{cell.picture}</td>"


# -- Markdown ------------------------------------------------------------------------------------------------------


def _plain(value: str) -> str:
    """One line of Markdown in which nothing is markup: no HTML, no table border, no link."""
    line = " ".join(visible(value).split())
    return escape("".join("\\" + c if c in "\\`*_[]|#" else c for c in line), quote=False)


def markdown(document: Document) -> str:
    """The same without pictures: their captions, and what they show in tables."""
    return "\n".join(_markdown(document)).rstrip() + "\n"


def _markdown(document: Document) -> Iterator[str]:
    yield f"# {_plain(document.title)}"
    yield ""
    yield _plain(document.about)
    yield ""
    for value, what, _ in document.cards:
        yield f"- {_plain(what)}: **{_plain(value)}**"
    for section in document.sections:
        yield f"\n## {_plain(section.title)}\n"
        for block in section.blocks:
            if isinstance(block, Heading):
                yield f"### {_plain(block.text)}\n"
            elif isinstance(block, Text):
                yield _plain(block.text) + "\n"
            elif isinstance(block, Table):
                yield from _markdown_table(block)
            else:
                yield _plain(block.caption) + "\n"
                if block.table is not None:
                    yield from _markdown_table(block.table)


def _markdown_table(table: Table) -> Iterator[str]:
    numeric = [any(row[i].number for row in table.rows) for i in range(len(table.head))]
    yield "| " + " | ".join(map(_plain, table.head)) + " |"
    yield "|" + "|".join("---:" if n else "---" for n in numeric) + "|"
    for row in table.rows:
        yield "| " + " | ".join(_plain(cell.text) for cell in row) + " |"
    yield ""
