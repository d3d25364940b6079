"""What is reported about a run, as pure functions of the engine's records.

`METRICS` is the one table of definitions. A metric's name carries its group before the slash and is the same in
result.json, in tables, in summary.csv and in Weights & Biases. Times of records are host seconds; which zero they count
from does not matter. A metric that a run does not have (no graph, no second token) is left out, never zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.records import GRAPH, RequestRecord, StartupRecord, StepRecord

PREFILL, DECODE = "prefill", "decode"  # StepRecord.phase
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Metric:
    """A unit and a sentence that says what is counted."""

    unit: str
    definition: str


LATENCIES: dict[str, str] = {
    "ttft_ms": "arrival to first token, queueing included, of each request",
    "itl_ms": "every gap between two consecutive tokens of a request",
    "tpot_ms": "(E2E - TTFT) / (output tokens - 1) of each request of more than one output token",
    "e2e_ms": "arrival to last token, of each request",
    "queue_ms": "arrival to first scheduled, of each request",
}
STATISTICS: dict[str, str] = {
    "mean": "mean",
    "std": "standard deviation (of the population)",
    **{f"p{p}": f"{p}th percentile (linear between ranks)" for p in PERCENTILES},
    "max": "maximum",
    "count": "number of values",
}

METRICS: dict[str, Metric] = {
    "throughput/output_throughput": Metric("tokens/s", "output tokens over the duration"),
    "throughput/total_token_throughput": Metric("tokens/s", "prompt and output tokens over the duration"),
    "throughput/request_throughput": Metric("requests/s", "requests that produced a token over the duration"),
    "throughput/duration_s": Metric("s", "first arrival to last token"),
    "throughput/num_output_tokens": Metric("tokens", "output tokens of all requests"),
    "throughput/num_prompt_tokens": Metric("tokens", "prompt tokens of requests that produced a token"),
    "throughput/num_requests": Metric("requests", "requests that produced a token"),
    "throughput/num_failed_requests": Metric("requests", "requests that ended without a token"),
    **{f"latency/{name}_{statistic}": Metric("" if statistic == "count" else "ms", f"{how}: {what}")
       for name, what in LATENCIES.items() for statistic, how in STATISTICS.items()},
    "graph/graph_hit_rate": Metric("share", "decode steps that replayed a graph, of all decode steps"),
    "graph/padding_waste": Metric("share", "(padded - live) / padded rows, over decode steps that replayed a graph"),
    "graph/num_buckets": Metric("buckets", "batch sizes captured"),
    "graph/capture_s": Metric("s", "warm-up and capture of all buckets"),
    "graph/pool_bytes": Metric("bytes", "growth of the graph pool over all captures"),
    "graph/outside_bytes": Metric("bytes", "growth outside torch's allocator over all captures"),
    "scheduler/num_prefill_steps": Metric("steps", "steps that computed prompts"),
    "scheduler/num_decode_steps": Metric("steps", "steps that decoded"),
    **{f"scheduler/{phase}_step_ms_p50": Metric("ms", f"median time that a {phase} step adds: from its scheduling, or "
                                                "from the end of the step before it, to its tokens being read")
       for phase in (DECODE, PREFILL)},
    "scheduler/decode_batch_size_mean": Metric("rows", "live rows of a decode step"),
    "scheduler/num_preemptions": Metric("preemptions", "times that a running request lost its KV blocks"),
    "scheduler/num_recomputed_tokens": Metric("tokens", "tokens computed again after a preemption"),
    "kv/used_blocks_peak": Metric("blocks", "most KV blocks in use at a step"),
    "kv/used_blocks_mean": Metric("blocks", "mean over steps of KV blocks in use"),
    "kv/used_share_peak": Metric("share", "most KV blocks in use, of all"),
    "kv/num_blocks": Metric("blocks", "blocks of the KV cache"),
    "kv/num_prefix_hit_tokens": Metric("tokens", "prompt tokens found in the prefix cache"),
    "kv/prefix_hit_rate": Metric("share", "prompt tokens found in the prefix cache, of all prompt tokens"),
    "kv/num_tokens": Metric("tokens", "tokens that the KV cache holds"),
    "kv/num_full_requests": Metric("requests", "requests of model.max_model_len tokens that fit at once"),
    "graph/num_dropped_buckets": Metric("graphs", "buckets left out for want of memory"),
    "graph/estimate_error_bytes": Metric("bytes", "graphs as measured minus as rehearsed"),
    "memory/overrun_bytes": Metric("bytes", "how far the device's use exceeded kv.memory_fraction of it at most"),
    "memory/unused_bytes": Metric("bytes", "what kv.memory_fraction leaves after start-up beside planned activations"),
    "memory/unexplained_bytes": Metric("bytes", "the driver's figure for the process minus the ledger's parts, in the "
                                                "phase where they differ most"),
    "memory/process_bytes": Metric("bytes", "of this process on the device at its peak, as the driver reports"),
    "memory/other_processes_bytes": Metric("bytes", "in use on the device by other processes, at the peak"),
    "memory/kv_cache_bytes": Metric("bytes", "size of the KV cache"),
    "memory/allocated_bytes": Metric("bytes", "in live tensors at the end, by torch's allocator"),
    "memory/peak_bytes": Metric("bytes", "most in live tensors while serving, by torch's allocator"),
    "memory/device_used_bytes": Metric("bytes", "in use on the device at the end, as its driver reports"),
    "memory/rss_bytes": Metric("bytes", "resident memory of the process at the end"),
    "memory/peak_rss_bytes": Metric("bytes", "most resident memory of the process"),
    "startup/total_s": Metric("s", "start-up of the engine, all parts"),
}


def compute_metrics(steps: Sequence[StepRecord], requests: Sequence[RequestRecord], startup: StartupRecord,
                    memory: Mapping[str, int]) -> dict[str, float]:
    """Every metric that these records have, by the names of `METRICS`."""
    values = {
        **graph_metrics(steps, startup),
        **(served_metrics(steps, requests) if requests else {}),
        **kv_metrics(steps, requests, startup),
        **ledger_metrics(startup),
        "startup/total_s": startup.total_s,
        "memory/kv_cache_bytes": startup.kv_bytes,
        **{name: value for key, value in memory.items() if (name := f"memory/{key}") in METRICS},
    }
    assert values.keys() <= METRICS.keys(), f"without a definition: {values.keys() - METRICS.keys()}"
    return values


def ledger_metrics(startup: StartupRecord) -> dict[str, float]:
    """What the ledger comes to; figures that the device does not report are left out."""
    ledger = startup.ledger
    values = {
        "kv/num_tokens": startup.num_kv_blocks * startup.block_size,
        "kv/num_full_requests": startup.num_full_requests,
        "graph/num_dropped_buckets": len(startup.dropped_buckets),
        "graph/estimate_error_bytes": startup.kv_estimate_error_bytes,
        "memory/overrun_bytes": ledger.overrun_bytes,
        "memory/unused_bytes": ledger.unused_bytes,
        "memory/unexplained_bytes": ledger.unexplained_bytes,
        "memory/process_bytes": ledger.last.process_bytes,
        "memory/other_processes_bytes": ledger.last.other_bytes,
    }
    return {name: value for name, value in values.items() if value is not None}


def served_metrics(steps: Sequence[StepRecord], requests: Sequence[RequestRecord]) -> dict[str, float]:
    """What only a run has that was sent requests: throughput, latencies, the scheduler's counts."""
    return {
        **throughput(requests),
        **{f"latency/{name}_{statistic}": value for name, samples in latency_samples(requests).items()
           for statistic, value in summarise(samples).items()},
        **scheduler_metrics(steps, requests),
    }


