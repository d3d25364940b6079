"""What all graphs will take, from those that were captured for measure."""

from collections.abc import Sequence

from engine.records import BucketRecord


def estimate_graph_bytes(records: Sequence[BucketRecord], num_buckets: int) -> tuple[int, int]:
    """Bytes inside the pool and outside it that `num_buckets` graphs will take, as `records` (ascending) show.

    The largest sizes the pool, and each further one adds as much as the mean of the others that were captured. For
    another graph.capture_order than descending the pool may grow further, and the estimate is short of that.
    """
    *further, largest = records
    num_further = num_buckets - 1
    pool, outside = largest.pool_bytes or 0, largest.outside_bytes or 0
    if further:
        pool += sum(record.pool_bytes or 0 for record in further) * num_further // len(further)
        outside += sum(record.outside_bytes or 0 for record in further) * num_further // len(further)
    return pool, outside
