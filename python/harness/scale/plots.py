"""SVG pictures of `series`, with matplotlib (the extra [report])."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from harness.scale.context import Context
from harness.scale.series import PLOTS, Plot
from harness.scale.values import ScaleError

DIGEST = "data sha256 "


def require() -> None:
    """Raises ScaleError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ScaleError("plots need matplotlib: pip install 'kdtree-engine[report]'") from error


def write(context: Context, folder: Path) -> list[Path]:
    """Every plot as FOLDER/NAME.svg, each with the digest of its data inside. Raises ScaleError without matplotlib."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, series in PLOTS.items():
        path = folder / f"scale_{name}.svg"
        _draw(series(context), path)
        written.append(path)
    return written


def _draw(plot: Plot, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # text stays text and names of elements depend on nothing, so that files are small and change only with their data
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "kdtree-engine", "font.size": 9.0}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        colours: dict[str, str] = {}
        for curve in plot.curves:
            family = curve.label.split(", ")[0]
            colour = colours.setdefault(family, f"C{len(colours)}")
            style = "none" if curve.points else ("--" if curve.dashed else "-")
            marker, size = ("D", 5) if curve.points else ("o", 3)
            axes.plot(
                curve.x, curve.y, linestyle=style, marker=marker, markersize=size, color=colour, label=curve.label
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in plot.curves for x in curve.x if math.log2(x).is_integer()})
        axes.set_xticks(ticks, [f"{int(x)}" for x in ticks])
        axes.set_ylim(bottom=0)
        axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7.5, frameon=False)
        figure.savefig(path, metadata={"Date": None, "Description": DIGEST + plot.digest()})
        pyplot.close(figure)
