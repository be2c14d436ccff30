"""Pictures of results as SVG elements. Colours are the page's CSS variables, so that they follow its light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("--c0", "--c1", "--c2", "--c3", "--c4", "--c5")
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 12, 38


@dataclass(frozen=True)
class Point:
    """`about`: what a pointer shows; `label`: text beside it, where there is room."""

    x: float
    y: float
    about: str = ""
    label: str = ""
    colour: str = "--c0"


@dataclass(frozen=True)
class Line:
    points: Sequence[tuple[float, float]]
    colour: str = "--ink"
    about: str = ""
    dashed: bool = False
    marks: bool = False


class Chart:
    """Axes, logarithmic or not, and what lies in them."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], labels: tuple[str, str], log: bool = False,
        size: tuple[int, int] = (820, 420),
    ) -> None:  # fmt: skip
        self._x, self._y, self._log = x, y, log
        self.width, self.height = size
        self._parts: list[str] = []
        self._boxes: list[tuple[float, float, float, float]] = []  # of labels
        self._axes(labels)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a value lies on the picture."""
        fx, fy = self._share(x, self._x), self._share(y, self._y)
        across, up = self.width - _LEFT - _RIGHT, self.height - _TOP - _BOTTOM
        return _LEFT + fx * across, self.height - _BOTTOM - fy * up

    def _share(self, v: float, of: tuple[float, float]) -> float:
        low, high = of
        if self._log:
            v, low, high = math.log(max(v, low * 1e-9)), math.log(low), math.log(high)
        return (v - low) / (high - low)

    def _axes(self, labels: tuple[str, str]) -> None:
        for value in self._ticks(self._x):
            x, bottom = self.at(value, self._y[0])
            self._parts.append(f'<path class="axis" d="M{x:.1f} {_TOP}V{bottom:.1f}"/>')
            self._text(x, bottom + 15, _short(value), "middle", "soft")
        for value in self._ticks(self._y):
            left, y = self.at(self._x[0], value)
            self._parts.append(f'<path class="axis" d="M{left:.1f} {y:.1f}H{self.width - _RIGHT}"/>')
            self._text(left - 6, y + 4, _short(value), "end", "soft")
        self._text((_LEFT + self.width - _RIGHT) / 2, self.height - 5, labels[0], "middle", "soft")
        middle = (_TOP + self.height - _BOTTOM) / 2
        turned = f'<text class="soft" text-anchor="middle" transform="translate(13 {middle:.0f}) rotate(-90)">'
        self._parts.append(f"{turned}{escape(labels[1])}</text>")

    def _ticks(self, of: tuple[float, float]) -> list[float]:
        low, high = of
        if self._log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            found = [m * 10.0**p for p in powers for m in (1, 3)]
            found = [v for v in found if low <= v <= high]
            return found if len(found) < 12 else [v for v in found if f"{v:e}"[0] == "1"]
        step = 10.0 ** math.floor(math.log10((high - low) / 4))
        step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 7)
        first = math.ceil(low / step)
        return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]

    def _text(self, x: float, y: float, text: str, anchor: str, look: str = "") -> None:
        kind = f' class="{look}"' if look else ""
        self._parts.append(f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, line: Line) -> None:
        """Straight pieces between points; with marks, each point has a dot that says its value."""
        places = [self.at(x, y) for x, y in line.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        title = f"<title>{escape(line.about)}</title>" if line.about else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="var({line.colour})" stroke-width="1.8"{dash}>{title}</path>'
        )
        if line.marks:
            for (x, y), (vx, vy) in zip(places, line.points, strict=True):
                about = escape(f"{line.about}: {vx:g} → {vy:.3g}")
                dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="var({line.colour})">'
                self._parts.append(f"{dot}<title>{about}</title></circle>")

    def point(self, p: Point) -> None:
        """A dot, and its label where no other one is."""
        x, y = self.at(p.x, p.y)
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="var({p.colour})" stroke="var(--paper)">'
            f"<title>{escape(p.about)}</title></circle>"
        )
        width = 6.2 * len(p.label)
        for dx, dy in ((8, 4), (-8 - width, 4), (8, 16), (8, -8), (-8 - width, -8)):
            box = (x + dx, y + dy - 10, x + dx + width, y + dy + 3)
            inside = box[0] > _LEFT and box[2] < self.width - 2 and box[1] > 0 and box[3] < self.height - _BOTTOM
            if p.label and inside and not any(_meet(box, other) for other in self._boxes):
                self._boxes.append(box)
                self._text(x + dx, y + dy, p.label, "start")
                break

    def keep_free(self, points: Sequence[Point]) -> None:
        """No label covers these."""
        for p in points:
            x, y = self.at(p.x, p.y)
            self._boxes.append((x - 5, y - 5, x + 5, y + 5))

    def svg(self) -> str:
        """The element."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img">' + "".join(self._parts) + "</svg>"
        )


def _meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def roofline(points: Sequence[Point], read: float, sgemm: float | None) -> str:
    """Operations per second (10^9) over operations per byte; roofs: `read` 10^9 bytes a second, `sgemm` 10^9
    operations a second where it was measured."""
    low = min(p.x for p in points) / 2
    high = max([p.x for p in points] + ([2 * sgemm / read] if sgemm else [])) * 2
    top = max([p.y for p in points] + ([sgemm] if sgemm else [])) * 2
    bottom = min([p.y for p in points] + [low * read]) / 2
    chart = Chart((low, high), (bottom, top), ("operations per byte read", "GFLOP/s"), log=True)
    ridge = min(high, sgemm / read if sgemm else high, top / read)
    chart.line(Line([(low, low * read), (ridge, ridge * read)], about=f"memory reads {read:.1f} GB/s"))
    if sgemm and sgemm / read < high:
        chart.line(Line([(ridge, sgemm), (high, sgemm)], about=f"sgemm {sgemm:.0f} GFLOP/s"))
    chart.keep_free(points)
    for p in points:
        chart.point(p)
    return chart.svg()


def curves(lines: Sequence[Line], labels: tuple[str, str]) -> str:
    """Lines over a linear axis that begins at 0, values from 0 or 1 up."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    chart = Chart((0, max(*xs, 1)), (0, max(ys) * 1.15), labels, size=(640, 320))
    for line in lines:
        chart.line(line)
    return chart.svg()


def sparkline(values: Sequence[float], about: str) -> str:
    """Values over time, the last one marked."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    places = [(3 + 54 * i / max(1, len(values) - 1), 15 - 12 * (v - low) / span) for i, v in enumerate(values)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    x, y = places[-1]
    return (
        f'<svg width="60" height="18" viewBox="0 0 60 18"><title>{escape(about)}</title>'
        f'<path d="{path}" fill="none" stroke="var(--c0)" stroke-width="1.4"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="var(--c0)"/></svg>'
    )