def ttft_ms(request: RequestRecord) -> float | None:
    """Milliseconds from arrival to the first token, queueing included; None for a request without a token."""
    return (request.token_times_s[0] - request.arrival_s) * 1e3 if request.token_times_s else None


def e2e_ms(request: RequestRecord) -> float | None:
    """Milliseconds from arrival to the last token; None for a request without a token."""
    return (request.token_times_s[-1] - request.arrival_s) * 1e3 if request.token_times_s else None


def itl_ms(request: RequestRecord) -> list[float]:
    """Milliseconds of every gap between two consecutive tokens."""
    times = request.token_times_s
    return [(later - earlier) * 1e3 for earlier, later in pairwise(times)]


def tpot_ms(request: RequestRecord) -> float | None:
    """Mean milliseconds per output token after the first; None for a request of at most one token.

    (E2E - TTFT) / (output tokens - 1): queueing and prefill are left out.
    """
    times = request.token_times_s
    return (times[-1] - times[0]) * 1e3 / (len(times) - 1) if len(times) > 1 else None


def queue_ms(request: RequestRecord) -> float | None:
    """Milliseconds from arrival until first scheduled; None for a request that never was."""
    return None if request.first_scheduled_s is None else (request.first_scheduled_s - request.arrival_s) * 1e3


def latency_samples(requests: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """The values behind each latency of `LATENCIES`, in milliseconds."""
    single = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms, "queue_ms": queue_ms}
    samples = {name: [value for request in requests if (value := measure(request)) is not None]
               for name, measure in single.items()}
    samples["itl_ms"] = [gap for request in requests for gap in itl_ms(request)]
    return {name: samples[name] for name in LATENCIES}


