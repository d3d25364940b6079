"""What a person reads after a run: tables for the terminal. Nothing is computed here that the result does not hold."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from engine.records import ParityRecord, StartupRecord
from experiments.formatting import format_value
from experiments.memory_report import memory_table
from experiments.messages import Answer, Failed, Finished, Outcome
from experiments.metrics import LATENCIES, METRICS
from experiments.result import RunResult
from experiments.run_files import ERROR_FILE, OUTPUTS_FILE, TABLES_DIRECTORY
from experiments.tables import DECODE_BATCHES

LABEL_CHARS, ANSWER_CHARS = 44, 70
MAX_ANSWERS = MAX_ROWS = 32
LATENCY_COLUMNS = ("mean", "p50", "p90", "p99", "max")
THROUGHPUT_ROWS = {
    "output tokens a second": "throughput/output_throughput",
    "prompt and output tokens a second": "throughput/total_token_throughput",
    "requests a second": "throughput/request_throughput",
    "duration": "throughput/duration_s",
    "requests served": "throughput/num_requests",
    "requests without a token": "throughput/num_failed_requests",
    "output tokens": "throughput/num_output_tokens",
    "prompt tokens": "throughput/num_prompt_tokens",
    "of these from the prefix cache": "kv/num_prefix_hit_tokens",
    "decode step, median": "scheduler/decode_step_ms_p50",
    "decode batch size, mean": "scheduler/decode_batch_size_mean",
    "decode steps replayed from a graph": "graph/graph_hit_rate",
    "padding waste of replayed steps": "graph/padding_waste",
    "preemptions": "scheduler/num_preemptions",
}
GRAPH_ROWS = {
    "warm-up and capture": "graph/capture_s",
    "bytes inside the pool": "graph/pool_bytes",
    "bytes outside torch's allocator": "graph/outside_bytes",
}


def print_run(console: Console, result: RunResult, outcome: Outcome, directory: Path) -> None:
    """Print what a run came to: answers, tables, warnings and where its files lie; or why it failed."""
    if isinstance(outcome, Finished):
        for part in finished_parts(result, outcome):
            console.print(part)
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    if not result.is_finished:
        console.print(Text(f"{result.name} failed: {result.reason}", style="bold red"), soft_wrap=True)
    for line in location_lines(result, outcome, directory):
        console.print(Text(line), soft_wrap=True)


def finished_parts(result: RunResult, finished: Finished) -> list[RenderableType]:
    """The tables of a finished run, in the order in which they are read."""
    parts: list[RenderableType] = []
    if any(answer.text for answer in finished.answers):
        parts.append(answers_table(finished.answers))
    parts += [metrics_table("Throughput", result, THROUGHPUT_ROWS), latency_table(result)] if finished.answers else []
    parts += [memory_table(result.metrics, finished.startup), startup_table(finished.startup)]
    parts += [graphs_table(result, finished.startup)] if finished.startup.buckets else []
    parts += [rows_table(name, rows) for name, rows in result.tables.items()
              if rows and (name in finished.tables or (name == DECODE_BATCHES and is_ladder(result)))]
    return [*parts, *map(Text, result.notes)]


def is_ladder(result: RunResult) -> bool:
    """Whether the run is about decode steps by batch size."""
    return result.config.get("workload", {}).get("kind") == "ladder"


def answers_table(answers: Sequence[Answer]) -> Table:
    """The first line of each answer beside its prompt."""
    table = Table("", "prompt", "answer", "ended", box=SIMPLE)
    for column in table.columns[1:3]:
        column.no_wrap = True
    for number, answer in enumerate(answers[:MAX_ANSWERS]):
        said = Text(answer.error, "red", no_wrap=False) if answer.error else Text(first_line(answer.text, ANSWER_CHARS))
        table.add_row(str(number), Text(first_line(answer.label, LABEL_CHARS)), said, answer.finish_reason)
    if (num_more := len(answers) - MAX_ANSWERS) > 0:
        table.add_row("", f"and {num_more} more in {OUTPUTS_FILE}", "", "")
    return table


def first_line(text: str, max_chars: int) -> str:
    """The first line that is not blank, cut with an ellipsis where the text goes on."""
    lines = text.strip().splitlines() or [""]
    line = lines[0].strip()
    is_whole = len(lines) == 1 and len(line) <= max_chars
    return line if is_whole else line[:max_chars - 1].rstrip() + "…"


def metrics_table(title: str, result: RunResult, rows: dict[str, str]) -> Table:
    """Those of `rows` (text -> metric) that the run has."""
    table = _table(title)
    _add_metrics(table, result, rows)
    return table


def latency_table(result: RunResult) -> Table:
    """Statistics of each latency in milliseconds; latencies without a value are left out."""
    table = Table("Latency, ms", *LATENCY_COLUMNS, box=SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in LATENCIES:
        values = [result.metrics.get(f"latency/{name}_{column}") for column in LATENCY_COLUMNS]
        if any(value is not None for value in values):
            table.add_row(name.removesuffix("_ms").upper(), *(format_value(value, "") for value in values))
    return table


def startup_table(startup: StartupRecord) -> Table:
    """Seconds of each part of start-up, and what every `auto` became."""
    table = Table("Start-up", "", box=SIMPLE)
    for verb, seconds in startup.seconds.items():
        table.add_row(verb.replace("_", " "), format_value(seconds, "s"))
    table.add_section()
    table.add_row("hardware", Text(f"{startup.device_name}, {startup.dtype}"))
    table.add_row("kernels", f"attention {startup.attention}, ops {startup.ops}, sampler {startup.sampler}")
    for setting, choice in startup.choices.items():
        table.add_row(setting, Text(choice))
    return table


def graphs_table(result: RunResult, startup: StartupRecord) -> Table:
    """What was captured and what that cost, the parity check, and how many steps ran in which way."""
    smallest, largest = startup.buckets[0], startup.buckets[-1]
    table = Table("Graphs", "", box=SIMPLE)
    sizes = f"{smallest.batch_size:,}" if smallest is largest else f"{smallest.batch_size:,} to {largest.batch_size:,}"
    table.add_row("buckets", f"{len(startup.buckets)}: {sizes}")
    table.add_row("what they record", f"{startup.scope}, replay {startup.replay}")
    table.add_row("captured", order_text(startup.capture_order))
    _add_metrics(table, result, GRAPH_ROWS)
    if smallest.num_kernels is not None and largest.num_kernels is not None:
        table.add_row("kernels in a replay", f"{smallest.num_kernels:,} of the smallest, {largest.num_kernels:,} of "
                                             f"the largest bucket")
    if startup.parity:
        table.add_row("parity with eager", parity_text(startup.parity))
    for why, lost in (("disabled", startup.disabled_buckets), ("dropped for want of memory", startup.dropped_buckets)):
        if lost:
            table.add_row(why, Text(", ".join(map(str, lost)), style="red"))
    table.add_section()
    for way, count in result.steps_by_path.items():
        table.add_row(f"steps, {way.replace('_', ' ')}", f"{count:,}")
    return table


def order_text(sizes: Sequence[int]) -> str:
    """The order of some captured sizes in words, or by its first sizes where no word fits."""
    if list(sizes) == sorted(sizes):
        return "smallest first"
    if list(sizes) == sorted(sizes, reverse=True):
        return "largest first"
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "")


def parity_text(parity: Sequence[ParityRecord]) -> str:
    """How many batches were compared, and how much they differ at most."""
    num_failed = sum(not record.passed for record in parity)
    known = [record.max_difference for record in parity if record.max_difference is not None]
    worst = max(known, default=0.0)
    difference = "equal bit for bit" if len(known) == len(parity) and worst == 0 else f"largest difference {worst:.3g}"
    if len(known) < len(parity):
        difference += f", {len(parity) - len(known)} not finite"
    return f"{len(parity)} batches compared, {num_failed} failed, {difference}"


def rows_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The first rows of a table with named columns."""
    table = Table(title=name.replace("_", " "), title_justify="left", box=SIMPLE)
    for column in rows[0]:
        is_text = any(isinstance(row[column], str) for row in rows)
        table.add_column(column.replace("_", " "), justify="left" if is_text else "right")
    for row in rows[:MAX_ROWS]:
        table.add_row(*(Text(_cell(column, value)) for column, value in row.items()))
    if (num_more := len(rows) - MAX_ROWS) > 0:
        table.caption = f"and {num_more} more in {TABLES_DIRECTORY}/{name}.csv"
    return table


def _cell(column: str, value: Any) -> str:
    if column.endswith("_bytes") and isinstance(value, int):
        return format_value(value, "bytes")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def location_lines(result: RunResult, outcome: Outcome, directory: Path) -> Iterable[str]:
    """Where the run's files lie; the traceback is left out where the reason says it all."""
    yield f"files:  {directory}"
    if isinstance(outcome, Failed) and outcome.traceback:
        yield f"error:  {directory / ERROR_FILE}"
    if result.tracker:
        yield f"wandb:  {result.tracker['location']} ({result.tracker['mode']}: {result.tracker['why']})"


def _table(title: str) -> Table:
    table = Table(title, "", box=SIMPLE)
    table.columns[1].justify = "right"
    return table


def _add_metrics(table: Table, result: RunResult, rows: dict[str, str]) -> None:
    for text, name in rows.items():
        if name in result.metrics:
            table.add_row(text, format_value(result.metrics[name], METRICS[name].unit))
