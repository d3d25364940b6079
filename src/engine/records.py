"""Plain facts that the engine emits about itself: one record for start-up, for each bucket, step and request.

The engine does not know who reads them. Times ending in `_s` inside a step or request are host monotonic seconds
(time.perf_counter); durations say so. Rates, percentiles and means are computed from these elsewhere.
"""

from dataclasses import dataclass, field

from engine.memory.ledger import MemoryLedger

GRAPH, EAGER = "graph", "eager"  # StepRecord.path
# StepRecord.reason
PREFILL = "prefill"  # its shape differs every time
ENFORCE_EAGER = "enforce_eager"  # graph.mode=eager
ABOVE_LARGEST_BUCKET = "above_largest_bucket"  # no graph holds the batch
PARITY_FAILED = "parity_failed"  # every graph was disabled
CAPTURED = "captured"
SAMPLED_OUTSIDE = "captured_sampled_outside"  # replayed, then drawn again with top-k, top-p or min-p
# StartupRecord.kv_sized_by: by what memory was left, by what could be used, by a stated size, or by a default.
SIZED_BY_LIMIT, SIZED_BY_USE, SIZED_BY_REQUEST, SIZED_BY_DEFAULT = "limit", "use", "request", "default"


@dataclass(frozen=True)
class BucketRecord:
    """What capturing one batch size cost. Bytes are None where the device does not report them (emulated replay)."""

    batch_size: int
    warmup_s: float
    capture_s: float
    pool_bytes: int | None  # growth of the graph pool inside torch's allocator
    outside_bytes: int | None  # growth of the process on the device outside torch's allocator
    kernel_bytes: int | None = None  # growth outside it by the warm-up, which loads kernels; it outlives the graph
    num_nodes: int | None = None  # of the graph: kernels, copies, memory sets
    num_kernels: int | None = None  # of these, kernels
    replay_ms: float | None = None  # device time of a replay on padding alone: what the bucket costs beside attention

    @property
    def num_bytes(self) -> int | None:
        """Inside the pool and outside torch's allocator together; None where neither was reported."""
        known = [size for size in (self.pool_bytes, self.outside_bytes) if size is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class ParityRecord:
    """Replay against eager execution of the same stages on the same padded batch, compared on the live rows."""

    batch_size: int
    num_live: int
    max_difference: float | None  # of the last hidden states or logits recorded; 0: equal bit for bit; None: not finite
    num_differing_tokens: int
    passed: bool


@dataclass(frozen=True)
class StartupRecord:
    """What start-up decided and what it cost."""

    device: str
    device_name: str
    dtype: str
    attention: str
    load_format: str
    kv_policy: str
    replay: str  # cuda_graph | emulated | none
    choices: dict[str, str]  # setting -> what `auto` became, and why
    num_parameters: int
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    kv_bytes_per_token: int
    device_total_bytes: int
    scope: str  # what the graphs recorded: body | logits | step | none
    ops: str  # torch | triton
    sampler: str  # torch | compiled | triton
    buckets: tuple[BucketRecord, ...]  # in ascending order of size
    capture_order: tuple[int, ...]
    parity: tuple[ParityRecord, ...]
    disabled_buckets: tuple[int, ...]  # captured, and failed the parity check
    ledger: MemoryLedger
    seconds: dict[str, float]  # start-up verb -> duration
    kv_sized_by: str  # one of the constants above
    num_full_requests: int  # requests of max_model_len tokens that the KV cache holds at once
    dropped_buckets: tuple[int, ...] = ()  # asked for, and left out for want of memory
    kv_estimate_error_bytes: int | None = None  # measured graph bytes minus those rehearsed; None without rehearsal

    @property
    def total_s(self) -> float:
        """Seconds of all verbs."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class StepRecord:
    """One scheduler step. `start_s` is when it was scheduled, `end_s` when its tokens were read."""

    step: int
    start_s: float
    end_s: float
    phase: str  # prefill | decode
    path: str  # graph | eager
    reason: str  # why this path: one of the constants above
    num_requests: int  # live rows
    num_tokens: int  # tokens computed: prompt tokens of a prefill, live rows of a decode
    bucket: int | None  # captured batch size that was replayed
    num_padded_rows: int
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_cached_blocks: int
    num_preempted: int  # requests preempted while this step was scheduled


@dataclass(frozen=True)
class RequestRecord:
    """A finished request's timeline and counts. Token times are when the host could hand each token out."""

    request_id: int
    arrival_s: float
    first_scheduled_s: float | None
    token_times_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    finish_reason: str
    error: str | None = None


@dataclass
class EngineRecords:
    """Everything an engine has recorded since it started or was last cleared."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # each fallback, said once

    def clear(self) -> None:
        """Forget steps and requests, for instance those of a warm-up."""
        self.steps.clear()
        self.requests.clear()
