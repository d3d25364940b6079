"""The tuned list is the best there is, whatever the histogram, the costs and the budget."""

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.graph.buckets import BUCKET_POLICIES, BucketOptions, BucketTable
from engine.graph.config import GraphConfig
from engine.graph.decode_profile import DecodeProfile, load_profile
from engine.graph.tuner import (
    BYTE_UNITS,
    DEFAULT_MAX_GRAPHS,
    cheapest,
    describe,
    graph_bytes,
    serving_cost,
    tune,
    tune_profile,
)

histograms = st.dictionaries(st.integers(1, 12), st.integers(1, 50), min_size=1, max_size=8)
limits = st.integers(1, 12)
rising_bytes = st.lists(st.integers(1, 9), min_size=12, max_size=12).map(
    lambda increments: dict(enumerate(np.cumsum(increments).tolist(), start=1)))


def lists_ending_at(limit):
    """Every list of batch sizes up to `limit` that ends with it."""
    return [(*some, limit) for num in range(limit) for some in combinations(range(1, limit), num)]


def cost_in(sizes, histogram, cost_of_bucket):
    table = BucketTable(tuple(sizes))
    return sum(num * cost_of_bucket(table.find(size)) for size, num in histogram.items() if size <= table.largest)


def run_directory(tmp_path, batch_sizes, buckets=()):
    """A finished run's directory; `buckets` are (batch size, ms of a replay, bytes)."""
    (tmp_path / "decode_batches.json").write_text(json.dumps({
        "schema_version": 1,
        "batch_sizes": [{"batch_size": size, "num_steps": num} for size, num in batch_sizes.items()],
        "buckets": [{"batch_size": size, "replay_ms": ms, "bytes": num_bytes} for size, ms, num_bytes in buckets]}))
    return str(tmp_path)


@settings(max_examples=60, deadline=None)
@given(histograms, limits, st.integers(1, 5))
def test_no_list_of_as_many_graphs_computes_fewer_rows(histogram, limit, max_graphs):
    tuned = tune(limit, histogram, max_graphs)
    costs = {sizes: cost_in(sizes, histogram, float) for sizes in lists_ending_at(limit)}
    least = min(cost for sizes, cost in costs.items() if len(sizes) <= max_graphs)
    assert tuned.cost == least == costs[tuned.sizes]
    assert len(tuned.sizes) == min(len(sizes) for sizes, cost in costs.items() if cost == least)
    if len(tuned.sizes) > 1:
        assert tuned.cost_with_one_fewer == min(cost for sizes, cost in costs.items() if len(sizes) < len(tuned.sizes))


@settings(max_examples=60, deadline=None)
@given(histograms, limits, st.integers(1, 5), st.dictionaries(st.integers(1, 12), st.floats(0.1, 9), min_size=2))
def test_no_list_of_as_many_graphs_replays_for_less_time(histogram, limit, max_graphs, replay_ms):
    profile = DecodeProfile(histogram, replay_ms)
    tuned = tune_profile(limit, profile, max_graphs)
    least = min(serving_cost(sizes, profile) for sizes in lists_ending_at(limit) if len(sizes) <= max_graphs)
    assert tuned.is_measured and tuned.sizes[-1] == limit and len(tuned.sizes) <= max_graphs
    assert tuned.cost == pytest.approx(least)


@settings(max_examples=60, deadline=None)
@given(histograms, limits, rising_bytes, st.integers(1, 5000))
def test_no_list_within_the_bytes_computes_fewer_rows(histogram, limit, num_bytes, max_bytes):
    profile = DecodeProfile(histogram, {}, num_bytes)
    part = max_bytes / min(BYTE_UNITS, max_bytes)

    def rounded(sizes):
        return sum(np.ceil(graph_bytes(sizes, profile) / part - 1e-9)) * part

    if graph_bytes([limit], profile)[0] > max_bytes:
        with pytest.raises(ValueError, match=f"={max_bytes} is too small: the largest bucket, {limit}, takes"):
            tune_profile(limit, profile, max_graph_bytes=max_bytes)
        return
    tuned = tune_profile(limit, profile, max_graph_bytes=max_bytes)
    assert graph_bytes(tuned.sizes, profile).sum() <= max_bytes * (1 + 1e-9)
    costs = [cost_in(sizes, histogram, float) for sizes in lists_ending_at(limit)
             if rounded(sizes) <= max_bytes * (1 - 1e-9)]
    assert tuned.cost <= min(costs, default=tuned.cost)


