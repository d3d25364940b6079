"""The points of a sweep side by side: what differs between them, and what came of it.

A point is a directory below the sweep's with a result.json. Summaries are made from these files alone, so that they can
be made again at any time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from experiments.formatting import format_value
from experiments.launch_model import MODEL_TABLE
from experiments.metrics import METRICS
from experiments.paths import PLOTS_DIRECTORY
from experiments.result import RESULT_FILE, RunResult, read_result, write_csv, write_json
from experiments.run_files import CONFIG_FILE
from experiments.tables import DECODE_BATCHES

SUMMARY_SCHEMA_VERSION = 1
MAX_LABEL_CHARS = 60
MEMORY_METRICS = {  # where settings of the KV cache differ
    "KV tokens": "kv/num_tokens",
    "overrun": "memory/overrun_bytes",
    "unused": "memory/unused_bytes",
    "rehearsal's error": "graph/estimate_error_bytes",
    "unexplained": "memory/unexplained_bytes",
}
MAIN_METRICS = {
    "tokens/s": "throughput/output_throughput",
    "TTFT p50 ms": "latency/ttft_ms_p50",
    "ITL p99 ms": "latency/itl_ms_p99",
    "decode step ms": "scheduler/decode_step_ms_p50",
    "replayed": "graph/graph_hit_rate",
    "padding": "graph/padding_waste",
    "KV cache": "memory/kv_cache_bytes",
    "peak": "memory/peak_bytes",
    "peak RSS": "memory/peak_rss_bytes",
    "start-up s": "startup/total_s",
}
UNITS_IN_CELLS = ("bytes", "share")  # the unit of a size varies with the size; that of the others stands in the heading


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    directory: Path
    result: RunResult


def collect(sweep: Path) -> tuple[list[Point], list[Path]]:
    """The points of a sweep in the order in which they ran, and the directories of runs that left no result.

    ValueError names a result.json that cannot be read.
    """
    runs = sorted(path.parent for path in sweep.glob(f"*/{CONFIG_FILE}"))
    points = [Point(run, read_result(run)) for run in runs if (run / RESULT_FILE).is_file()]
    points.sort(key=lambda point: point.result.started_at)
    return points, [run for run in runs if not (run / RESULT_FILE).is_file()]


def differing_overrides(results: Sequence[RunResult]) -> list[dict[str, str]]:
    """For each result, the overrides that are not the same in all of them; an absent one is `default`."""
    overrides = [dict(override.lstrip("+~").partition("=")[::2] for override in result.overrides) for result in results]
    keys = dict.fromkeys(key for each in overrides for key in each)
    values = [{key: each.get(key, "default") for key in keys} for each in overrides]
    differing = [key for key in keys if len({each[key] for each in values}) > 1]
    return [{key: each[key] for key in differing} for each in values]


def labels(results: Sequence[RunResult]) -> list[str]:
    """A short text for each result that tells it from the others: what differs, or its name if nothing does."""
    texts = [", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in differs.items()) or result.name
             for result, differs in zip(results, differing_overrides(results), strict=True)]
    texts = [text if len(text) <= MAX_LABEL_CHARS else text[:MAX_LABEL_CHARS - 1] + "…" for text in texts]
    is_unique = len(set(texts)) == len(texts)
    return texts if is_unique else [f"{number}: {text}" for number, text in enumerate(texts)]


def decode_step_ms(result: RunResult) -> dict[int, float]:
    """Median decode step by batch size of a run of workload=ladder; empty for others.

    A batch size that ran in more than one way counts by the one that most of its steps took.
    """
    workload = result.config.get("workload", {})
    if workload.get("kind") != "ladder":
        return {}
    rows = sorted(result.tables.get(DECODE_BATCHES, []), key=lambda row: row["num_steps"])
    steps_ms = {row["batch_size"]: row["step_ms_p50"] for row in rows}
    return {size: steps_ms[size] for size in sorted(set(workload["batch_sizes"])) if size in steps_ms}


def graph_speedup(result: RunResult) -> dict[int, float]:
    """Measured speed-up of the decode step by its graph, by batch size; empty but for launch_overhead on a GPU."""
    rows = result.tables.get(MODEL_TABLE, [])
    return {row["batch_size"]: row["speedup"] for row in rows if row["speedup"] is not None}


# What a sweep may have by batch size: file name -> title, and the values of one result.
BY_BATCH_SIZE: dict[str, tuple[str, Callable[[RunResult], dict[int, float]]]] = {
    "decode": ("decode step, ms", decode_step_ms),
    "speedup": ("decode step: eager over graph", graph_speedup),
}


def write_summary(sweep: Path, points: Sequence[Point]) -> None:
    """Write summary.json and summary.csv, one entry a point with what differs and every metric; and the plots."""
    differing = differing_overrides([point.result for point in points])
    rows = [_row(sweep, point, varied) for point, varied in zip(points, differing, strict=True)]
    units = {name: metric.unit for name, metric in METRICS.items() if any(name in row["metrics"] for row in rows)}
    write_json(sweep / "summary.json", {"schema_version": SUMMARY_SCHEMA_VERSION, "sweep": sweep.name, "units": units,
                                        "points": rows})
    flat = [{**{key: row[key] for key in ("directory", "name", "status", "reason")}, **row["differs"], **row["metrics"]}
            for row in rows]
    write_csv(sweep / "summary.csv", flat)
    _save_plots(sweep / PLOTS_DIRECTORY, [point.result for point in points])


def _save_plots(directory: Path, results: Sequence[RunResult]) -> None:
    """Write summary.png, and a figure for what the points have by batch size."""
    from experiments import sweep_plots
    from experiments.plots import save_figures

    if not (shown := shown_metrics(results)):
        return
    names = labels(results)
    figures = {"summary": sweep_plots.metric_bars(
        names, {title: (METRICS[name].unit, [result.metrics.get(name) for result in results])
                for title, name in shown.items()})}
    for file, (title, values_of) in BY_BATCH_SIZE.items():
        series = {name: values for name, result in zip(names, results, strict=True) if (values := values_of(result))}
        if series:
            figures[file] = sweep_plots.batch_size_lines(title, series)
    save_figures(directory, figures)


def _row(sweep: Path, point: Point, differs: Mapping[str, str]) -> dict[str, Any]:
    result = point.result
    return {"directory": str(point.directory.relative_to(sweep)), "name": result.name, "status": result.status,
            "reason": result.reason, "differs": dict(differs), "metrics": result.metrics,
            "by_batch_size": {name: values for name, (_, values_of) in BY_BATCH_SIZE.items()
                              if (values := values_of(result))}}


def shown_metrics(results: Sequence[RunResult]) -> dict[str, str]:
    """Those main metrics, title -> name, that any result has; and those of memory where the KV cache was varied."""
    differing = differing_overrides(results)
    is_about_memory = any(key.partition(".")[0] == "kv" for differs in differing[:1] for key in differs)
    metrics = {**MAIN_METRICS, **(MEMORY_METRICS if is_about_memory else {})}
    return {title: name for title, name in metrics.items() if any(name in result.metrics for result in results)}


def summary_table(sweep: Path, points: Sequence[Point]) -> Table:
    """One row a point: what differs, whether it finished, and the main metrics that any point has."""
    results = [point.result for point in points]
    differing = differing_overrides(results)
    shown = shown_metrics(results)
    num_failed = sum(not result.is_finished for result in results)
    table = Table(title=f"{sweep.name}: {len(points)} runs, {num_failed} failed", title_justify="left", box=SIMPLE,
                  padding=0, pad_edge=False)
    for key in differing[0] if differing else ():
        table.add_column(key.rpartition(".")[2], overflow="fold")
    table.add_column("status")
    for title in shown:
        table.add_column(title, justify="right")
    for result, differs in zip(results, differing, strict=True):
        status = Text(result.status, style="" if result.is_finished else "red")
        table.add_row(*map(Text, differs.values()), status, *(_cell(result, name) for name in shown.values()))
    return table


def batch_tables(points: Sequence[Point]) -> list[Table]:
    """What was measured by batch size: one row a point, one column a size. No table for what no point has."""
    results = [point.result for point in points]
    tables = []
    for title, values_of in BY_BATCH_SIZE.values():
        series = [values_of(result) for result in results]
        if not any(series):
            continue
        sizes = sorted({size for values in series for size in values})
        table = Table(f"{title}, by batch size", box=SIMPLE, pad_edge=False)
        for size in sizes:
            table.add_column(f"{size:,}", justify="right")
        for label, values in zip(labels(results), series, strict=True):
            table.add_row(Text(label), *(format_value(values.get(size), "") for size in sizes))
        tables.append(table)
    return tables


def _cell(result: RunResult, name: str) -> str:
    unit = METRICS[name].unit
    return format_value(result.metrics.get(name), unit if unit in UNITS_IN_CELLS else "")


def failures(points: Sequence[Point]) -> list[str]:
    """A line for each point that failed: its name, the reason, and where it lies."""
    return [f"{point.result.name} failed: {point.result.reason} ({point.directory})"
            for point in points if not point.result.is_finished]
