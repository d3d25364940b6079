"""The ledger of device memory as a person reads it: in a terminal, and as rows for a file or a dashboard."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from engine.memory.ledger import EMULATED, LEDGER_PARTS, NONE, READY, RUN_PEAK, MemoryLedger
from engine.records import (
    SIZED_BY_DEFAULT,
    SIZED_BY_LIMIT,
    SIZED_BY_REQUEST,
    SIZED_BY_USE,
    StartupRecord,
)
from experiments.formatting import format_value
from experiments.metrics import METRICS

SHOWN_PHASES = {READY: "after start-up", RUN_PEAK: "peak of the run"}
WHOSE = {
    EMULATED: "a CPU stands in for a device: tensors of the start-up are counted, and no context, kernel or graph",
    NONE: "the driver reports no figure for this process",
}
WHY_SO_LARGE = {
    SIZED_BY_LIMIT: "all that the limit leaves",
    SIZED_BY_USE: "more could not be used",
    SIZED_BY_REQUEST: "as stated",
    SIZED_BY_DEFAULT: "the default without a GPU",
}
MEMORY_ROWS = {
    "KV blocks in use, peak": "kv/used_share_peak",
    "live tensors, peak while serving": "memory/peak_bytes",
    "process, peak": "memory/peak_rss_bytes",
    "graphs beyond what was rehearsed": "graph/estimate_error_bytes",
}


def memory_table(metrics: Mapping[str, float], startup: StartupRecord) -> Table:
    """The ledger: each part planned, after start-up and at the peak; the driver's figure; the limit; the KV cache."""
    ledger = startup.ledger
    columns = {title: ledger.phase(name) for name, title in SHOWN_PHASES.items() if name in ledger.phase_names}
    plan = {"planned": ledger.planned} if ledger.planned else {}
    table = Table("Memory", *plan, *columns, box=SIMPLE, caption=WHOSE.get(ledger.source), caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    sides: list[Mapping[str, int]] = [*plan.values(), *(phase.parts for phase in columns.values())]
    for part in LEDGER_PARTS:
        if any(side.get(part) for side in sides):
            table.add_row(part.replace("_", " "), *(format_value(side.get(part), "bytes") for side in sides))
    table.add_section()
    blank = [""] * len(plan)
    sums: dict[str, list[int | None]] = {
        "sum of the parts": [phase.explained_bytes for phase in columns.values()],
        "this process, by its driver": [phase.process_bytes for phase in columns.values()],
        "unexplained": [phase.unexplained_bytes for phase in columns.values()],
        "other processes": [phase.other_bytes for phase in columns.values()],
    }
    for text, values in sums.items():
        if any(value is not None for value in values):
            table.add_row(text, *blank, *(format_value(value, "bytes") for value in values))
    table.add_section()
    last = [""] * (len(table.columns) - 2)
    for text, value in (("limit, kv.memory_fraction of the device", ledger.limit_bytes),
                        ("overrun", ledger.overrun_bytes), ("unused", ledger.unused_bytes)):
        if value is not None:
            table.add_row(text, *last, format_value(value, "bytes"))
    for text, name in MEMORY_ROWS.items():
        if name in metrics:
            table.add_row(text, *last, format_value(metrics[name], METRICS[name].unit))
    table.add_section()
    num_tokens = startup.num_kv_blocks * startup.block_size
    table.add_row("KV tokens", *last, f"{num_tokens:,}")
    table.add_row("in blocks", *last, f"{startup.num_kv_blocks:,} of {startup.block_size:,} tokens")
    table.add_row("requests of model.max_model_len at once", *last, f"{startup.num_full_requests:,}")
    table.add_row("size of the KV cache", *last, Text(WHY_SO_LARGE[startup.kv_sized_by]))
    return table


def ledger_rows(ledger: MemoryLedger) -> list[dict[str, Any]]:
    """One row for each part of each phase, and for what the driver says of the phase."""
    rows: list[dict[str, Any]] = []
    for phase in ledger.phases:
        measured = {**phase.parts, "unexplained": phase.unexplained_bytes, "process": phase.process_bytes,
                    "other_processes": phase.other_bytes}
        rows += [{"phase": phase.phase, "part": part, "planned_bytes": ledger.planned.get(part),
                  "measured_bytes": num_bytes} for part, num_bytes in measured.items()]
    return rows
