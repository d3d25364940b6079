"""The points of a sweep side by side: what differs between them, and what came of it.

A point is a directory below the sweep's with a result.json. Summaries are made from these files alone, so that they can
be made again at any time.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from experiments.metrics import METRICS
from experiments.report import format_value
from experiments.result import RESULT_FILE, RunResult, read_result, write_json
from experiments.run_files import CONFIG_FILE

SUMMARY_SCHEMA_VERSION = 1
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


def write_summary(sweep: Path, points: Sequence[Point]) -> None:
    """Write summary.json and summary.csv: one entry a point, with what differs and every metric."""
    differing = differing_overrides([point.result for point in points])
    rows = [_row(sweep, point, varied) for point, varied in zip(points, differing, strict=True)]
    units = {name: metric.unit for name, metric in METRICS.items() if any(name in row["metrics"] for row in rows)}
    write_json(sweep / "summary.json", {"schema_version": SUMMARY_SCHEMA_VERSION, "sweep": sweep.name, "units": units,
                                        "points": rows})
    flat = [{**{key: row[key] for key in ("directory", "name", "status", "reason")}, **row["differs"], **row["metrics"]}
            for row in rows]
    with (sweep / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for row in flat for key in row)))
        writer.writeheader()
        writer.writerows(flat)


def _row(sweep: Path, point: Point, differs: Mapping[str, str]) -> dict[str, Any]:
    result = point.result
    return {"directory": str(point.directory.relative_to(sweep)), "name": result.name, "status": result.status,
            "reason": result.reason, "differs": dict(differs), "metrics": result.metrics}


def summary_table(sweep: Path, points: Sequence[Point]) -> Table:
    """One row a point: what differs, whether it finished, and the main metrics that any point has."""
    results = [point.result for point in points]
    differing = differing_overrides(results)
    shown = {title: name for title, name in MAIN_METRICS.items() if any(name in result.metrics for result in results)}
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


def _cell(result: RunResult, name: str) -> str:
    unit = METRICS[name].unit
    return format_value(result.metrics.get(name), unit if unit in UNITS_IN_CELLS else "")


def failures(points: Sequence[Point]) -> list[str]:
    """A line for each point that failed: its name, the reason, and where it lies."""
    return [f"{point.result.name} failed: {point.result.reason} ({point.directory})"
            for point in points if not point.result.is_finished]
