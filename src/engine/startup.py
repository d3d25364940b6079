"""Start-up: the verbs that KV memory policies order, and the record of what they decided and cost.

Each verb is timed and says its name when it begins. Sizes are planned from what has been measured so far, and measured
again when all is in place, so that plan and outcome stand side by side in the ledger.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from engine.batch import PADDING_SLOT, PrefillBatch
from engine.config import DEFAULT_CPU_KV_BYTES, DEFAULT_MEMORY_FRACTION, EngineConfig
from engine.decode_state import RequestRows
from engine.graph.buckets import BucketTable
from engine.graph.graphs import DecodeGraphs, Recorder, make_recorder
from engine.graph.static_batch import StaticBatch
from engine.kernels.attention import AttentionBackend
from engine.memory.gauge import GIB, MIB, make_gauge
from engine.memory.kv_cache import KVCache
from engine.model.decoder import Decoder
from engine.model.source import ModelSource
from engine.model.weights import init_dummy, load_weights
from engine.records import BucketRecord, LedgerEntry
from engine.sampler import SamplingBatch, make_sampler

OnStage = Callable[[str], None]


class EngineStartup:
    """Holds what the verbs have built so far: `decoder`, `rows`, `static`, `kv_cache`, `graphs`."""

    def __init__(self, config: EngineConfig, source: ModelSource, device: torch.device, attention: AttentionBackend,
                 block_size: int, on_stage: OnStage) -> None:
        self._config, self.device = config, device
        self._attention, self._block_size, self._on_stage = attention, block_size, on_stage
        self.source = source
        arch, scheduler = source.architecture, config.scheduler
        self.gauge = make_gauge(device)
        self.buckets = None if config.graph.mode == "eager" else BucketTable.build(
            config.graph.buckets, scheduler.max_num_seqs, config.graph.max_bucket)
        self.recorder = make_recorder(device)
        self.sampler = make_sampler(config.sampler.impl)
        torch.manual_seed(config.sampler.seed)  # the noise of sampler.impl=compiled comes from torch's own generator
        self.seconds: dict[str, float] = {}
        self.bucket_records: tuple[BucketRecord, ...] = ()
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
                                   self._config.model.max_model_len)
            if source.load_format == "dummy":
                init_dummy(self.decoder, self._config.model.dummy_seed)
            else:
                assert source.directory is not None
                load_weights(self.decoder, source.directory)
            self.rows = RequestRows(scheduler.max_num_seqs, self._table_width, self._block_size, self.device)
            self.static = StaticBatch(scheduler.max_num_seqs, self._table_width, self.rows, self.device)

    @torch.inference_mode()
    def profile_forward(self) -> int:
        with self._verb("profile_forward"):
            stand_in = self._stand_in_cache()
            self.gauge.trim()
            self.gauge.reset_peak()
            before = self.gauge.allocated_bytes()
            self._largest_step(stand_in)
            self._activation_bytes = self.gauge.peak_allocated_bytes() - before
        return self._activation_bytes

    def _stand_in_cache(self) -> KVCache:
        return KVCache.allocate(self.source.architecture, 1, self._block_size, self.source.dtype, self.device)

    def _largest_step(self, cache: KVCache) -> None:
        """The largest prefill that the scheduler can form, and logits and sampling for the most requests."""
        scheduler, max_len = self._config.scheduler, self._config.model.max_model_len
        num_tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_len)
        lengths = [min(max_len, num_tokens - start) for start in range(0, num_tokens, max_len)]
        int32 = partial(torch.tensor, dtype=torch.int32, device=self.device)
        cu_seqlens = int32([0, *lengths]).cumsum(0, dtype=torch.int32)
        batch = PrefillBatch(
            input_ids_T=torch.zeros(num_tokens, dtype=torch.int32, device=self.device),
            positions_T=int32([position for length in lengths for position in range(length)]),
            slot_mapping_T=torch.full((num_tokens,), PADDING_SLOT, dtype=torch.int32, device=self.device),
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths),
            last_token_indices_R=(cu_seqlens[1:] - 1).long())
        hidden_TH = self.decoder.forward(batch, cache.layers())
        rows = torch.arange(scheduler.max_num_seqs, device=self.device)
        logits_RV = self.decoder.logits(hidden_TH[rows % num_tokens])
        ones = torch.ones(len(rows), device=self.device)
        self.sampler(logits_RV, SamplingBatch(
            temperature_R=ones, top_k_R=ones.int(), top_p_R=ones / 2, min_p_R=ones / 2, seed_R=rows,
            position_R=rows.int(), all_greedy=False, needs_filter=True))

    @torch.inference_mode()
    def rehearse_capture(self) -> int:
        """Two largest buckets: the first sizes the pool, the second shows what each further one adds."""
        if self.buckets is None:
            return 0
        with self._verb("rehearse_capture"):
            sizes = self.buckets.sizes[-2:]
            # With a recorder of its own, so that the rehearsal's pool can be given back.
            graphs = self._make_graphs(self._stand_in_cache(), make_recorder(self.device))
            *further, first = graphs.capture(sizes)
            num_further = len(self.buckets.sizes) - 1
            pool = (first.pool_bytes or 0) + sum(record.pool_bytes or 0 for record in further) * num_further
            outside = (first.outside_bytes or 0) + sum(record.outside_bytes or 0 for record in further) * num_further
            self._planned_graph_bytes = (pool, outside)
            del graphs
            self.gauge.trim()
        return pool + outside

    def _make_graphs(self, cache: KVCache, recorder: Recorder) -> DecodeGraphs:
        hidden_RH = torch.empty(self._config.scheduler.max_num_seqs, self.source.architecture.hidden_size,
                                dtype=self.source.dtype, device=self.device)
        return DecodeGraphs(partial(self.decoder.forward, caches=cache.layers()), self.static, hidden_RH, recorder,
                            self.gauge)

    def limit_bytes(self) -> int:
        """Most of the device that may be in use, by whomever: kv.memory_fraction of its total."""
        fraction = self._config.kv.memory_fraction
        return int((DEFAULT_MEMORY_FRACTION if fraction is None else fraction) * self.gauge.total_bytes)

    def available_bytes(self) -> int:
        self.gauge.trim()
        return self.limit_bytes() - self.gauge.used_bytes() - self._activation_bytes

    def stated_bytes(self) -> int:
        kv = self._config.kv
        if kv.num_blocks is not None:
            return kv.num_blocks * self.block_bytes
        if kv.tokens is not None:
            return math.ceil(kv.tokens / self._block_size) * self.block_bytes
        if kv.bytes is not None:
            if kv.bytes < self.block_bytes:
                raise ValueError(f"kv.bytes must be at least one block of {self._block_size} tokens, "
                                 f"{self.block_bytes} bytes; got {kv.bytes}")
            return kv.bytes
        return DEFAULT_CPU_KV_BYTES

    def _useful_blocks(self) -> int:
        """Blocks beyond these could never be in use: max_num_seqs requests of max_model_len tokens."""
        return self._config.scheduler.max_num_seqs * self._table_width

    def allocate(self, num_bytes: int) -> None:
        with self._verb("allocate"):
            self._asked_kv_bytes = num_bytes
            num_blocks = num_bytes // self.block_bytes
            if num_blocks < 1:
                raise ValueError(self._shortage(num_bytes))
            if self._config.kv.is_size_stated:
                self._check_room(num_blocks * self.block_bytes)
            else:
                num_blocks = min(num_blocks, self._useful_blocks())
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
        self.graphs: DecodeGraphs | None = None
        if self.buckets is None:
            return
        with self._verb("capture"):
            self.graphs = self._make_graphs(self.kv_cache, self.recorder)
            self.bucket_records = self.graphs.capture(self.buckets.sizes)

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Bytes by part. `other` is what the device has in use beyond them: context, libraries, other processes."""
        pool = sum(record.pool_bytes or 0 for record in self.bucket_records)
        outside = sum(record.outside_bytes or 0 for record in self.bucket_records)
        planned_pool, planned_outside = self._planned_graph_bytes or (None, None)
        entries = [
            LedgerEntry("weights", None, self.decoder.num_bytes),
            LedgerEntry("static_buffers", None, self.static.num_bytes),
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
        measured = sum((record.pool_bytes or 0) + (record.outside_bytes or 0) for record in self.bucket_records)
        return measured - sum(self._planned_graph_bytes)
