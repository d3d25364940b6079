"""Keeping the ledger while an engine is built and run: who took what, found out where it was taken.

What lies outside torch's allocator shows only as a difference, so calls that take such memory are made inside
`outside(part)`. What lies inside is known by the tensors themselves, and by the allocator's own list of segments.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from engine.memory.gauge import MemoryGauge
from engine.memory.ledger import EMULATED, LEDGER_PARTS, READY, RUN_PEAK, START, LedgerPhase, MemoryLedger


class LedgerBook:
    """The parts of one engine, from before it takes anything."""

    def __init__(self, gauge: MemoryGauge) -> None:
        gauge.trim()
        self._gauge = gauge
        self._parts = dict.fromkeys(LEDGER_PARTS, 0)
        self._planned: dict[str, int] = {}
        self._phases: list[LedgerPhase] = []
        self._rest: _Rest | None = None
        self._before = gauge.read()  # an earlier engine may have left libraries, kernels, even tensors

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes of each part as they were last stated or measured."""
        return self._parts

    def state(self, **parts: int) -> None:
        """Take the sizes of parts that are known by themselves."""
        self._parts.update(parts)

    @contextmanager
    def outside(self, part: str) -> Iterator[None]:
        """Whatever is taken outside torch's allocator in here belongs to `part`."""
        before = self._gauge.outside_bytes()
        yield
        self.add(part, self._gauge.outside_bytes() - before)

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Whatever is allocated from torch in here, and stays, belongs to `part`."""
        before = self._gauge.read().allocated
        yield
        self.add(part, self._gauge.read().allocated - before)

    def add(self, part: str, num_bytes: int) -> None:
        """Count bytes that were measured elsewhere."""
        self._parts[part] += num_bytes

    def plan(self, **parts: int) -> None:
        """Note what the KV cache is sized by: the parts as they are, but for those that are given."""
        self._planned = {**self._parts, **parts}

    def close_phase(self, name: str) -> None:
        """Measure what the allocator knows, and set the parts against the driver's figure."""
        if not self._phases:
            self._parts["context"] = self._gauge.context_bytes()
            self._parts["before_start"] = (self._before.process or self._parts["context"]) - self._parts["context"]
            start = dict.fromkeys(LEDGER_PARTS, 0)
            start |= {part: self._parts[part] for part in ("context", "before_start")}
            self._phases.append(_phase(START, start, self._before.process, self._before.used))
        self._gauge.trim()
        reading = self._gauge.read()
        self.state(graph_pool=reading.pools - self._before.pools,
                   allocator_cache=reading.cached - self._before.cached)
        self._phases.append(_phase(name, self._parts, reading.process, reading.used))

    def close_start_up(self) -> None:
        """The last phase before anything is run; peaks count from here."""
        self.close_phase(READY)
        self._rest = self._measure_rest()

    def close_warm_up(self) -> None:
        """What was taken outside torch's allocator since start-up are the kernels of a warm-up; peaks count anew."""
        assert self._rest is not None, "start-up has not ended"
        rest, self._rest = self._rest, self._measure_rest()
        self.add("kernels", self._rest.outside - rest.outside)

    def _measure_rest(self) -> "_Rest":
        self._gauge.trim()
        self._gauge.reset_peak()
        return _Rest(self._gauge.outside_bytes(), self._gauge.read().allocated, self._gauge.peaks()[0])

    def ledger(self, limit_bytes: int | None) -> MemoryLedger:
        """All phases so far, and the peak of what has been run since, where torch's allocator has kept one."""
        phases = list(self._phases)
        if self._gauge.source != EMULATED:
            phases.append(self._run_peak())
        return MemoryLedger(self._gauge.total_bytes, limit_bytes, self._gauge.source, dict(self._planned),
                            tuple(phases))

    def _run_peak(self) -> LedgerPhase:
        """The device when torch's allocator held most; what lies outside it is as it is now."""
        assert self._rest is not None, "start-up has not ended"
        reading = self._gauge.read()
        peak_allocated, peak_reserved = self._gauge.peaks()
        activations = peak_allocated - self._rest.peak_allocated
        cached = peak_reserved - reading.pools - self._rest.allocated - activations
        since = peak_reserved - reading.reserved
        parts = {**self._parts, "activations": activations, "allocator_cache": cached - self._before.cached}
        process = None if reading.process is None else reading.process + since
        return _phase(RUN_PEAK, parts, process, reading.used + since)


@dataclass(frozen=True)
class _Rest:
    """An engine that has nothing to do, in bytes."""

    outside: int  # torch's allocator
    allocated: int  # in tensors outside graph pools
    peak_allocated: int  # by torch's own count, graph pools included


def _phase(name: str, parts: Mapping[str, int], process: int | None, used: int) -> LedgerPhase:
    own = sum(parts.values()) if process is None else process
    return LedgerPhase(name, dict(parts), process, max(0, used - own))
