"""Capture and replay of the decode forward, one graph for each bucket.

A graph fixes shapes and addresses: it is captured on the static batch and leaves the hidden states in a static output,
so replaying is one call after the step has been written there. Largest first, so that smaller graphs reuse the pool the
largest has sized. Without CUDA a closure over the same buffers stands in for the graph (`emulated`), which keeps every
rule about addresses, padding and lookup true on a CPU.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from engine.batch import DecodeBatch
from engine.graph.static_batch import StaticBatch
from engine.memory.gauge import MemoryGauge
from engine.records import BucketRecord

Forward = Callable[[DecodeBatch], torch.Tensor]


class Recorder(Protocol):
    """How a piece of work is turned into something that can be replayed."""

    name: str

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run the work as it will be captured, so that nothing first happens inside the recording."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the work; returns its replay, ready to run at full speed."""


class CudaGraphRecorder:
    """CUDA graphs: one stream and one memory pool for all of them."""

    name = "cuda_graph"

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], None]) -> None:
        # On the capture stream: cuBLAS keeps a workspace for each stream, and it must exist before the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the broken capture's own complaint would hide what broke it
                    graph.capture_end()
                raise
            graph.capture_end()
        graph.replay()  # the first replay uploads the graph; live steps should not pay for that
        return graph.replay


class EmulatedRecorder:
    """The work itself, called again: same buffers, no recording."""

    name = "emulated"

    def warm_up(self, work: Callable[[], None]) -> None:
        """A CPU compiles and allocates nothing by shape, so there is nothing to keep out of a recording."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def make_recorder(device: torch.device) -> Recorder:
    """CUDA graphs where there is CUDA, else their emulation."""
    return CudaGraphRecorder(device) if device.type == "cuda" else EmulatedRecorder()


@contextmanager
def frozen_garbage_collection() -> Iterator[None]:
    """Keep the collector from scanning the model's objects, or freeing CUDA memory, in the middle of captures."""
    gc.collect()
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.unfreeze()


class DecodeGraphs:
    """The captured buckets. Shape letters: R rows, H hidden size."""

    def __init__(self, forward: Forward, static: StaticBatch, output_RH: torch.Tensor, recorder: Recorder,
                 gauge: MemoryGauge) -> None:
        self._forward = forward
        self._static = static
        self._output_RH = output_RH
        self._recorder = recorder
        self._gauge = gauge
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self, batch_sizes: tuple[int, ...]) -> tuple[BucketRecord, ...]:
        """Capture each size, largest first; returns a record for each in ascending order of size."""
        records = []
        with frozen_garbage_collection():
            for size in sorted(batch_sizes, reverse=True):
                records.append(self._capture_one(size))
        return tuple(reversed(records))

    def _capture_one(self, size: int) -> BucketRecord:
        self._static.write_padding(size)
        # Of these names only, not of self: a cycle would keep the model alive after the engine has been closed.
        forward, batch, output_RH = self._forward, self._static.batch(size), self._output_RH[:size]

        def work() -> None:
            output_RH.copy_(forward(batch))

        start_s = time.perf_counter()
        self._recorder.warm_up(work)
        warmup_s = time.perf_counter() - start_s
        reserved, used = self._gauge.reserved_bytes(), self._gauge.used_bytes()
        start_s = time.perf_counter()
        replay = self._recorder.record(work)
        capture_s = time.perf_counter() - start_s
        pool_bytes = self._gauge.reserved_bytes() - reserved
        outside_bytes = self._gauge.used_bytes() - used - pool_bytes
        self._replays[size] = replay
        is_real = self._recorder.name == CudaGraphRecorder.name
        return BucketRecord(batch_size=size, warmup_s=warmup_s, capture_s=capture_s,
                            pool_bytes=pool_bytes if is_real else None,
                            outside_bytes=outside_bytes if is_real else None)

    def replay(self, size: int) -> torch.Tensor:
        """Run the captured forward on the static batch; returns hidden states [size, H] in the static output."""
        self._replays[size]()
        return self._output_RH[:size]