def test_the_largest_graph_brings_the_shared_pool_whatever_its_size():
    profile = DecodeProfile({1: 1}, {}, {8: 10, 16: 10, 32: 10, 64: 650})
    assert graph_bytes([8, 16], profile) == pytest.approx([10, 10 + 640 * 16 / 64])
    assert graph_bytes([8, 64], profile) == pytest.approx([10, 650])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.data())
def test_the_cheapest_buckets_under_any_weights_equal_brute_force(num_steps, data):
    num = len(num_steps)
    costs = np.cumsum(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num))).astype(float)
    weights = np.array(data.draw(st.lists(st.integers(1, 6), min_size=num, max_size=num)))
    budget = data.draw(st.integers(int(weights[-1]), int(weights.sum()) + 2))

    def cost(chosen):
        return sum(steps * costs[min(j for j in chosen if j >= i)] for i, steps in enumerate(num_steps))

    lists = [(*some, num - 1) for size in range(num) for some in combinations(range(num - 1), size)]
    affordable = [some for some in lists if weights[list(some)].sum() <= budget]
    best = min(map(cost, affordable))
    chosen = cheapest(np.array(num_steps), costs, weights, budget)
    assert cost(chosen) == best
    assert weights[chosen].sum() == min(weights[list(some)].sum() for some in affordable if cost(some) == best)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(1, 700), st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 600))
def test_it_is_never_worse_than_another_policy_with_as_many_graphs(histogram, limit):
    for policy in BUCKET_POLICIES.keys() - {"tuned"}:
        sizes = BUCKET_POLICIES[policy](limit, BucketOptions(step=20))
        assert tune(limit, histogram, len(sizes)).cost <= cost_in(sizes, histogram, float), policy


def test_without_a_budget_there_are_at_most_sixteen_graphs():
    assert len(tune(100, dict.fromkeys(range(1, 101), 1)).sizes) == DEFAULT_MAX_GRAPHS == 16


def test_steps_above_the_limit_are_left_out_and_counted():
    tuned = tune(8, {4: 10, 8: 30, 9: 5}, 1)
    assert (tuned.sizes, tuned.cost, tuned.num_steps, tuned.num_steps_above) == ((8,), 320, 40, 5)
    assert tuned.padding_waste == pytest.approx(40 / 320)
    nothing = tune(8, {9: 5})
    assert (nothing.sizes, nothing.cost, nothing.padding_waste, nothing.last_bucket_share) == ((8,), 0, 0, None)


def test_measured_replays_decide_where_there_are_some(tmp_path):
    """Buckets 1 to 8 replay in the same time, so that none below 8 is worth a graph; rows would choose otherwise."""
    steps = {1: 100, 8: 100, 16: 100}
    run = run_directory(tmp_path, steps, [(1, 2.0, None), (8, 2.0, None), (16, 4.0, None)])
    assert tune(16, run, 3).sizes == (8, 16)
    assert tune(16, steps, 3).sizes == (1, 8, 16)


def test_replay_times_between_and_beyond_the_measured_ones_lie_on_lines():
    profile = DecodeProfile({1: 1}, {4: 2.0, 8: 2.5, 12: 4.0})
    assert [serving_cost([size], profile) for size in (4, 6, 8, 10, 12)] == [2, 2.25, 2.5, 3.25, 4]
    assert serving_cost([20], profile) == pytest.approx(4 + 8 * 2 / 8)  # the mean slope goes on
    assert serving_cost([1], profile) == pytest.approx(2 - 3 * 2 / 8)
    assert serving_cost([1], DecodeProfile({1: 1}, {4: 1.0, 8: 9.0})) == pytest.approx(1 / 4)  # and never falls below 0


def test_noise_is_averaged_where_a_larger_bucket_replayed_faster():
    profile = DecodeProfile({1: 1}, {1: 1.0, 8: 2.2, 16: 2.0, 24: 4.0})
    assert [serving_cost([size], profile) for size in (1, 8, 16, 24)] == pytest.approx([1, 2.1, 2.1, 4])


def test_a_finished_run_tells_steps_replay_times_and_bytes(tmp_path):
    run = run_directory(tmp_path, {3: 10, 16: 5}, [(16, 4.0, 200), (4, 2.0, 100), (1, None, None)])
    profile = DecodeProfile({3: 10, 16: 5}, {4: 2.0, 16: 4.0}, {4: 100, 16: 200})
    assert load_profile(run) == load_profile(f"{run}/decode_batches.json") == profile
    assert tune(16, run, max_graph_bytes=300).sizes == (3, 16)
    assert tune(16, run, max_graph_bytes=250).sizes == (16,)


