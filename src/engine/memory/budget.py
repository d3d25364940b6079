"""How large the KV cache may be: what the limit leaves, what is of use, what was asked for; and the sum if it is none.

The limit is a share of the device's total and counts every process on it: what others hold is not there to be taken.
"""

from collections.abc import Mapping

from engine.memory.book import LedgerBook
from engine.memory.config import KVConfig
from engine.memory.gauge import MemoryGauge
from engine.memory.geometry import KVGeometry
from engine.memory.shortage import size, sum_text
from engine.records import SIZED_BY_DEFAULT, SIZED_BY_LIMIT, SIZED_BY_REQUEST, SIZED_BY_USE

SHORTEST_OF_USE = 16  # tokens: a max_model_len below is no advice
HIGHEST_ADVISED = 0.98  # of the device's total: a driver needs some of the rest


class KVBudget:
    """The room for one engine's KV cache. `is_stated`: its size is given, and only the device's own end limits it."""

    def __init__(self, kv: KVConfig, is_stated: bool, geometry: KVGeometry, gauge: MemoryGauge,
                 book: LedgerBook) -> None:
        self.geometry = geometry
        self._kv, self._is_stated, self._gauge, self._book = kv, is_stated, gauge, book
        self.activation_bytes = 0  # what a step takes from the device at its peak, as profiled
        self.expected_graph_bytes = 0  # as rehearsed, and not taken yet

    @property
    def limit_bytes(self) -> int | None:
        """Most of the device that may be in use, by whomever; None for a stated size."""
        return None if self._is_stated else self._kv.limit_bytes(self._gauge.total_bytes)

    @property
    def _ceiling(self) -> int:
        return self._gauge.total_bytes if self.limit_bytes is None else self.limit_bytes

    @property
    def min_bytes(self) -> int:
        """The smallest cache that is worth a start: one request of max_model_len tokens, or a block if stated."""
        blocks = 1 if self.limit_bytes is None else self.geometry.blocks_per_full_request
        return blocks * self.geometry.block_bytes

    def available_bytes(self) -> int:
        """What the limit (for a stated size: the device) leaves beside what is in use and what a step takes."""
        self._gauge.trim()
        return self._ceiling - self._gauge.used_bytes() - self.activation_bytes

    def num_blocks(self, num_bytes: int) -> tuple[int, str]:
        """Whole blocks of `num_bytes`, and what decided their number. ValueError with the sum if they are too few."""
        num_blocks, useful = max(0, num_bytes) // self.geometry.block_bytes, self.geometry.num_useful_blocks
        if self._kv.is_size_stated:
            self._check_stated(num_blocks * self.geometry.block_bytes)
            return num_blocks, SIZED_BY_REQUEST
        if num_bytes < self.min_bytes:
            raise ValueError(self.shortage(num_bytes, self._book.parts))
        if num_blocks >= useful:
            return useful, SIZED_BY_USE
        return num_blocks, SIZED_BY_DEFAULT if self._is_stated else SIZED_BY_LIMIT

    def check_before_load(self, **parts: int) -> None:
        """ValueError with the sum where the `parts` that are about to be loaded leave too little."""
        resident = sum(parts.values())
        if self._kv.is_size_stated:
            self._check_stated(self._kv.stated_bytes(self.geometry.block_size, self.geometry.block_bytes), **parts)
        elif (left := self.available_bytes() - resident) < self.min_bytes:
            raise ValueError(self.shortage(left, {**self._book.parts, **parts}))

    def _check_stated(self, num_bytes: int, **parts: int) -> None:
        room = self.available_bytes() - sum(parts.values())
        if num_bytes > room:
            fits = max(0, room) // self.geometry.block_bytes * self.geometry.block_size
            advice = f"; kv.tokens={fits} would fit" if fits else ""
            raise ValueError(f"the stated KV cache takes {size(num_bytes)} but {size(room)} is free: device "
                             f"{size(self._gauge.total_bytes)}, {self._in_use({**self._book.parts, **parts})}{advice}")

    def shortage(self, left_bytes: int, parts: Mapping[str, int]) -> str:
        """The sum by part, and settings of which one alone would make the smallest cache fit."""
        limit, total, missing = self._ceiling, self._gauge.total_bytes, self.min_bytes - left_bytes
        advice = []
        fraction = -(-(limit + missing) * 1000 // total) / 1000
        if fraction <= HIGHEST_ADVISED:
            advice.append(f"kv.memory_fraction={fraction:g}")
        if (longest := self.geometry.longest_fitting(left_bytes)) >= SHORTEST_OF_USE:
            advice.append(f"model.max_model_len={longest}")
        would_fit = f"; would fit: {' or '.join(advice)}" if advice else ""
        return (f"KV cache needs {size(self.min_bytes)} for one request of model.max_model_len="
                f"{self.geometry.max_model_len} but {size(left_bytes)} is left: limit {size(limit)} of "
                f"{size(total)} (kv.memory_fraction), {self._in_use(parts)}{would_fit}")

    def exhausted(self, verb: str) -> str:
        """The sum when the device ran out of memory during `verb`."""
        limit = "" if self.limit_bytes is None else f"limit {size(self.limit_bytes)}, "
        return (f"out of device memory during {verb.replace('_', ' ')}: {limit}device "
                f"{size(self._gauge.total_bytes)}, {self._in_use(self._book.parts)}")

    def _in_use(self, parts: Mapping[str, int]) -> str:
        """Who takes what: the parts of this process, what is expected of it, and the other processes."""
        expected = {"activations": self.activation_bytes, "graphs expected": self.expected_graph_bytes}
        reading = self._gauge.read()
        own = sum(self._book.parts.values()) if reading.process is None else reading.process
        others = {"other processes": max(0, reading.used - own)}
        return sum_text({**parts, **{name: size for name, size in expected.items() if size}, **others})
