"""What is reported row by row, as pure functions of the engine's records: decode steps by batch size, buckets, parity.

A table is a list of rows with the same columns, and has the same name in result.json, in tables/<name>.csv and in
Weights & Biases. A table without a row is left out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from engine.records import GRAPH, EngineRecords, StartupRecord, StepRecord
from experiments.metrics import DECODE, step_durations_s

DECODE_BATCHES, BUCKETS, PARITY = "decode_batches", "buckets", "parity"
Rows = list[dict[str, Any]]


def run_tables(records: EngineRecords, startup: StartupRecord) -> dict[str, Rows]:
    """Every table that these records have."""
    tables = {
        DECODE_BATCHES: decode_batches(records.steps),
        BUCKETS: buckets(records.steps, startup),
        PARITY: [asdict(record) for record in startup.parity],
    }
    return {name: rows for name, rows in tables.items() if rows}


def decode_batches(steps: Sequence[StepRecord]) -> Rows:
    """Decode steps by live batch size and by the way they ran: how many, rows padded in all, and their median time.

    The time is what the step adds to those before it (`step_durations_s`).
    """
    durations_s = defaultdict(list)
    num_padded_rows: dict[tuple[int, str, str, int | None], int] = defaultdict(int)
    for step, duration_s in zip(steps, step_durations_s(steps), strict=True):
        if step.phase == DECODE:
            key = (step.num_requests, step.path, step.reason, step.bucket)
            durations_s[key].append(duration_s)
            num_padded_rows[key] += step.num_padded_rows
    return [{"batch_size": key[0], "path": key[1], "reason": key[2], "bucket": key[3],
             "num_steps": len(durations_s[key]), "num_padded_rows": num_padded_rows[key],
             "step_ms_p50": median(durations_s[key]) * 1e3}
            for key in sorted(durations_s, key=lambda key: (key[0], key[1], key[2], key[3] or 0))]


def buckets(steps: Iterable[StepRecord], startup: StartupRecord) -> Rows:
    """What each captured bucket cost at start-up, and how often it was replayed for how many rows."""
    replays = defaultdict(list)
    for step in steps:
        if step.path == GRAPH:
            replays[step.bucket].append(step)
    return [{**asdict(record),
             "is_disabled": record.batch_size in startup.disabled_buckets,
             "num_replays": len(replays[record.batch_size]),
             "num_live_rows": sum(step.num_requests for step in replays[record.batch_size]),
             "num_padded_rows": sum(step.num_padded_rows for step in replays[record.batch_size])}
            for record in startup.buckets]


def decode_profile(steps: Iterable[StepRecord], startup: StartupRecord) -> dict[str, Rows]:
    """What a later run tunes its bucket list for: decode steps by batch size, and what each bucket cost.

    `replay_ms` and `bytes` (inside the pool and outside it) are None where the device did not report them.
    """
    num_steps = Counter(step.num_requests for step in steps if step.phase == DECODE)
    return {
        "batch_sizes": [{"batch_size": size, "num_steps": num_steps[size]} for size in sorted(num_steps)],
        "buckets": [{"batch_size": record.batch_size, "replay_ms": record.replay_ms,
                     # Bytes outside the pool are a difference of the driver's figures, which may fall meanwhile.
                     "bytes": None if record.num_bytes is None else max(0, record.num_bytes)}
                    for record in startup.buckets],
    }


def steps_by_path(steps: Iterable[StepRecord]) -> dict[str, int]:
    """How many steps took each path for each reason, such as {"graph: captured": 250}; the most frequent first."""
    return dict(Counter(f"{step.path}: {step.reason}" for step in steps).most_common())
