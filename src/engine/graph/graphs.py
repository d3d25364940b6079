"""Capture and replay of the decode step, one graph for each bucket.

A graph fixes shapes and addresses: it is captured on the static batch and leaves its results there, so replaying is
one call once the step has been written. Every graph reads and writes the same buffers, and in a shared pool the same
scratch memory: they never run side by side. Largest first by default, so that smaller graphs reuse the pool that the
largest has sized; any order is safe.
"""

import gc
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from engine.decode_step import SCOPE_STAGES, STAGES, DecodeStep, StepHints
from engine.graph.recorder import EMULATED, Recorder, Recording
from engine.memory.gauge import MemoryGauge
from engine.memory.shortage import is_out_of_memory
from engine.records import BucketRecord

ChooseLoss = Callable[[Sequence[int]], int]  # which of these batch sizes is done without


def capture_order(order: str | Sequence[int], sizes: Sequence[int], seed: int) -> list[int]:
    """The sizes in the order that `graph.capture_order` says."""
    if not isinstance(order, str):
        return list(order)
    ordered = sorted(sizes, reverse=order == "descending")
    if order == "shuffled":
        random.Random(seed).shuffle(ordered)
    return ordered


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
    """The captured buckets of one `scope`."""

    def __init__(self, step: DecodeStep, scope: str, recorder: Recorder, gauge: MemoryGauge,
                 num_warmup_runs: int = 1) -> None:
        self.scope = scope
        self._step = step
        self._recorder = recorder
        self._gauge = gauge
        self._num_warmup_runs = num_warmup_runs
        self._recordings: dict[int, Recording] = {}

    def capture(self, batch_sizes: Sequence[int], choose_loss: ChooseLoss) -> tuple[BucketRecord, ...]:
        """Capture the sizes in this order; returns a record for each, in ascending order of size.

        Where the device runs out of memory, the size that `choose_loss` names among all is given up.
        """
        records: dict[int, BucketRecord] = {}
        waiting = list(batch_sizes)
        with frozen_garbage_collection():
            while waiting:
                if (record := self._try_to_capture(waiting[0])) is not None:
                    records[waiting.pop(0)] = record
                    continue
                lost = choose_loss([*records, *waiting])
                if lost in records:
                    del records[lost]
                    self.drop([lost])
                else:
                    waiting.remove(lost)
                self._gauge.trim()
        return tuple(sorted(records.values(), key=lambda record: record.batch_size))

    def _try_to_capture(self, size: int) -> BucketRecord | None:
        """The record; None if the device has too little memory. No reference to the error is kept: it would hold
        tensors."""
        try:
            return self._capture_one(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _capture_one(self, size: int) -> BucketRecord:
        # Padding alone: it writes nothing, whatever a stage does, and no stage depends on what the rows hold.
        self._step.static.write([], [], size)
        self._step.run(("inputs",), size)
        step, stages = self._step, SCOPE_STAGES[self.scope]  # not self: a cycle would outlive a closed engine

        def work() -> None:
            step.run(stages, size)

        gauge = self._gauge
        before, start_s = gauge.outside_bytes(), time.perf_counter()
        self._recorder.warm_up(work, self._num_warmup_runs)
        warmup_s = time.perf_counter() - start_s
        warm, reserved, start_s = gauge.outside_bytes(), gauge.reserved_bytes(), time.perf_counter()
        recording = self._recorder.record(work)
        capture_s = time.perf_counter() - start_s
        sizes: tuple[int | None, ...] = (None, None, None)
        if self._recorder.name != EMULATED:
            sizes = gauge.reserved_bytes() - reserved, gauge.outside_bytes() - warm, warm - before
        self._recordings[size] = recording
        return BucketRecord(size, warmup_s, capture_s, *sizes, **vars(self._recorder.facts(recording)))

    @property
    def replay_kind(self) -> str:
        """How a replay is done: `cuda_graph` or `emulated`."""
        return self._recorder.name

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured batch sizes in ascending order."""
        return tuple(sorted(self._recordings))

    def drop(self, sizes: Collection[int]) -> None:
        """Forget the graphs of these sizes, and give back what only they hold."""
        for size in sizes:
            del self._recordings[size]

    def run_step(self, size: int, live: int, hints: StepHints) -> None:
        """Launch a whole step of `live` requests in the bucket `size`: the recorded stages by replay, those before them
        on all rows, those after them on the live ones."""
        recorded = SCOPE_STAGES[self.scope]
        self._step.run(STAGES[:STAGES.index(recorded[0])], size)
        self.replay(size)
        self._step.run(STAGES[STAGES.index(recorded[-1]) + 1:], live, hints)
        if self.samples_outside(hints):
            self._step.resample(live, hints)

    def samples_outside(self, hints: StepHints) -> bool:
        """Whether the sampling that was recorded will not do, since filters apply."""
        return hints.filters is not None and "sample" in SCOPE_STAGES[self.scope]

    def replay(self, size: int) -> None:
        """Run what was captured for `size` rows of the static batch."""
        self._recordings[size].replay()
