"""Records of a small run, made by hand: what an engine would have emitted."""

from engine.config import Architecture, ModelConfig
from engine.memory.ledger import LEDGER_PARTS, LedgerPhase, MemoryLedger
from engine.records import BucketRecord, EngineRecords, RequestRecord, StartupRecord, StepRecord
from experiments.config import Config, RunConfig, TrackerConfig, WorkloadConfig
from experiments.messages import Answer, Finished, Progress
from experiments.metrics import compute_metrics
from experiments.result import RunResult
from experiments.tables import run_tables, steps_by_path

MIB = 1 << 20


def make_config(**sections) -> Config:
    """A run of a tiny model whose tracker is off; `sections` replace whole sections."""
    architecture = Architecture(family="llama", vocab_size=512, hidden_size=64, intermediate_size=128,
                                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                max_position_embeddings=4096)
    defaults = {"model": ModelConfig(name="tiny", architecture=architecture), "workload": WorkloadConfig(kind="fixed"),
                "tracker": TrackerConfig(kind="none"), "run": RunConfig()}
    return Config(**{**defaults, **sections})


def make_ledger(limit_bytes: int | None = 30 * MIB) -> MemoryLedger:
    """Ready with 1 MiB of its 30 unused; at its peak 2 MiB over them, 1 MiB of it unexplained."""
    ready = dict.fromkeys(LEDGER_PARTS, 0) | {"context": 5 * MIB, "weights": 10 * MIB, "kv_cache": 4 * MIB}
    peak = ready | {"activations": 8 * MIB}
    return MemoryLedger(1 << 34, limit_bytes, "nvml", ready | {"activations": 7 * MIB},
                        (LedgerPhase("ready", ready, 19 * MIB, 3 * MIB),
                         LedgerPhase("run_peak", peak, 28 * MIB, 4 * MIB)))


def make_startup(**changes) -> StartupRecord:
    values = {
        "device": "cpu", "device_name": "CPU", "dtype": "float32", "attention": "reference", "load_format": "dummy",
        "kv_policy": "fixed", "replay": "emulated", "choices": {"device": "cpu: no GPU was found"},
        "num_parameters": 1000, "block_size": 64, "num_kv_blocks": 16, "kv_bytes": 4 * MIB, "kv_bytes_per_token": 4096,
        "device_total_bytes": 1 << 34, "seconds": {"load": 1.5, "capture": 0.5},
        "buckets": (BucketRecord(1, 0.1, 0.2, 1024, None), BucketRecord(4, 0.1, 0.2, 2048, None)),
        "scope": "body", "ops": "torch", "sampler": "torch", "capture_order": (4, 1), "parity": (),
        "disabled_buckets": (),
        "ledger": make_ledger(), "kv_sized_by": "request", "num_full_requests": 1}
    return StartupRecord(**{**values, **changes})


def make_step(step: int, phase: str = "decode", **changes) -> StepRecord:
    is_decode = phase == "decode"
    values = {
        "step": step, "start_s": step * 0.01, "end_s": step * 0.01 + 0.008, "phase": phase,
        "path": "graph" if is_decode else "eager", "reason": "captured" if is_decode else "prefill",
        "num_requests": 3, "num_tokens": 3 if is_decode else 30, "bucket": 4 if is_decode else None,
        "num_padded_rows": 1 if is_decode else 0, "num_waiting": 0, "num_running": 3,
        "num_used_blocks": 3, "num_cached_blocks": 0, "num_preempted": 0}
    return StepRecord(**{**values, **changes})


def make_request(request_id: int = 0, token_times_s: tuple[float, ...] = (0.1, 0.2, 0.3), **changes) -> RequestRecord:
    values = {"arrival_s": 0.0, "first_scheduled_s": 0.05, "num_prompt_tokens": 10, "num_cached_tokens": 0,
              "num_preemptions": 0, "num_recomputed_tokens": 0, "finish_reason": "length"}
    return RequestRecord(request_id=request_id, token_times_s=token_times_s, num_output_tokens=len(token_times_s),
                         **{**values, **changes})


def make_finished(num_steps: int = 5, num_requests: int = 3, warnings: tuple[str, ...] = ()) -> Finished:
    steps = [make_step(0, "prefill"), *(make_step(number) for number in range(1, num_steps))]
    requests = [make_request(number) for number in range(num_requests)]
    answers = tuple(Answer(f"prompt [{number}]", (1, 2, 3), f"answer {number}\nsecond line", "length")
                    for number in range(num_requests))
    return Finished(make_startup(), EngineRecords(steps, requests, list(warnings)), answers,
                    {"rss_bytes": 100 * MIB, "peak_rss_bytes": 120 * MIB}, {"num_requests": 1, "max_tokens": 2},
                    {"build_engine": 2.0, "serve": 0.3})


def make_measured(**changes) -> Finished:
    """What a measurement leaves that serves no workload: tables and notes, no step, no request, no answer."""
    values = {"startup": make_startup(), "records": EngineRecords(), "answers": (), "memory": {"rss_bytes": 100 * MIB},
              "warmup": {}, "seconds": {"measure": 1.0}, "notes": ("Launching is dear.",),
              "tables": {"launch_cost": [{"empty_kernel": "torch", "launch_us": 4.25},
                                         {"empty_kernel": "triton", "launch_us": None}]}}
    return Finished(**{**values, **changes})


def make_result(finished: Finished | None = None, reason: str | None = None, **changes) -> RunResult:
    """The result of `finished`, or a failed one with `reason`."""
    values = {"name": "tiny fixed", "started_at": "2026-01-02T03:04:05+00:00", "command": ["run.py"], "overrides": [],
              "config": {"device": "auto"}, "code": {"commit": None, "is_dirty": None}, "environment": {"python": "3"}}
    if finished is None:
        return RunResult(**{**values, "status": "failed", "reason": reason or "out of luck", **changes})
    records, startup = finished.records, finished.startup
    metrics = compute_metrics(records.steps, records.requests, startup, finished.memory)
    return RunResult(**{**values, "status": "finished", "startup": {"seconds": startup.seconds}, "metrics": metrics,
                        "tables": {**run_tables(records, startup), **finished.tables}, "notes": list(finished.notes),
                        "steps_by_path": steps_by_path(records.steps), "seconds": finished.seconds,
                        "warmup": finished.warmup, "warnings": records.warnings, **changes})


def ignore(progress: Progress) -> None:
    """Show no progress."""
