"""The launch model as figures, drawn from its tables: predicted beside measured, and host against GPU time."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.launch_model import MODEL_TABLE, PREFILL_TABLE

Rows = Sequence[Mapping[str, Any]]
# Column -> its name in the legend, and how its line is drawn; one colour a path.
DECODE_LINES = {
    "eager_predicted_ms": ("eager, predicted", {"color": "tab:red", "linestyle": "--"}),
    "eager_ms": ("eager", {"color": "tab:red", "marker": "o"}),
    "eager_host_ms": ("eager, host until launched", {"color": "tab:red", "linestyle": ":"}),
    "graph_predicted_ms": ("graph, predicted", {"color": "tab:blue", "linestyle": "--"}),
    "graph_ms": ("graph", {"color": "tab:blue", "marker": "o"}),
}
PREFILL_LINES = {
    "host_ms": ("host until launched", {"color": "tab:red", "marker": "o"}),
    "compute_ms": ("kernels", {"color": "tab:blue", "marker": "o"}),
    "total_ms": ("to the end, from an idle start", {"color": "tab:gray", "linestyle": "--"}),
}


def launch_plots(tables: Mapping[str, Rows]) -> dict[str, Figure]:
    """A figure for each table of the launch model that is there: `launch_model`, `prefill_launches`."""
    figures = {}
    if rows := tables.get(MODEL_TABLE):
        figures[MODEL_TABLE] = launch_model(rows)
    if rows := tables.get(PREFILL_TABLE):
        figures[PREFILL_TABLE] = prefill_launches(rows)
    return figures


def launch_model(rows: Rows) -> Figure:
    """Step times by batch size, predicted and measured, and the speed-up by the graph."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    times, speedups = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw(times, rows, "batch_size", DECODE_LINES)
    times.set_ylabel("decode step, ms")
    lines = {"speedup_predicted": ("predicted", {"color": "tab:gray", "linestyle": "--"}),
             "speedup": ("measured", {"color": "black", "marker": "o"})}
    _draw(speedups, rows, "batch_size", lines)
    speedups.set_ylabel("eager over graph")
    for axes in (times, speedups):
        axes.set_xlabel("batch size")
        axes.set_ylim(bottom=0)
    return figure


def prefill_launches(rows: Rows) -> Figure:
    """Host and GPU time by prompt length: where the lines cross, launching stops to matter."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    _draw(axes, rows, "num_tokens", PREFILL_LINES)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("prefill, ms")
    return figure


def _draw(axes: Axes, rows: Rows, x: str, lines: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """One line for each column that has values; sizes double from tick to tick."""
    for column, (label, style) in lines.items():
        points = [(row[x], row[column]) for row in rows if row[column] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if axes.lines:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False, fontsize="small")