def test_the_sentence_says_what_the_list_wastes_and_what_its_last_bucket_is_worth(tmp_path):
    run = run_directory(tmp_path, {3: 1000, 16: 23, 40: 1}, [(4, 2.0, None), (16, 4.0, None)])
    assert describe(tune(16, run)) == ("tuned: 2 buckets for 1,023 decode steps; padding waste 0.0%; one bucket fewer "
                                        "would cost 112.53% more replay time; 1 step of more than 16 requests left out")
    assert describe(tune(4, {3: 1}, 1)) == "tuned: 1 bucket for 1 decode step; padding waste 25.0%"


def test_a_changed_file_is_read_again(tmp_path):
    assert tune(8, run_directory(tmp_path, {3: 10})).sizes == (3, 8)
    assert tune(8, run_directory(tmp_path, {5: 10})).sizes == (5, 8)


def test_keys_may_be_text_as_a_command_line_gives_them():
    assert load_profile({"8": 3, 2: 1, 5: 0}) == DecodeProfile({8: 3, 2: 1})


@pytest.mark.parametrize(("source", "message"), [
    (None, "graph.buckets=tuned needs graph.histogram: the directory of a finished run"),
    (3, "graph.histogram must be a finished run's directory or a mapping .* got 3"),
    ({}, "graph.histogram holds no decode step"),
    ({4: 0}, "graph.histogram holds no decode step"),
    ({0: 3}, "graph.histogram: batch_size must be a whole number in .* got 0"),
    ({"many": 3}, "graph.histogram: batch_size must be a whole number in .* got 'many'"),
    ({4: -1}, "graph.histogram: num_steps of batch size 4 must be a whole number in .* got -1"),
    ({4: True}, "graph.histogram: num_steps of batch size 4 must be"),
    ({"4": 1, 4: 2}, "graph.histogram: batch size 4 is there twice"),
    ("/nowhere", "graph.histogram: /nowhere cannot be read: No such file"),
])
def test_a_histogram_that_cannot_be_used_is_refused_in_one_line(source, message):
    with pytest.raises(ValueError, match=message) as error:
        tune(8, source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not JSON"), ("[]", "must have schema_version 1; got None"), ("{}", "must have schema_version 1; got None"),
    ('{"schema_version": 2}', "must have schema_version 1; got 2"),
    ('{"schema_version": 1, "batch_sizes": [], "buckets": []}', "holds no decode step"),
    ('{"schema_version": 1, "batch_sizes": 3, "buckets": []}', "batch_sizes must be a list of objects; got 3"),
    ('{"schema_version": 1, "batch_sizes": [3], "buckets": []}', "batch_sizes must be a list of objects"),
    ('{"schema_version": 1, "batch_sizes": []}', "buckets must be a list of objects; got None"),
    ('{"schema_version": 1, "batch_sizes": [{"batch_size": 4}], "buckets": []}', "num_steps of batch size 4 must be"),
    ('{"schema_version": 1, "batch_sizes": [{"batch_size": 4, "num_steps": 1}],'
     ' "buckets": [{"batch_size": 4, "replay_ms": NaN}]}', "replay_ms of batch size 4 must be"),
])
def test_a_file_that_is_no_profile_is_named_with_what_is_wrong(tmp_path, text, message):
    (tmp_path / "decode_batches.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^graph.histogram: .*decode_batches.json:? {message}") as error:
        load_profile(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_run_without_its_file_is_named(tmp_path):
    tmp_path.joinpath("decode_batches.json").mkdir()
    with pytest.raises(ValueError, match=r"decode_batches.json cannot be read: Is a directory"):
        load_profile(tmp_path)


def test_bytes_cannot_be_a_budget_where_none_were_measured():
    with pytest.raises(ValueError, match=r"graph\.max_graph_bytes=5 needs the bytes of graphs"):
        tune(8, {3: 1}, max_graph_bytes=5)


def test_a_config_with_tuned_buckets_has_the_tuned_table():
    graph = GraphConfig(buckets="tuned", histogram={3: 100, 6: 90, 7: 1}, max_graphs=3, max_bucket=10)
    assert graph.bucket_table(64).sizes == (3, 6, 10)
    with pytest.raises(ValueError, match=r"graph\.buckets=tuned needs graph\.histogram"):
        GraphConfig(buckets="tuned").bucket_table(64)

