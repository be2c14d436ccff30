"""Rounds as pictures: one self-contained HTML page with an SVG per round.

A round grows to the right: the root, then depth by depth. Green is what the target accepted, white what it was
asked about and did not take, dashed what was drafted and not verified. The border says who proposed a node, the
line to it how probable it was. Rows are leaves; a parent stands at the height of its likeliest child, so that
the spine is straight.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness.report.rounds import SOURCES, Round

_COLUMN, _ROW, _BOX_W, _BOX_H, _PAD = 104, 24, 84, 18, 8
_BORDER = {0: "#222", 1: "#1f5fbf", 2: "#c2620c", 3: "#7a3fb0"}
_LETTERS = 10  # of a node's text
_STAGES = ("draft_table", "draft_paths", "build", "verify", "accept", "commit")
_STAGE_COLOURS = ("#1f5fbf", "#c2620c", "#999", "#4a9", "#cc5", "#777")

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin: 28px 0 4px; } p { margin: 4px 0; }
svg { display: block; } svg text { font: 11px ui-monospace, monospace; }
.frame { overflow-x: auto; } .key span { display: inline-block; margin-right: 16px; }
.key i { display: inline-block; width: 26px; height: 12px; margin-right: 5px; vertical-align: -1px; }
code { background: #f2f2f2; padding: 0 3px; white-space: pre; }
"""


def page(rounds: Sequence[Round], title: str) -> str:
    """The whole page."""
    emitted = sum(len(r.emitted) for r in rounds)
    seconds = sum(r.total_seconds for r in rounds)
    verified = sum(r.nodes for r in rounds)
    rate = f", {emitted / seconds:.1f} tokens/s of the rounds' own time" if seconds > 0 else ""
    head = (
        f"<p>{len(rounds)} rounds, {emitted} tokens ({emitted / len(rounds):.2f} a round), "
        f"{verified / len(rounds):.1f} nodes verified a round{rate}.</p>"
    )
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>',
        f"<body><h1>{escape(title)}</h1>{head}{_key()}",
        f'<div class="frame">{overview(rounds)}</div>',
        *(_section(r) for r in rounds),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _key() -> str:
    def box(style: str) -> str:
        return f'<i style="{style}"></i>'

    entries = [
        (box("background:#bfe5c3;border:2px solid #222"), "accepted"),
        (box("background:#fff;border:2px solid #222"), "verified, not taken"),
        (box("background:#fff;border:1px dashed #999"), "drafted, not verified"),
        *((box(f"background:#fff;border:2px solid {_BORDER[s]}"), f"from {SOURCES[s]}") for s in (1, 2, 3)),
    ]
    return '<p class="key">' + "".join(f"<span>{picture}{escape(text)}</span>" for picture, text in entries) + "</p>"


def _section(r: Round) -> str:
    text = "".join(r.emitted_text) if r.emitted_text else ""
    return (
        f'<h2 id="round-{r.number}">Round {r.number}: {len(r.emitted)} tokens from {r.nodes} of '
        f"{len(r.tokens) - 1} nodes, root at position {r.position}</h2>"
        f"<p>emitted <code>{escape(visible(text))}</code>, {1e3 * r.total_seconds:.2f} ms</p>"
        f'<div class="frame">{drawing(r)}{stages(r)}</div>'
    )


def visible(text: str) -> str:
    """Control characters, which XML does not allow, as their pictures."""
    return "".join(c if c.isprintable() else chr(0x2400 + ord(c)) if ord(c) < 0x20 else "\ufffd" for c in text)


# ------------------------------------------------------------------------------------------------------------
# one tree


def rows_of(r: Round) -> list[float]:
    """The height of each node, in rows: leaves in order of probability within their parent, a parent at its
    likeliest child."""
    children: list[list[int]] = [[] for _ in r.tokens]
    for i in range(1, len(r.tokens)):
        children[r.parents[i]].append(i)  # pop order: likeliest first
    height = [0.0] * len(r.tokens)
    used = 0
    stack = [0]
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    for node in order:
        if not children[node]:
            height[node] = used
            used += 1
    for node in reversed(order):
        if children[node]:
            height[node] = height[children[node][0]]
    return height


