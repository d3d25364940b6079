"""A run over time, thin enough to plot and to log: consecutive steps are gathered into at most `max_points` points."""

from collections.abc import Sequence

from engine.records import GRAPH, StartupRecord, StepRecord
from experiments.metrics import step_durations_s

MAX_POINTS = 500


def time_series(steps: Sequence[StepRecord], startup: StartupRecord, start_s: float = 0.0,
                max_points: int = MAX_POINTS) -> list[dict[str, float]]:
    """One row for each group of consecutive steps: means over the group, and tokens per second across it.

    `time_s` is when the group's last token was read, counted from `start_s`. Every live row of a step yields one token.
    """
    size = -(-len(steps) // max_points) if steps else 1
    durations_s = step_durations_s(steps)
    rows = []
    before_s = start_s
    for first in range(0, len(steps), size):
        group = steps[first:first + size]
        end_s = max(step.end_s for step in group)
        rows.append({"step": group[-1].step, "time_s": end_s - start_s, **_point(group, end_s - before_s, startup),
                     "latency/step_ms": sum(durations_s[first:first + size]) / len(group) * 1e3})
        before_s = end_s
    return rows


def _point(group: Sequence[StepRecord], duration_s: float, startup: StartupRecord) -> dict[str, float]:
    """What one group of steps looked like."""
    num = len(group)
    used_blocks = sum(step.num_used_blocks for step in group) / num
    point = {
        "scheduler/batch_size": sum(step.num_requests for step in group) / num,
        "scheduler/waiting": sum(step.num_waiting for step in group) / num,
        "scheduler/preempted": sum(step.num_preempted for step in group),
        "kv/used_blocks": used_blocks,
        "kv/cached_blocks": sum(step.num_cached_blocks for step in group) / num,
        "graph/padded_rows": sum(step.num_padded_rows for step in group) / num,
        "graph/replayed_share": sum(step.path == GRAPH for step in group) / num,
        "memory/kv_used_bytes": used_blocks * startup.block_size * startup.kv_bytes_per_token,
    }
    if duration_s > 0:
        point["throughput/output_tokens_per_s"] = sum(step.num_requests for step in group) / duration_s
    return point