def summarise(samples: Sequence[float]) -> dict[str, float]:
    """The statistics of `STATISTICS`; only the count where there is no value."""
    if not samples:
        return {"count": 0}
    values = np.asarray(samples, dtype=np.float64)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        **{f"p{percentile}": float(np.percentile(values, percentile)) for percentile in PERCENTILES},
        "max": float(values.max()),
        "count": len(values),
    }


def throughput(requests: Sequence[RequestRecord]) -> dict[str, float]:
    """Tokens and requests over the time from the first arrival to the last token."""
    served = [request for request in requests if request.token_times_s]
    counts: dict[str, float] = {
        "throughput/num_requests": len(served),
        "throughput/num_failed_requests": len(requests) - len(served),
        "throughput/num_prompt_tokens": sum(request.num_prompt_tokens for request in served),
        "throughput/num_output_tokens": sum(request.num_output_tokens for request in served),
    }
    if not served:
        return counts
    duration_s = max(request.token_times_s[-1] for request in served) - min(request.arrival_s for request in served)
    if duration_s <= 0:
        return counts
    num_output = counts["throughput/num_output_tokens"]
    return {
        "throughput/output_throughput": num_output / duration_s,
        "throughput/total_token_throughput": (counts["throughput/num_prompt_tokens"] + num_output) / duration_s,
        "throughput/request_throughput": len(served) / duration_s,
        "throughput/duration_s": duration_s,
        **counts,
    }


def graph_metrics(steps: Sequence[StepRecord], startup: StartupRecord) -> dict[str, float]:
    """Hit rate, padding waste and what the captures cost."""
    buckets = startup.buckets
    values: dict[str, float] = {"graph/num_buckets": len(buckets)}
    if buckets:
        values["graph/capture_s"] = sum(bucket.warmup_s + bucket.capture_s for bucket in buckets)
    for name in ("pool_bytes", "outside_bytes"):
        known = [size for bucket in buckets if (size := getattr(bucket, name)) is not None]
        if known:
            values[f"graph/{name}"] = sum(known)
    decode = [step for step in steps if step.phase == DECODE]
    if decode:
        replayed = [step for step in decode if step.path == GRAPH]
        values["graph/graph_hit_rate"] = len(replayed) / len(decode)
        if replayed:
            padding = sum(step.num_padded_rows for step in replayed)
            values["graph/padding_waste"] = padding / (padding + sum(step.num_requests for step in replayed))
    return values


def step_durations_s(steps: Sequence[StepRecord]) -> list[float]:
    """Seconds that each step adds to those before it.

    Steps overlap when the host runs ahead; counted from its scheduling, each would then hold its predecessor's end too.
    """
    return [step.end_s - max(step.start_s, steps[index - 1].end_s if index else step.start_s)
            for index, step in enumerate(steps)]


def scheduler_metrics(steps: Sequence[StepRecord], requests: Sequence[RequestRecord]) -> dict[str, float]:
    """How many steps there were, how long they took, and what preemption cost."""
    values: dict[str, float] = {
        "scheduler/num_preemptions": sum(request.num_preemptions for request in requests),
        "scheduler/num_recomputed_tokens": sum(request.num_recomputed_tokens for request in requests),
    }
    durations_s = step_durations_s(steps)
    for phase in (PREFILL, DECODE):
        of_phase = [step for step in steps if step.phase == phase]
        values[f"scheduler/num_{phase}_steps"] = len(of_phase)
        if of_phase:
            median_s = np.median([s for s, step in zip(durations_s, steps, strict=True) if step.phase == phase])
            values[f"scheduler/{phase}_step_ms_p50"] = float(median_s) * 1e3
            if phase == DECODE:
                values["scheduler/decode_batch_size_mean"] = float(np.mean([step.num_requests for step in of_phase]))
    return values


def kv_metrics(steps: Sequence[StepRecord], requests: Sequence[RequestRecord],
               startup: StartupRecord) -> dict[str, float]:
    """Use of the KV cache and of its cached prefixes."""
    values: dict[str, float] = {"kv/num_blocks": startup.num_kv_blocks}
    if requests:
        values["kv/num_prefix_hit_tokens"] = sum(request.num_cached_tokens for request in requests)
    if num_prompt_tokens := sum(request.num_prompt_tokens for request in requests):
        values["kv/prefix_hit_rate"] = values["kv/num_prefix_hit_tokens"] / num_prompt_tokens
    if steps:
        peak = max(step.num_used_blocks for step in steps)
        values |= {"kv/used_blocks_peak": peak, "kv/used_share_peak": peak / startup.num_kv_blocks,
                   "kv/used_blocks_mean": float(np.mean([step.num_used_blocks for step in steps]))}
    return values