def drawing(r: Round) -> str:
    """The tree of a round as SVG."""
    height = rows_of(r)
    accepted = set(r.path)
    width = 2 * _PAD + (max(r.depths) + 1) * _COLUMN
    total = 2 * _PAD + (max(height) + 1) * _ROW

    def corner(i: int) -> tuple[float, float]:
        return _PAD + r.depths[i] * _COLUMN, _PAD + height[i] * _ROW

    lines, boxes = [], []
    for i in range(len(r.tokens)):
        x, y = corner(i)
        asked, taken = i <= r.nodes, i in accepted
        if i > 0:
            px, py = corner(r.parents[i])
            x0, y0, x1, y1 = px + _BOX_W, py + _BOX_H / 2, x, y + _BOX_H / 2
            middle = (x0 + x1) / 2
            thick = 0.6 + 3.4 * min(1.0, max(0.0, r.probabilities[i]))
            lines.append(
                f'<path d="M{x0:.1f} {y0:.1f} C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}" '
                f'fill="none" stroke="{"#2a8a3c" if taken else "#bbb"}" stroke-width="{thick:.2f}"/>'
            )
        border = _BORDER[r.sources[i]] if asked else "#999"
        dash = "" if asked else ' stroke-dasharray="3 2"'
        fill = "#bfe5c3" if taken else "#fff"
        label = visible(r.text[i])
        short = label if len(label) <= _LETTERS else label[: _LETTERS - 1] + "…"
        about = f"node {i}: token {r.tokens[i]}, probability {r.probabilities[i]:.4g}, {SOURCES[r.sources[i]]}"
        boxes.append(
            f'<g><title>{escape(about)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{_BOX_W}" height="{_BOX_H}" rx="3" '
            f'fill="{fill}" stroke="{border}" stroke-width="{2 if asked else 1}"{dash}/>'
            f'<text x="{x + 5:.1f}" y="{y + 13:.1f}" xml:space="preserve">{escape(short)}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{total:.0f}" role="img">'
        + "".join(lines)
        + "".join(boxes)
        + "</svg>"
    )


def stages(r: Round) -> str:
    """A bar of the round's seconds by stage."""
    total = r.total_seconds
    if total <= 0:
        return ""
    at, parts = 0.0, []
    for name, colour in zip(_STAGES, _STAGE_COLOURS, strict=True):
        share = 400 * r.seconds.get(name, 0.0) / total
        about = escape(f"{name}: {1e3 * r.seconds.get(name, 0.0):.3f} ms")
        place = f'x="{at:.1f}" y="0" width="{share:.1f}" height="8"'
        parts.append(f'<rect {place} fill="{colour}"><title>{about}</title></rect>')
        at += share
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="402" height="10">{"".join(parts)}</svg>'


def overview(rounds: Sequence[Round]) -> str:
    """Nodes verified (grey) and tokens emitted (green) of every round; each bar leads to its round."""
    most = max(max(r.nodes for r in rounds), max(len(r.emitted) for r in rounds), 1)
    bars = []
    for i, r in enumerate(rounds):
        x = 8 * i
        asked, got = 80 * r.nodes / most, 80 * len(r.emitted) / most
        about = escape(f"round {r.number}: {r.nodes} nodes, {len(r.emitted)} tokens")
        bars.append(
            f'<a href="#round-{r.number}"><title>{about}</title>'
            f'<rect x="{x}" y="{80 - asked:.1f}" width="7" height="{asked:.1f}" fill="#ccc"/>'
            f'<rect x="{x + 2}" y="{80 - got:.1f}" width="3" height="{got:.1f}" fill="#2a8a3c"/></a>'
        )
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{8 * len(rounds)}" height="82">{"".join(bars)}</svg>'
