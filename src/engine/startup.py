"""Start-up: the verbs that KV memory policies order, and the record of what they decided and cost.

Each verb is timed and says its name when it begins. Sizes are planned from what has been measured so far, and measured
again when all is in place, so that plan and outcome stand side by side in the ledger.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.decode_state import RequestRows
from engine.decode_step import DecodeStep, row_kernels
from engine.device import make_stream
from engine.graph.config import GraphConfig
from engine.graph.graphs import DecodeGraphs, capture_order
from engine.graph.parity import buckets_to_check, check_parity, failures
from engine.graph.recorder import make_recorder
from engine.graph.static_batch import StaticBatch
from engine.kernels.attention import AttentionBackend
from engine.memory.gauge import make_gauge
from engine.memory.kv_cache import KVCache
from engine.model.decoder import Decoder
from engine.model.source import ModelSource
from engine.model.weights import init_dummy, load_weights
from engine.probe import DecodeProbe
from engine.records import BucketRecord, LedgerEntry, ParityRecord
from engine.sampler import SEEDED, make_sampler
from engine.units import GIB, MIB
from engine.worst_case import run_worst_case

OnStage = Callable[[str], None]
PARITY_TEMPERATURE = 0.8


class EngineStartup:
    """Holds what the verbs have built so far: `decoder`, `rows`, `static`, `kv_cache`, `graphs`."""

    def __init__(self, config: EngineConfig, source: ModelSource, device: torch.device, attention: AttentionBackend,
                 ops: str, sampler: str, block_size: int, on_stage: OnStage) -> None:
        self._config, self.device = config, device
        self._attention, self._block_size, self._on_stage = attention, block_size, on_stage
        self.source = source
        arch, scheduler = source.architecture, config.scheduler
        self.gauge = make_gauge(device)
        self.stream = make_stream(device)
        self.buckets = config.graph.bucket_table(scheduler.max_num_seqs)
        self.scope = config.graph.scope_on(device.type)
        self.ops_name = ops
        self.sampler_name, self.sampler = sampler, make_sampler(sampler)
        torch.manual_seed(config.sampler.seed)  # the noise of sampler.impl=compiled comes from torch's own generator
        self.seconds: dict[str, float] = {}
        self.bucket_records: tuple[BucketRecord, ...] = ()
        self.capture_order: tuple[int, ...] = ()
        self.parity_records: tuple[ParityRecord, ...] = ()
        self.disabled_buckets: tuple[int, ...] = ()
        self.warnings: list[str] = []
        self._table_width = math.ceil(config.model.max_model_len / block_size)
        self.block_bytes = block_size * arch.kv_bytes_per_token(source.dtype.itemsize)
        self._activation_bytes = 0
        self._asked_kv_bytes = 0
        self._planned_graph_bytes: tuple[int, int] | None = None  # inside the pool, outside it

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        self._on_stage(name.replace("_", " "))
        start_s = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    def load(self) -> None:
        with self._verb("load"):
            source, scheduler = self.source, self._config.scheduler
            self.decoder = Decoder(source.architecture, self._attention, source.dtype, self.device,
                                   self._config.model.max_model_len, self.ops_name)
            if source.load_format == "dummy":
                init_dummy(self.decoder, self._config.model.dummy_seed)
            else:
                assert source.directory is not None
                load_weights(self.decoder, source.directory)
            self.rows = RequestRows(scheduler.max_num_seqs, self._table_width, self._block_size, self.device)
            arch = source.architecture
            self.static = StaticBatch(scheduler.max_num_seqs, self.rows, arch.hidden_size, arch.vocab_size,
                                      source.dtype, self.device)

    @torch.inference_mode()
    def profile_forward(self) -> int:
        with self._verb("profile_forward"):
            stand_in = self._stand_in_cache()
            self.gauge.trim()
            self.gauge.reset_peak()
            before = self.gauge.allocated_bytes()
            scheduler = self._config.scheduler
            run_worst_case(self.decoder, self.sampler, stand_in.layers(), scheduler.max_num_seqs,
                           scheduler.max_num_batched_tokens, self._config.model.max_model_len, self.device)
            self._activation_bytes = self.gauge.peak_allocated_bytes() - before
        return self._activation_bytes

    def _stand_in_cache(self) -> KVCache:
        return KVCache.allocate(self.source.architecture, 1, self._block_size, self.source.dtype, self.device)

    @torch.inference_mode()
    def rehearse_capture(self) -> int:
        """Two largest buckets, the larger first: it sizes the pool, the other shows what each further one adds.

        For another graph.capture_order than descending the pool may grow further, and the estimate is short of that.
        """
        if self.buckets is None:
            return 0
        with self._verb("rehearse_capture"):
            sizes = self.buckets.sizes[-2:]
            graphs = self._make_graphs(self._make_step(self._stand_in_cache()))
            *further, first = graphs.capture(sizes[::-1])
            num_further = len(self.buckets.sizes) - 1
            pool = (first.pool_bytes or 0) + sum(record.pool_bytes or 0 for record in further) * num_further
            outside = (first.outside_bytes or 0) + sum(record.outside_bytes or 0 for record in further) * num_further
            self._planned_graph_bytes = (pool, outside)
            del graphs
            self.gauge.trim()
        return pool + outside

    def _make_step(self, cache: KVCache) -> DecodeStep:
        return DecodeStep(self.decoder, cache.layers(), self.rows, self.static, self.sampler, row_kernels(self.device))

    def _make_graphs(self, step: DecodeStep) -> DecodeGraphs:
        """With a recorder of its own, so that the pool of a rehearsal can be given back."""
        graph = self._config.graph
        recorder = make_recorder(self.device, has_shared_pool=graph.pool == "shared")
        return DecodeGraphs(step, self.scope, recorder, self.gauge, graph.warmup_runs)

    def limit_bytes(self) -> int:
        """Most of the device that may be in use, by whomever: kv.memory_fraction of its total."""
        return self._config.kv.limit_bytes(self.gauge.total_bytes)

    def available_bytes(self) -> int:
        self.gauge.trim()
        return self.limit_bytes() - self.gauge.used_bytes() - self._activation_bytes

    def stated_bytes(self) -> int:
        return self._config.kv.stated_bytes(self._block_size, self.block_bytes)

    def _useful_blocks(self) -> int:
        """Blocks beyond these could never be in use: max_num_seqs requests of max_model_len tokens."""
        return self._config.scheduler.max_num_seqs * self._table_width

    def allocate(self, num_bytes: int) -> None:
        with self._verb("allocate"):
            num_blocks = num_bytes // self.block_bytes
            if num_blocks < 1:
                raise ValueError(self._shortage(num_bytes))
            if self._config.kv.is_size_stated:
                self._check_room(num_blocks * self.block_bytes)
            else:
                num_blocks = min(num_blocks, self._useful_blocks())
            self._asked_kv_bytes = num_blocks * self.block_bytes
            self.kv_cache = KVCache.allocate(self.source.architecture, num_blocks, self._block_size,
                                             self.source.dtype, self.device)

    def _check_room(self, num_bytes: int) -> None:
        """ValueError with the sum for a stated size that the GPU has no room for; a CPU maps what is written only."""
        if self.device.type == "cuda":
            self.gauge.trim()
            used, total = self.gauge.used_bytes(), self.gauge.total_bytes
            if num_bytes > total - used:
                raise ValueError(
                    f"the stated KV cache takes {num_bytes / GIB:.1f} GiB but {(total - used) / GIB:.1f} GiB is free: "
                    f"device {total / GIB:.1f} GiB, in use {used / GIB:.1f} GiB (weights "
                    f"{self.decoder.num_bytes / GIB:.1f} GiB); state a smaller kv.bytes, kv.tokens or kv.num_blocks")

    def _shortage(self, num_bytes: int) -> str:
        used, weights = self.gauge.used_bytes() / GIB, self.decoder.num_bytes / GIB
        graphs = sum(self._planned_graph_bytes or (0, 0)) / GIB
        return (f"KV cache needs 1 block of {self.block_bytes / MIB:.1f} MiB but {num_bytes / MIB:.0f} MiB is left: "
                f"limit {self.limit_bytes() / GIB:.1f} GiB, in use on the device {used:.1f} GiB "
                f"(weights {weights:.1f} GiB), activations {self._activation_bytes / GIB:.1f} GiB, "
                f"graphs {graphs:.1f} GiB")

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, then check as many against eager execution as graph.parity_check says.

        Raises ValueError for a bucket that fails the check, unless graph.on_parity_failure=disable drops it.
        """
        self.decode_step = self._make_step(self.kv_cache)
        self.graphs: DecodeGraphs | None = None
        if self.buckets is None:
            return
        graph = self._config.graph
        if self.device.type == "cpu" and (graph.pool, graph.warmup_runs) != (GraphConfig.pool, GraphConfig.warmup_runs):
            self.warnings.append("graph.pool and graph.warmup_runs have no effect: replay is emulated on a CPU")
        with self._verb("capture"):
            self.capture_order = tuple(capture_order(graph.capture_order, self.buckets.sizes, graph.capture_seed))
            self.graphs = self._make_graphs(self.decode_step)
            self.bucket_records = self.graphs.capture(self.capture_order)
        if sizes := buckets_to_check(graph.parity_check, self.buckets.sizes):
            with self._verb("check_parity"):
                temperature = PARITY_TEMPERATURE if self.sampler_name in SEEDED else 0.0
                self.parity_records = check_parity(self.make_probe(), sizes, temperature)
            self._act_on_parity()

    def make_probe(self) -> DecodeProbe:
        """Synthetic decode steps on what has been built."""
        return DecodeProbe(self.decode_step, self.graphs, self.kv_cache, self._config.model.max_model_len, self.stream)

    def _act_on_parity(self) -> None:
        assert self.buckets is not None
        if not (sentence := failures(self.parity_records)):
            return
        if self._config.graph.on_parity_failure == "stop":
            raise ValueError(f"graph.parity_check: {sentence}; graph.on_parity_failure=disable runs without them")
        self.disabled_buckets = tuple(sorted({record.batch_size for record in self.parity_records
                                              if not record.passed}))
        self.buckets = self.buckets.without(self.disabled_buckets)
        if self.buckets is not None:
            self._config.scheduler.check_covered(self.buckets)
        elif self._config.scheduler.above_largest_bucket == "error":
            raise ValueError(f"scheduler.above_largest_bucket=error: no graph is left: {sentence}")
        assert self.graphs is not None
        self.graphs.drop(self.disabled_buckets)
        self.warnings.append(f"{sentence}; these buckets are not used")

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Bytes by part. `other` is what the device has in use beyond them: context, libraries, other processes."""
        pool = sum(record.pool_bytes or 0 for record in self.bucket_records)
        outside = sum(record.outside_bytes or 0 for record in self.bucket_records)
        planned_pool, planned_outside = self._planned_graph_bytes or (None, None)
        entries = [
            LedgerEntry("weights", None, self.decoder.num_bytes),
            LedgerEntry("static_buffers", None, self.static.num_bytes + self.rows.num_bytes),
            LedgerEntry("kv_cache", self._asked_kv_bytes, self.kv_cache.num_bytes),
            LedgerEntry("graph_pool", planned_pool, pool),
            LedgerEntry("graphs_outside_pool", planned_outside, outside),
        ]
        if self.device.type == "cuda":
            self.gauge.trim()
            resident = sum(entry.measured_bytes for entry in entries)
            entries.append(LedgerEntry("other", None, self.gauge.used_bytes() - resident))
            if "profile_forward" in self.seconds:
                entries.append(LedgerEntry("activation_peak", None, self._activation_bytes))
        return tuple(entries)

    def estimate_error_bytes(self) -> int | None:
        """Graph bytes as measured minus as rehearsed; None without a rehearsal."""
        if self._planned_graph_bytes is None:
            return None
        return sum(record.num_bytes or 0 for record in self.bucket_records) - sum(self._planned_graph_bytes)
