"""A sweep as figures: its points side by side, and one line a point where something was measured by batch size."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from engine.units import MIB

NUM_COLUMNS = 3
POINT_INCHES = 0.32
MAX_INCHES = 50.0  # of height; more points than that fit are drawn thinner


def metric_bars(labels: Sequence[str], metrics: Mapping[str, tuple[str, Sequence[float | None]]]) -> Figure:
    """Horizontal bars of each metric, title -> (unit, one value a point); a point without the value has none.

    Points are labelled once, at the left of each row of metrics.
    """
    num_rows = -(-len(metrics) // NUM_COLUMNS)
    height = min(MAX_INCHES, num_rows * (1.0 + POINT_INCHES * len(labels)))
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False, sharey=True)
    places = range(len(labels))
    for axes, (title, (unit, values)) in zip(grid.flat, metrics.items(), strict=False):
        scale, suffix = {"bytes": (1 / MIB, ", MiB"), "share": (100.0, ", %")}.get(unit, (1.0, ""))
        shown = [(place, value * scale) for place, value in zip(places, values, strict=True) if value is not None]
        bars = axes.barh([place for place, _ in shown], [value for _, value in shown], 0.7)
        axes.bar_label(bars, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for _, value in shown], padding=3)
        axes.set_title(title + suffix, fontsize="medium")
        axes.margins(x=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_yticks(list(places), labels)
    grid[0, 0].invert_yaxis()  # shared: the first point on top everywhere
    for axes in grid.flat[len(metrics):]:
        axes.set_visible(False)
    return figure


def batch_size_lines(title: str, series: Mapping[str, Mapping[int, float]]) -> Figure:
    """Something by batch size, one line a point: label -> {batch size: value}."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for label, values in series.items():
        axes.plot(list(values), list(values.values()), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel(title)
    axes.legend(fontsize="small")
    return figure
