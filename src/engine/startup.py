"""Start-up: the verbs that KV memory policies order, and the record of what they decided and cost.

Each verb is timed, says its name when it begins and closes a phase of the ledger when it ends. Sizes are planned from
what has been measured so far, and measured again when all is in place, so that plan and outcome stand side by side.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.decode_state import RequestRows
from engine.decode_step import DecodeStep, row_kernels
from engine.device import engine_stream, on_stream
from engine.graph.builder import GraphBuilder
from engine.graph.static_batch import StaticBatch
from engine.kernels.attention import AttentionBackend
from engine.memory.address_range import AddressRange, EmulatedAddressRange, reserve_addresses
from engine.memory.book import LedgerBook
from engine.memory.budget import KVBudget
from engine.memory.gauge import make_gauge
from engine.memory.geometry import KVGeometry
from engine.memory.kv_cache import KVCache
from engine.memory.ledger import MemoryLedger
from engine.memory.shortage import is_out_of_memory
from engine.model.decoder import Decoder
from engine.model.source import ModelSource
from engine.model.weights import init_dummy, load_weights
from engine.probe import DecodeProbe
from engine.sampler import SEEDED, make_sampler
from engine.worst_case import load_kernels, run_worst_case

OnStage = Callable[[str], None]
PARITY_TEMPERATURE = 0.8
LIBRARY_ROWS = 256  # of the matrix products that make libraries allocate what they keep


class EngineStartup:
    """Holds what the verbs have built so far: `decoder`, `rows`, `static`, `kv_cache`, `graphs`."""

    def __init__(self, config: EngineConfig, source: ModelSource, device: torch.device, attention: AttentionBackend,
                 ops: str, sampler: str, block_size: int, kv_policy: str, on_stage: OnStage) -> None:
        self._config, self.device = config, device
        self._attention, self._on_stage = attention, on_stage
        self.source = source
        scheduler = config.scheduler
        self.gauge = make_gauge(device)
        self.book = LedgerBook(self.gauge)
        self.geometry = KVGeometry(block_size, source.architecture.kv_bytes_per_token(source.dtype.itemsize),
                                   config.model.max_model_len, scheduler.max_num_seqs)
        self.budget = KVBudget(config.kv, kv_policy == "fixed", self.geometry, self.gauge, self.book)
        self.graph_builder = GraphBuilder(config, device, self.gauge, self.book, self.budget)
        self.ops_name = ops
        self.sampler_name, self.sampler = sampler, make_sampler(sampler)
        torch.manual_seed(config.sampler.seed)  # the noise of sampler.impl=compiled comes from torch's own generator
        self.stream: torch.cuda.Stream | None = None
        self.seconds: dict[str, float] = {}
        self.kv_sized_by = ""
        self.activation_peak_bytes = 0  # in live tensors; the device gives more, in segments of torch's allocator
        self._addresses: AddressRange | EmulatedAddressRange | None = None
        self._reserved: KVCache | None = None

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        """Time a verb, close its phase of the ledger, and turn a lack of memory into the sum."""
        self._on_stage(name.replace("_", " "))
        start_s = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(self.budget.exhausted(name)) from error
        self.book.close_phase(name)  # waits for the device
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    def prepare(self) -> None:
        """The stream, and the libraries' handles and workspaces: what exists before the first weight."""
        with self._verb("prepare"), self.book.outside("libraries"), self.book.inside("workspaces"):
            self.stream = engine_stream(self.device)
            with on_stream(self.stream):
                x = torch.ones(LIBRARY_ROWS, LIBRARY_ROWS, dtype=self.source.dtype, device=self.device)
                F.linear(x, x, x[0])  # with a bias and without: by another library
                x @ x
                del x

    def load(self) -> None:
        """Weights, rows and static batch; ValueError with the sum before anything is read that would not fit."""
        self.budget.check_before_load(**self._sizes(*self._resident(torch.device("meta"))))
        with self._verb("load"):
            self.decoder, self.rows, self.static = self._resident(self.device)
            if self.source.load_format == "dummy":
                init_dummy(self.decoder, self._config.model.dummy_seed)
            else:
                assert self.source.directory is not None
                load_weights(self.decoder, self.source.directory)
            self.book.state(**self._sizes(self.decoder, self.rows, self.static))

    def _resident(self, device: torch.device) -> tuple[Decoder, RequestRows, StaticBatch]:
        """What a step needs beside the KV cache, uninitialised."""
        source, arch, max_num_seqs = self.source, self.source.architecture, self._config.scheduler.max_num_seqs
        decoder = Decoder(arch, self._attention, source.dtype, device, self._config.model.max_model_len, self.ops_name)
        rows = RequestRows(max_num_seqs, self.geometry.table_width, self.geometry.block_size, device)
        static = StaticBatch(max_num_seqs, rows, arch.hidden_size, arch.vocab_size, source.dtype, device)
        return decoder, rows, static

    @staticmethod
    def _sizes(decoder: Decoder, rows: RequestRows, static: StaticBatch) -> dict[str, int]:
        return {"weights": decoder.num_bytes, "static_buffers": rows.num_bytes + static.num_bytes}

    @torch.inference_mode()
    def profile_forward(self) -> int:
        scheduler, max_model_len = self._config.scheduler, self._config.model.max_model_len
        limits = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_model_len), max_model_len
        with self._verb("profile_forward"):
            step = self._make_step(self._stand_in())
            with self.book.outside("kernels"):
                if self.device.type == "cuda":  # a CPU loads none
                    load_kernels(step, *limits)
                self.gauge.trim()
                self.gauge.reset_peak()
                allocated, reserved = self.gauge.peaks()
                run_worst_case(step, *limits)
            peak_allocated, peak_reserved = self.gauge.peaks()
            self.activation_peak_bytes = peak_allocated - allocated
            self.budget.activation_bytes = peak_reserved - reserved
            del step
        return self.budget.activation_bytes

    def _stand_in(self) -> KVCache:
        return KVCache.allocate(self.source.architecture, 1, self.geometry.block_size, self.source.dtype, self.device)

    @torch.inference_mode()
    def rehearse_capture(self) -> int:
        with self._verb("rehearse_capture"):
            return self.graph_builder.rehearse(self._make_step(self._stand_in()))

    def _make_step(self, cache: KVCache) -> DecodeStep:
        return DecodeStep(self.decoder, cache.layers(), self.rows, self.static, self.sampler, row_kernels(self.device))

    def reserve(self) -> None:
        with self._verb("reserve"):
            geometry, total = self.geometry, self.gauge.total_bytes
            num_blocks = min(geometry.num_useful_blocks, total // geometry.block_bytes)
            self._addresses = reserve_addresses(num_blocks * geometry.block_bytes, self.device, self.gauge)
            self._addresses.map_up_to(geometry.block_bytes)
            self._reserved = KVCache.over(self._addresses.tensor(), self.source.architecture, num_blocks,
                                          geometry.block_size, self.source.dtype)
            self.book.state(kv_cache=self._addresses.mapped_bytes)

    def available_bytes(self) -> int:
        return self.budget.available_bytes()

    def stated_bytes(self) -> int:
        return self._config.kv.stated_bytes(self.geometry.block_size, self.geometry.block_bytes)

    def allocate(self, num_bytes: int) -> None:
        """As the protocol says. Where addresses are reserved and the room is too small, graphs may go for it."""
        with self._verb("allocate"):
            if self._addresses is not None:
                self.graph_builder.make_room()
                num_bytes = self._addresses.round_down(self.available_bytes() + self._addresses.mapped_bytes)
            num_blocks, self.kv_sized_by = self.budget.num_blocks(num_bytes)
            pool, outside = self.graph_builder.rehearsed or (0, 0)
            rounding = self.budget.activation_bytes - self.activation_peak_bytes
            self.book.plan(kv_cache=num_blocks * self.geometry.block_bytes, activations=self.activation_peak_bytes,
                           allocator_cache=self.book.parts["allocator_cache"] + rounding,
                           graph_pool=self.book.parts["graph_pool"] + pool,
                           graphs_outside_pool=self.book.parts["graphs_outside_pool"] + outside)
            if self._addresses is None or self._reserved is None:
                self.kv_cache = KVCache.allocate(self.source.architecture, num_blocks, self.geometry.block_size,
                                                 self.source.dtype, self.device)
                self.book.state(kv_cache=self.kv_cache.num_bytes)
            else:
                self._addresses.map_up_to(num_blocks * self.geometry.block_bytes)
                self.kv_cache = self._reserved.first(num_blocks)
                self.book.state(kv_cache=self._addresses.mapped_bytes)

    @torch.inference_mode()
    def capture(self) -> None:
        self.decode_step = self._make_step(self._reserved or self.kv_cache)
        if self.graph_builder.buckets is not None:
            with self._verb("capture"):
                self.graph_builder.capture(self.decode_step)

    @torch.inference_mode()
    def finish(self) -> None:
        """Check parity, and hold torch's allocator to what the limit leaves where the policy has measured all else."""
        builder = self.graph_builder
        if builder.graphs is not None and self._config.graph.parity_check != "none":
            with self._verb("check_parity"):
                builder.check_parity(self.make_probe(), PARITY_TEMPERATURE if self.sampler_name in SEEDED else 0.0)
        self.book.close_start_up()
        if self._addresses is not None:
            room = self.available_bytes() + self.budget.activation_bytes
            self.gauge.cap(self.gauge.reserved_bytes() + max(room, self.budget.activation_bytes))

    def ledger(self) -> MemoryLedger:
        """Every phase so far, and the peak of what has been run since start-up, where the device keeps one."""
        return self.book.ledger(self.budget.limit_bytes)

    def make_probe(self) -> DecodeProbe:
        """Synthetic decode steps on what has been built."""
        return DecodeProbe(self.decode_step, self.graph_builder.graphs, self.kv_cache, self._config.model.max_model_len,
                           self.stream)

    def release(self) -> None:
        """Give all device memory back, also what no tensor owns; nothing built here may be used any more."""
        for name in ("decoder", "rows", "static", "decode_step", "kv_cache"):
            self.__dict__.pop(name, None)
        self.graph_builder.graphs = self._reserved = None
        if self._addresses is not None:
            self._addresses.close()
        self.gauge.cap(None)
        self.gauge.trim()
