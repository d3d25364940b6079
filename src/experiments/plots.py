"""What a run looked like, as figures. Each function draws one figure from records; one helper saves them all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine.records import RequestRecord, StartupRecord, StepRecord
from engine.units import MIB
from experiments.launch_plots import launch_plots
from experiments.memory_plots import memory_waterfall
from experiments.messages import Finished
from experiments.metrics import latency_samples
from experiments.tables import BUCKETS
from experiments.timeline import time_series

DPI = 120
NUM_BINS = 50
MAX_TICKS = 48  # labels that fit side by side


def steps_over_time(steps: Sequence[StepRecord], startup: StartupRecord) -> Figure:
    """Batch size and waiting requests, KV use, and the share of steps that replayed a graph, over the run's seconds."""
    rows = time_series(steps, startup)
    time_s = [row["time_s"] for row in rows]
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    batch, kv, path = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 1))
    batch.plot(time_s, [row["scheduler/batch_size"] for row in rows])
    batch.set_ylabel("batch size", color="tab:blue")
    batch.set_ylim(bottom=0)
    waiting = batch.twinx()  # thousands may wait where a few run
    waiting.plot(time_s, [row["scheduler/waiting"] for row in rows], color="tab:gray", linestyle="--")
    waiting.set_ylabel("waiting requests", color="tab:gray")
    waiting.set_ylim(0, max(1, 1.05 * max((row["scheduler/waiting"] for row in rows), default=0)))
    for axes in (batch, waiting):
        axes.yaxis.get_major_locator().set_params(integer=True)
    kv.plot(time_s, [row["kv/used_blocks"] / startup.num_kv_blocks * 100 for row in rows], color="tab:green")
    kv.set_ylabel(f"KV blocks used, %\nof {startup.num_kv_blocks:,}")
    kv.set_ylim(bottom=0)
    replayed = [row["graph/replayed_share"] * 100 for row in rows]
    path.fill_between(time_s, replayed, step="mid", color="tab:purple", alpha=0.5)
    path.set_ylabel("replayed, %")
    path.set_ylim(0, 105)
    path.set_xlabel("seconds since the requests arrived")
    return figure


def latency_histograms(requests: Sequence[RequestRecord]) -> Figure:
    """TTFT and inter-token latency, as histograms with their median and 99th percentile."""
    import numpy as np

    samples = latency_samples(requests)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name, title in zip(figure.subplots(1, 2), ("ttft_ms", "itl_ms"), ("TTFT", "ITL"), strict=True):
        axes.set_xlabel(f"{title}, ms")
        axes.set_ylabel("requests" if name == "ttft_ms" else "gaps between tokens")
        if values := samples[name]:
            axes.set_yscale("log")  # the tail is what matters, and is a few of thousands
            # From zero, since requests of one prefill share a TTFT up to rounding.
            axes.hist(values, bins=np.linspace(0, 1.02 * max(values), NUM_BINS + 1).tolist())
            axes.set_ylim(bottom=0.8)
            for percentile, style in ((50, "-"), (99, ":")):
                at = float(np.percentile(values, percentile))
                axes.axvline(at, color="black", linestyle=style, label=f"p{percentile} {at:,.2f} ms")
            axes.legend()
    return figure


def buckets(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """What each captured bucket cost in memory and in start-up time, and how often it was replayed, side by side.

    `rows` are those of the table `buckets`; bytes that the device did not report are drawn as none, and said.
    """
    figure = Figure(figsize=(9, 8), layout="constrained")
    memory, seconds, replays = figure.subplots(3, 1, sharex=True)
    _stack(memory, rows, {"inside the pool": "pool_bytes", "outside torch's allocator": "outside_bytes"}, 1 / MIB)
    is_reported = any(row["pool_bytes"] is not None for row in rows)
    memory.set_ylabel("MiB added" if is_reported else "MiB added\n(not reported here)")
    _stack(seconds, rows, {"warm-up": "warmup_s", "capture": "capture_s"}, 1e3)
    seconds.set_ylabel("ms")
    _stack(replays, rows, {"replays": "num_replays"}, 1)
    replays.set_ylabel("replays")
    replays.set_xlabel("bucket")
    every = -(-len(rows) // MAX_TICKS)
    places = range(0, len(rows), every)
    replays.set_xticks(list(places), [f"{rows[place]['batch_size']}" for place in places], rotation=90)
    return figure


def _stack(axes: Axes, rows: Sequence[Mapping[str, Any]], parts: Mapping[str, str], scale: float) -> None:
    """One bar a row, made of the columns `parts` (label -> column) one on the other; below zero what is negative."""
    above, below = [0.0] * len(rows), [0.0] * len(rows)
    for label, column in parts.items():
        heights = [(row[column] or 0) * scale for row in rows]
        bottoms = [up if height >= 0 else down for height, up, down in zip(heights, above, below, strict=True)]
        axes.bar(range(len(rows)), heights, bottom=bottoms, label=label)
        above = [up + max(height, 0) for up, height in zip(above, heights, strict=True)]
        below = [down + min(height, 0) for down, height in zip(below, heights, strict=True)]
    if len(parts) > 1:
        axes.set_ylim(top=1.3 * max(*above, 1e-9))  # room for the legend
        axes.legend(loc="upper left", ncols=len(parts))


def save_plots(directory: Path, finished: Finished, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Path]:
    """Draw every figure that a run has something for and save it as PNG in `directory`; returns the files."""
    records, startup = finished.records, finished.startup
    figures = {"memory": memory_waterfall(startup.ledger)}
    if records.steps:
        figures["steps"] = steps_over_time(records.steps, startup)
    if records.requests:
        figures["latency"] = latency_histograms(records.requests)
    if rows := tables.get(BUCKETS):
        figures["buckets"] = buckets(rows)
    return save_figures(directory, figures | launch_plots(tables))


def save_figures(directory: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Save each figure as PNG under its name; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=DPI)
    return paths
