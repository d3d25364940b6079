"""Bucket policies cover every batch with distinct sizes, for every limit; the table finds the smallest that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.graph.buckets import BUCKET_POLICIES, BucketTable

LIMITS = range(1, 1101)
policies = pytest.mark.parametrize("policy", sorted(BUCKET_POLICIES))


@policies
def test_every_batch_up_to_the_limit_has_a_bucket(policy):
    for limit in LIMITS:  # nano-vllm PR 216: 12, 20, 100, 200 and 300 had none for their last batch sizes
        table = BucketTable.build(policy, max_num_seqs=limit, max_bucket=max(LIMITS))
        assert table.largest == limit
        assert table.uncovered(limit) is None


@policies
def test_each_size_is_captured_once_and_none_is_above_the_limit(policy):
    for limit in LIMITS:  # nano-vllm: 1, 2, 3 and 5 captured the same width several times
        sizes = BUCKET_POLICIES[policy](limit)
        assert sizes == sorted(set(sizes))
        assert 1 <= sizes[0] <= sizes[-1] <= limit


@policies
def test_max_bucket_ends_the_table_of_a_policy(policy):
    table = BucketTable.build(policy, max_num_seqs=1024, max_bucket=500)
    assert table.largest == 500
    assert table.find(501) is None
    assert "501 to 1024" in table.uncovered(1024)


@given(sizes=st.sets(st.integers(1, 600), min_size=1, max_size=20), batch_size=st.integers(1, 700))
def test_the_bucket_of_a_batch_is_the_smallest_that_holds_it(sizes, batch_size):
    table = BucketTable.build(list(sizes), max_num_seqs=600, max_bucket=1)
    assert table.find(batch_size) == min((size for size in sizes if size >= batch_size), default=None)


def test_nano_vllm_and_pow2_have_their_known_sizes():
    assert BUCKET_POLICIES["nano_vllm"](40) == [1, 2, 4, 8, 16, 32, 40]
    assert len(BUCKET_POLICIES["nano_vllm"](512)) == 36
    assert BUCKET_POLICIES["pow2"](20) == [1, 2, 4, 8, 16, 20]


@policies
def test_padding_stays_within_what_the_policy_promises(policy):
    most = {"nano_vllm": lambda bucket: 15, "pow2": lambda bucket: (bucket - 1) // 2}[policy]
    for limit in LIMITS:
        table = BucketTable.build(policy, limit, limit)
        below = (0, *table.sizes[:-1])
        assert all(size - (lower + 1) <= most(size) for lower, size in zip(below, table.sizes, strict=True))


@pytest.mark.parametrize("size", [42, 257, 300])
def test_an_explicit_size_is_used_exactly_as_given(size):
    table = BucketTable.build([size, 1], max_num_seqs=size, max_bucket=32)  # vLLM issues 54933, 37865: rounded down
    assert table.sizes == (1, size)
    assert table.find(size) == size


def test_an_explicit_size_above_max_num_seqs_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^graph\.buckets: 24 is above scheduler\.max_num_seqs=16$"):
        BucketTable.build([1, 24], max_num_seqs=16, max_bucket=512)


def test_a_table_that_leaves_batches_uncovered_says_which():
    table = BucketTable.build([8, 24], max_num_seqs=256, max_bucket=512)
    assert table.uncovered(256) == ("batches of 25 to 256 requests run eager: the largest bucket is 24, "
                                    "scheduler.max_num_seqs is 256")
    assert table.uncovered(25).startswith("batches of 25 requests run eager")
    assert table.uncovered(24) is None
