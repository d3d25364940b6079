"""Which decode batch sizes get a graph, and which of them serves a given batch.

A graph has one fixed batch size, its bucket; a batch of five replays bucket 8 with three rows of padding. A policy is a
pure function from the limit (the largest batch to cover) to batch sizes. Its list always ends at the limit, where
nano-vllm's, on which the first policy is modelled, stops at the last multiple of 16 and leaves larger batches no graph.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class BucketOptions:
    """What some policies need beyond the limit; the keys of the same names in `GraphConfig`."""

    step: int = 16
    histogram: Any = None
    max_graphs: int | None = None
    max_graph_bytes: int | None = None


def nano_vllm(limit: int, options: BucketOptions) -> list[int]:
    """1, 2, 4, 8, every multiple of 16, and the limit: never more than 15 rows of padding."""
    return _closed([1, 2, 4, 8, *range(16, limit + 1, 16)], limit)


def vllm(limit: int, options: BucketOptions) -> list[int]:
    """vLLM's default capture sizes: 1, 2, 4, multiples of 8 below 256, of 16 from there; and the limit.

    VllmConfig._set_cudagraph_sizes in vllm/config/vllm.py, main at 000fc94b7, without speculative decoding; its own
    limit is min(2 x max_num_seqs, 512).
    """
    return _closed([1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)], limit)


def sglang(limit: int, options: BucketOptions) -> list[int]:
    """SGLang's: 1, 2, 4, 8, 12, multiples of 8 from 16 to 256, of 16 to 512, of 32 from there; and the limit.

    ServerArgs._generate_cuda_graph_batch_sizes in python/sglang/srt/server_args.py (0.5, without speculative decoding),
    closed on its limit since SGLang's pull request 21005.
    """
    return _closed([1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, limit + 1, 32)], limit)


def pow2(limit: int, options: BucketOptions) -> list[int]:
    """Powers of two and the limit: few graphs, and every batch fills more than half of its bucket."""
    return _closed([1 << exponent for exponent in range(limit.bit_length())], limit)


def every(limit: int, options: BucketOptions) -> list[int]:
    """Every batch size: no padding, and as many graphs as there can be requests."""
    return list(range(1, limit + 1))


def step(limit: int, options: BucketOptions) -> list[int]:
    """Multiples of `graph.step` and the limit."""
    return _closed(list(range(options.step, limit + 1, options.step)), limit)


def tuned(limit: int, options: BucketOptions) -> list[int]:
    """The list that wastes least for the batch sizes of `graph.histogram`, within the budget (`engine.graph.tuner`)."""
    from engine.graph.tuner import tune  # needs numpy, which takes longer to import than all else that --help needs

    return list(tune(limit, options.histogram, options.max_graphs, options.max_graph_bytes).sizes)


def _closed(sizes: list[int], limit: int) -> list[int]:
    return sorted({size for size in sizes if size < limit} | {limit})


BUCKET_POLICIES: dict[str, Callable[[int, BucketOptions], list[int]]] = {
    policy.__name__: policy for policy in (nano_vllm, vllm, sglang, pow2, every, step, tuned)
}


@dataclass(frozen=True)
class BucketTable:
    """The captured batch sizes in ascending order, and the lookup from a batch to its bucket."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.sizes and self.sizes[0] >= 1, f"a bucket table needs sizes of at least 1: {self.sizes}"
        assert all(a < b for a, b in pairwise(self.sizes)), f"bucket sizes must ascend: {self.sizes}"

    @classmethod
    def build(cls, buckets: str | Sequence[int], max_num_seqs: int, max_bucket: int,
              options: BucketOptions = BucketOptions()) -> "BucketTable":
        """The table of a policy (up to `max_num_seqs` and `max_bucket`), or of an explicit list, used exactly as given.

        Raises ValueError for a size above `max_num_seqs`: no batch could ever fill it.
        """
        if isinstance(buckets, str):
            return cls(tuple(BUCKET_POLICIES[buckets](min(max_num_seqs, max_bucket), options)))
        for size in buckets:
            if size > max_num_seqs:
                raise ValueError(f"graph.buckets: {size} is above scheduler.max_num_seqs={max_num_seqs}")
        return cls(tuple(sorted(buckets)))

    @property
    def largest(self) -> int:
        """The largest captured batch size."""
        return self.sizes[-1]

    def find(self, batch_size: int) -> int | None:
        """The smallest bucket that holds `batch_size` requests; None above the largest."""
        index = bisect_left(self.sizes, batch_size)
        return self.sizes[index] if index < len(self.sizes) else None

    def without(self, sizes: Collection[int]) -> "BucketTable | None":
        """The table less `sizes`; None if nothing is left."""
        kept = tuple(size for size in self.sizes if size not in sizes)
        return BucketTable(kept) if kept else None

    def uncovered(self, max_num_seqs: int) -> str | None:
        """A sentence that names the batch sizes without a bucket; None when every batch has one."""
        if self.largest >= max_num_seqs:
            return None
        first = self.largest + 1
        span = f"{first}" if first == max_num_seqs else f"{first} to {max_num_seqs}"
        return (f"batches of {span} requests run eager: the largest bucket is {self.largest}, "
                f"scheduler.max_num_seqs is {max_num_seqs}")


def least_valuable(sizes: Collection[int]) -> int:
    """The size, never the largest, whose loss adds the least padding were all batch sizes equally likely.

    The batches that it served, as many as its distance to the size below, would go to the one above. ValueError for
    fewer than two sizes.
    """
    ordered = sorted(sizes)
    if len(ordered) < 2:
        raise ValueError(f"of two or more sizes one can go; got {ordered}")
    neighbours = zip((0, *ordered[:-2]), ordered[:-1], ordered[1:], strict=True)
    added = {size: (size - below) * (above - size) for below, size, above in neighbours}
    return min(added, key=lambda size: (added[size], size))
