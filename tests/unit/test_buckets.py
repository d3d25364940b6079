"""Bucket policies cover every batch with distinct sizes, for every limit; the table finds the smallest that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.graph.buckets import BUCKET_POLICIES, BucketOptions, BucketTable, least_valuable
from engine.graph.config import GraphConfig
from engine.graph.estimate import estimate_graph_bytes
from engine.records import BucketRecord

LIMITS = range(1, 1101)
OPTIONS = BucketOptions(step=24, histogram={1: 7, 5: 100, 9: 3, 40: 20, 41: 30, 200: 9, 777: 2}, max_graphs=4)
policies = pytest.mark.parametrize("policy", sorted(BUCKET_POLICIES))


@policies
def test_every_batch_up_to_the_limit_has_a_bucket(policy):
    for limit in LIMITS:  # nano-vllm PR 216: 12, 20, 100, 200 and 300 had none for their last batch sizes
        table = BucketTable.build(policy, max_num_seqs=limit, max_bucket=max(LIMITS), options=OPTIONS)
        assert table.largest == limit
        assert table.uncovered(limit) is None


@policies
def test_each_size_is_captured_once_and_none_is_above_the_limit(policy):
    for limit in LIMITS:  # nano-vllm: 1, 2, 3 and 5 captured the same width several times
        sizes = BUCKET_POLICIES[policy](limit, OPTIONS)
        assert sizes == sorted(set(sizes))
        assert 1 <= sizes[0] <= sizes[-1] <= limit


@policies
def test_max_bucket_ends_the_table_of_a_policy(policy):
    table = BucketTable.build(policy, max_num_seqs=1024, max_bucket=500, options=OPTIONS)
    assert table.largest == 500
    assert table.find(501) is None
    assert "501 to 1024" in table.uncovered(1024)


@given(sizes=st.sets(st.integers(1, 600), min_size=1, max_size=20), batch_size=st.integers(1, 700))
def test_the_bucket_of_a_batch_is_the_smallest_that_holds_it(sizes, batch_size):
    table = BucketTable.build(list(sizes), max_num_seqs=600, max_bucket=1)
    assert table.find(batch_size) == min((size for size in sizes if size >= batch_size), default=None)


def sizes_of(policy, limit):
    return BUCKET_POLICIES[policy](limit, OPTIONS)


def test_policies_have_their_published_sizes():
    assert sizes_of("nano_vllm", 40) == [1, 2, 4, 8, 16, 32, 40]
    assert len(sizes_of("nano_vllm", 512)) == 36
    assert sizes_of("pow2", 20) == [1, 2, 4, 8, 16, 20]
    assert sizes_of("vllm", 30) == [1, 2, 4, 8, 16, 24, 30]
    assert sizes_of("vllm", 512)[-4:] == [464, 480, 496, 512]
    assert len(sizes_of("vllm", 512)) == 51
    assert sizes_of("sglang", 30) == [1, 2, 4, 8, 12, 16, 24, 30]
    assert sizes_of("sglang", 600)[-5:] == [496, 512, 544, 576, 600]
    assert len(sizes_of("sglang", 256)) == 36
    assert sizes_of("every", 4) == [1, 2, 3, 4]
    assert sizes_of("step", 50) == [24, 48, 50]


MOST_PADDING = {  # rows, by bucket; `tuned` promises none
    "nano_vllm": lambda bucket: 15,
    "vllm": lambda bucket: 7 if bucket <= 256 else 15,
    "sglang": lambda bucket: 7 if bucket <= 256 else 15 if bucket <= 512 else 31,
    "pow2": lambda bucket: (bucket - 1) // 2,
    "every": lambda bucket: 0,
    "step": lambda bucket: OPTIONS.step - 1,
}


@pytest.mark.parametrize("policy", sorted(BUCKET_POLICIES.keys() - {"tuned"}))
def test_padding_stays_within_what_the_policy_promises(policy):
    for limit in LIMITS:
        table = BucketTable.build(policy, limit, limit, OPTIONS)
        below = (0, *table.sizes[:-1])
        assert all(size - (lower + 1) <= MOST_PADDING[policy](size)
                   for lower, size in zip(below, table.sizes, strict=True))


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


@pytest.mark.parametrize(("changes", "message"), [
    ({"capture_order": "up"}, "graph.capture_order must be one of descending, ascending, shuffled; got 'up'"),
    ({"capture_order": [1, 1]}, "graph.capture_order must name each size once"),
    ({"scope": "all"}, "graph.scope must be one of auto, body, logits, step"),
    ({"pool": "none"}, "graph.pool must be one of"), ({"warmup_runs": 0}, "graph.warmup_runs must be .* at least 1"),
    ({"step": 0}, "graph.step must be"), ({"max_graphs": 0}, "graph.max_graphs must be"),
    ({"parity_check": True}, "graph.parity_check must be one of"),
    ({"max_graphs": 3, "max_graph_bytes": 5}, "at most one of graph.max_graphs and graph.max_graph_bytes"),
    ({"buckets": [2, 2]}, "graph.buckets must name each size once"), ({"buckets": [0]}, "graph.buckets: each size")])
def test_graph_settings_out_of_range_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        GraphConfig(**changes)


def test_a_capture_order_names_every_bucket_once():
    assert GraphConfig(buckets=[1, 4], capture_order=[1, 4]).bucket_table(4).sizes == (1, 4)
    with pytest.raises(ValueError, match=r"graph.capture_order must name each bucket once: the buckets are \[1, 4\]"):
        GraphConfig(buckets=[1, 4], capture_order=[4, 2]).bucket_table(4)


@given(sizes=st.sets(st.integers(1, 200), min_size=2, max_size=12))
def test_the_least_valuable_bucket_is_the_one_whose_loss_pads_least_and_never_the_largest(sizes):
    def padding(sizes):
        table = BucketTable(tuple(sorted(sizes)))
        return sum(table.find(batch_size) - batch_size for batch_size in range(1, table.largest + 1))

    lost = least_valuable(sizes)
    assert lost in sizes - {max(sizes)}
    assert padding(sizes - {lost}) == min(padding(sizes - {size}) for size in sizes - {max(sizes)})


def test_the_last_bucket_cannot_be_lost():
    with pytest.raises(ValueError, match="two or more"):
        least_valuable([8])


@given(pools=st.lists(st.integers(0, 1000), min_size=1, max_size=6), num_buckets=st.integers(6, 60))
def test_the_estimate_of_graphs_is_exact_when_all_were_rehearsed_and_grows_by_their_mean(pools, num_buckets):
    records = [BucketRecord(size, 0.0, 0.0, pool, 2 * pool) for size, pool in enumerate(pools, 1)]
    assert estimate_graph_bytes(records, len(records)) == (sum(pools), 2 * sum(pools))
    further = pools[:-1]
    added = sum(further) * (num_buckets - 1) // len(further) if further else 0
    assert estimate_graph_bytes(records, num_buckets)[0] == pools[-1] + added
