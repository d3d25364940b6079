"""From a bucket table to captured, checked graphs: rehearsal, capture, parity, and what is done without.

A bucket is lost when its replay differs from eager execution (graph.on_parity_failure=disable) or when the device has
no memory for it (kv.on_shortage=drop_buckets); both are recorded, and larger buckets or eager steps stand in.
"""

from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.decode_step import DecodeStep
from engine.graph.buckets import BucketTable, least_valuable
from engine.graph.config import GraphConfig
from engine.graph.estimate import estimate_graph_bytes
from engine.graph.graphs import DecodeGraphs, capture_order
from engine.graph.parity import buckets_to_check, check_parity, failures
from engine.graph.recorder import make_recorder
from engine.memory.book import LedgerBook
from engine.memory.budget import KVBudget
from engine.memory.gauge import MemoryGauge
from engine.probe import DecodeProbe
from engine.records import BucketRecord, ParityRecord


class GraphBuilder:
    """The graphs of one engine; `graphs` is None in eager mode, `buckets` also where every bucket was lost."""

    def __init__(self, config: EngineConfig, device: torch.device, gauge: MemoryGauge, book: LedgerBook,
                 budget: KVBudget) -> None:
        self._config, self._device = config, device
        self._gauge, self._book, self._budget = gauge, book, budget
        self.scope = config.graph.scope_on(device.type)
        self.buckets: BucketTable | None = config.graph.bucket_table(config.scheduler.max_num_seqs)
        self.graphs: DecodeGraphs | None = None
        self.records: tuple[BucketRecord, ...] = ()
        self.capture_order: tuple[int, ...] = ()
        self.parity: tuple[ParityRecord, ...] = ()
        self.disabled: tuple[int, ...] = ()  # captured, and failed the parity check
        self.dropped: tuple[int, ...] = ()  # for want of memory
        self.rehearsed: tuple[int, int] | None = None  # what all graphs should take inside the pool and outside it
        self._warnings: list[str] = []

    def rehearse(self, step: DecodeStep) -> int:
        """Capture the buckets that kv.rehearse names, measure and forget them; returns what all buckets would take."""
        if self.buckets is None:
            return 0
        sizes = self.buckets.sizes if self._config.kv.rehearse == "all" else self.buckets.sizes[-2:]
        records = self._make_graphs(step).capture(sizes[::-1], self._choose_loss)
        self._count_kernels(records)
        self._gauge.trim()
        self._expect(records)
        budget = self._budget
        while self._may_drop and budget.available_bytes() - budget.expected_graph_bytes < budget.min_bytes:
            self._drop(least_valuable(self.buckets.sizes))
            self._expect(records)
        return budget.expected_graph_bytes

    def _expect(self, records: Sequence[BucketRecord]) -> None:
        """Note what all buckets that are left would take, by those that were rehearsed."""
        assert self.buckets is not None, "the largest bucket is never dropped"
        known = [record for record in records if record.batch_size in self.buckets.sizes]
        self.rehearsed = estimate_graph_bytes(known, len(self.buckets.sizes))
        self._budget.expected_graph_bytes = sum(self.rehearsed)

    def capture(self, step: DecodeStep) -> None:
        """Capture every bucket; what graphs take is then in use and no longer expected."""
        assert self.buckets is not None, "eager mode captures nothing"
        graph = self._config.graph
        default = GraphConfig.pool, GraphConfig.warmup_runs
        if self._device.type == "cpu" and (graph.pool, graph.warmup_runs) != default:
            self._warnings.append("graph.pool and graph.warmup_runs have no effect: replay is emulated on a CPU")
        order = capture_order(graph.capture_order, self.buckets.sizes, graph.capture_seed)
        self.graphs = self._make_graphs(step)
        self.records = self.graphs.capture(order, self._choose_loss)
        self.capture_order = tuple(size for size in order if size in self.buckets.sizes)
        self._count_kernels(self.records)
        self._count_graphs()
        self._budget.expected_graph_bytes = 0

    def make_room(self) -> None:
        """Drop captured graphs, where that is wanted, until the smallest KV cache fits."""
        while self._may_drop and self._budget.available_bytes() < self._budget.min_bytes:
            assert self.buckets is not None and self.graphs is not None
            lost = least_valuable(self.buckets.sizes)
            self._drop(lost)
            self.graphs.drop([lost])
            self.records = tuple(record for record in self.records if record.batch_size != lost)
            self._count_graphs()

    @property
    def _may_drop(self) -> bool:
        return (self._config.kv.on_shortage == "drop_buckets" and self.buckets is not None
                and len(self.buckets.sizes) > 1)

    def _choose_loss(self, sizes: Sequence[int]) -> int:
        """The bucket among `sizes` to do without; ValueError with the sum if none may go."""
        if self._config.kv.on_shortage == "error" or len(sizes) < 2:
            raise ValueError(self._budget.exhausted("capture"))
        lost = least_valuable(sizes)
        self._drop(lost)
        return lost

    def _drop(self, size: int) -> None:
        assert self.buckets is not None
        self.dropped = tuple(sorted((*self.dropped, size)))
        self.buckets = self.buckets.without([size])

    @property
    def warnings(self) -> list[str]:
        """What a user should know, one sentence each."""
        lost = ", ".join(map(str, self.dropped))
        dropped = [f"kv.on_shortage=drop_buckets: no memory for the graphs of {lost} rows; larger buckets stand in"]
        return [*self._warnings, *(dropped if self.dropped else [])]

    @property
    def estimate_error_bytes(self) -> int | None:
        """Graph bytes as measured minus as rehearsed; None without a rehearsal."""
        if self.rehearsed is None:
            return None
        return sum(record.num_bytes or 0 for record in self.records) - sum(self.rehearsed)

    def check_parity(self, probe: DecodeProbe, temperature: float) -> None:
        """Compare as many buckets with eager execution as graph.parity_check says.

        Raises ValueError for a bucket that fails, unless graph.on_parity_failure=disable leaves it out.
        """
        assert self.buckets is not None and self.graphs is not None, "nothing was captured"
        self.parity = check_parity(probe, buckets_to_check(self._config.graph.parity_check, self.buckets.sizes),
                                   temperature)
        if not (sentence := failures(self.parity)):
            return
        if self._config.graph.on_parity_failure == "stop":
            raise ValueError(f"graph.parity_check: {sentence}; graph.on_parity_failure=disable runs without them")
        self.disabled = tuple(sorted({record.batch_size for record in self.parity if not record.passed}))
        self.buckets = self.buckets.without(self.disabled)
        if self.buckets is not None:
            self._config.scheduler.check_covered(self.buckets)
        elif self._config.scheduler.above_largest_bucket == "error":
            raise ValueError(f"scheduler.above_largest_bucket=error: no graph is left: {sentence}")
        self.graphs.drop(self.disabled)
        self._warnings.append(f"{sentence}; these buckets are not used")

    def _make_graphs(self, step: DecodeStep) -> DecodeGraphs:
        """With a recorder of its own, so that the pool of a rehearsal can be given back."""
        graph = self._config.graph
        recorder = make_recorder(self._device, has_shared_pool=graph.pool == "shared")
        return DecodeGraphs(step, self.scope, recorder, self._gauge, graph.warmup_runs)

    def _count_kernels(self, records: Sequence[BucketRecord]) -> None:
        self._book.add("kernels", sum(record.kernel_bytes or 0 for record in records))

    def _count_graphs(self) -> None:
        self._book.state(graphs_outside_pool=sum(record.outside_bytes or 0 for record in self.records))
