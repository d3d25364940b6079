"""What can be said about decode graphs: which batch sizes, what is inside, how they are captured and checked."""

from dataclasses import dataclass
from typing import Any, Optional

from engine.checks import check_choice, check_range
from engine.graph.buckets import BUCKET_POLICIES, BucketOptions, BucketTable

GRAPH_MODES = ("full", "eager")
SCOPES = ("auto", "body", "logits", "step")
CAPTURE_ORDERS = ("descending", "ascending", "shuffled")
POOLS = ("shared", "separate")
PARITY_CHECKS = ("none", "sampled", "all")
PARITY_FAILURES = ("stop", "disable")


@dataclass(frozen=True)
class GraphConfig:
    """Which decode batch sizes get a graph, and what it records. `eager` records none (the lesson's enforce_eager)."""

    mode: str = "full"
    buckets: Any = "nano_vllm"  # a policy's name or an explicit list of batch sizes
    max_bucket: int = 512  # no policy captures a batch size above this; an explicit list may
    step: int = 16  # buckets=step: the distance of two sizes
    histogram: Any = None  # buckets=tuned: a finished run's directory, or {batch size: number of steps}
    max_graphs: Optional[int] = None  # buckets=tuned: how many graphs there may be; 16 when no budget is given
    max_graph_bytes: Optional[int] = None  # buckets=tuned: bytes that all graphs may take, as that run measured them
    scope: str = "auto"  # what is recorded: embedding to last norm (body); logits too; or the whole step with its
    # sampling. auto: step on a GPU, body on a CPU, which records nothing and would only work on padding
    capture_order: Any = "descending"  # or ascending, shuffled, or a list of the sizes
    capture_seed: int = 0  # capture_order=shuffled
    warmup_runs: int = 1  # runs before each capture, so that nothing first happens inside a recording
    pool: str = "shared"  # one memory pool for all graphs, or one for each
    parity_check: str = "none"  # replay against eager at start: for no bucket, some, or all
    on_parity_failure: str = "stop"  # or disable: the bucket is dropped, and larger ones or eager steps stand in

    def __post_init__(self) -> None:
        check_choice("graph.mode", self.mode, GRAPH_MODES)
        check_choice("graph.scope", self.scope, SCOPES)
        check_choice("graph.pool", self.pool, POOLS)
        check_choice("graph.parity_check", self.parity_check, PARITY_CHECKS)
        check_choice("graph.on_parity_failure", self.on_parity_failure, PARITY_FAILURES)
        check_range("graph.max_bucket", self.max_bucket, 1)
        check_range("graph.step", self.step, 1)
        check_range("graph.warmup_runs", self.warmup_runs, 1)
        check_range("graph.capture_seed", self.capture_seed, 0)
        budgets = {key: value for key in ("max_graphs", "max_graph_bytes") if (value := getattr(self, key)) is not None}
        for key, value in budgets.items():
            check_range(f"graph.{key}", value, 1)
        if len(budgets) > 1:
            raise ValueError("at most one of graph.max_graphs and graph.max_graph_bytes may be set; got "
                             + ", ".join(f"graph.{key}={value}" for key, value in budgets.items()))
        if isinstance(self.capture_order, str):
            check_choice("graph.capture_order", self.capture_order, CAPTURE_ORDERS)
        else:
            _check_sizes("graph.capture_order", self.capture_order, CAPTURE_ORDERS)
        if not (isinstance(self.buckets, str) and self.buckets in BUCKET_POLICIES):
            _check_sizes("graph.buckets", self.buckets, BUCKET_POLICIES)

    def scope_on(self, device_type: str) -> str:
        """The scope on a "cpu" or "cuda" device."""
        if self.scope != "auto":
            return self.scope
        return "step" if device_type == "cuda" else "body"

    def bucket_table(self, max_num_seqs: int) -> BucketTable | None:
        """The batch sizes to capture for batches of up to `max_num_seqs`; None for graph.mode=eager.

        Raises ValueError for a size that no batch could fill, and for a capture order that is not one of these sizes.
        """
        if self.mode == "eager":
            return None
        options = BucketOptions(self.step, self.histogram, self.max_graphs, self.max_graph_bytes)
        table = BucketTable.build(self.buckets, max_num_seqs, self.max_bucket, options)
        if not isinstance(self.capture_order, str) and sorted(self.capture_order) != list(table.sizes):
            raise ValueError(f"graph.capture_order must name each bucket once: the buckets are {list(table.sizes)}; "
                             f"got {list(self.capture_order)}")
        return table


def _check_sizes(key: str, sizes: Any, names: Any) -> None:
    """ValueError unless `sizes` is a list of distinct batch sizes."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        raise ValueError(f"{key} must be one of {', '.join(names)}, or a list such as [1,2,4,8]; got {sizes!r}")
    for size in sizes:
        check_range(f"{key}: each size", size, 1)
    if len(set(sizes)) != len(sizes):
        raise ValueError(f"{key} must name each size once; got {list(sizes)}")
