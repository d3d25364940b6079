"""Metrics are held against brute force on random timelines, and against definitions on small ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.metrics import (
    LATENCIES,
    METRICS,
    STATISTICS,
    compute_metrics,
    e2e_ms,
    graph_metrics,
    itl_ms,
    kv_metrics,
    latency_samples,
    queue_ms,
    step_durations_s,
    summarise,
    throughput,
    tpot_ms,
    ttft_ms,
)
from experiments.timeline import time_series
from run_records import make_finished, make_request, make_startup, make_step

durations = st.floats(0.001, 10, allow_nan=False)


@st.composite
def requests(draw):
    """Requests with arrival, queueing and gaps that are all positive; some end without a token."""
    records = []
    for number in range(draw(st.integers(1, 8))):
        arrival_s = draw(st.floats(0, 100))
        gaps = draw(st.lists(durations, max_size=6))
        scheduled_s = arrival_s + draw(durations)
        times = tuple(np.cumsum([scheduled_s, *gaps])[1:].tolist())
        records.append(make_request(number, times, arrival_s=arrival_s,
                                    first_scheduled_s=scheduled_s if times else None))
    return records


@st.composite
def steps(draw):
    records = []
    for number in range(draw(st.integers(0, 40))):
        live, padded = draw(st.integers(1, 8)), draw(st.integers(0, 4))
        is_graph = draw(st.booleans())
        records.append(make_step(number, num_requests=live, path="graph" if is_graph else "eager",
                                 num_padded_rows=padded if is_graph else 0, num_used_blocks=draw(st.integers(0, 16))))
    return records


@given(requests())
def test_the_parts_of_a_requests_time_add_up_to_its_end_to_end_latency(records):
    for request in filter(lambda request: request.token_times_s, records):
        assert math.isclose(ttft_ms(request) + sum(itl_ms(request)), e2e_ms(request), rel_tol=1e-9, abs_tol=1e-6)
        assert queue_ms(request) <= ttft_ms(request)


@given(requests())
def test_tpot_is_the_mean_gap_and_leaves_out_the_first_token(records):
    """guidellm issue 1144: TPOT included the time to the first token."""
    for request in records:
        gaps = itl_ms(request)
        expected = sum(gaps) / len(gaps) if gaps else None
        assert tpot_ms(request) == (None if expected is None else pytest.approx(expected))


def test_tpot_does_not_change_with_queueing_and_prefill():
    late = make_request(token_times_s=(9.0, 9.5, 10.0))
    early = make_request(token_times_s=(1.0, 1.5, 2.0))
    assert tpot_ms(late) == tpot_ms(early) == 500.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_statistics_agree_with_brute_force(samples):
    found = summarise(samples)
    ordered = sorted(samples)
    for name in ("p50", "p90", "p95", "p99"):
        place = (len(ordered) - 1) * int(name[1:]) / 100
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        assert found[name] == pytest.approx(low + (high - low) * (place - math.floor(place)), rel=1e-9, abs=1e-9)
    mean = math.fsum(samples) / len(samples)
    assert found["mean"] == pytest.approx(mean, abs=1e-9)
    variance = math.fsum((value - mean) ** 2 for value in samples) / len(samples)
    assert found["std"] == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-6)
    assert (found["max"], found["count"]) == (ordered[-1], len(ordered))
    assert found.keys() == STATISTICS.keys()


def test_no_sample_has_a_count_and_nothing_else():
    assert summarise([]) == {"count": 0}


@given(requests())
def test_throughput_is_tokens_over_first_arrival_to_last_token(records):
    found = throughput(records)
    served = [request for request in records if request.token_times_s]
    assert found["throughput/num_requests"] + found["throughput/num_failed_requests"] == len(records)
    if not served:
        assert "throughput/output_throughput" not in found
        return
    duration_s = max(time_s for request in served for time_s in request.token_times_s) \
        - min(request.arrival_s for request in served)
    num_output = sum(len(request.token_times_s) for request in served)
    assert found["throughput/output_throughput"] == pytest.approx(num_output / duration_s)
    assert found["throughput/total_token_throughput"] == pytest.approx((num_output + 10 * len(served)) / duration_s)
    assert found["throughput/request_throughput"] == pytest.approx(len(served) / duration_s)


@given(steps())
def test_graph_metrics_count_rows_and_steps(records):
    found = graph_metrics(records, make_startup())
    replayed = [step for step in records if step.path == "graph"]
    if records:
        assert found["graph/graph_hit_rate"] == len(replayed) / len(records)
    if replayed:
        live = sum(step.num_requests for step in replayed)
        padded = live + sum(step.num_padded_rows for step in replayed)
        assert found["graph/padding_waste"] == pytest.approx((padded - live) / padded)
        assert 0 <= found["graph/padding_waste"] < 1
    else:
        assert "graph/padding_waste" not in found
    assert found["graph/pool_bytes"] == 3072
    assert "graph/outside_bytes" not in found, "the device did not report it"


def test_prefill_steps_do_not_lower_the_graph_hit_rate():
    assert graph_metrics([make_step(0, "prefill"), make_step(1)], make_startup())["graph/graph_hit_rate"] == 1


def test_the_prefix_hit_rate_is_hit_tokens_over_prompt_tokens():
    """vllm issue 54227: repeats that hit the prefix cache looked fast, and nothing said so."""
    found = kv_metrics([make_step(0)], [make_request(0), make_request(1, num_cached_tokens=8)], make_startup())
    assert (found["kv/num_prefix_hit_tokens"], found["kv/prefix_hit_rate"]) == (8, 8 / 20)


@given(steps(), st.integers(1, 10))
def test_a_time_series_is_thin_and_loses_no_token(records, max_points):
    rows = time_series(records, make_startup(), max_points=max_points)
    assert len(rows) <= max_points
    before_s, num_tokens = 0.0, 0.0
    for row in rows:
        num_tokens += row["throughput/output_tokens_per_s"] * (row["time_s"] - before_s)
        before_s = row["time_s"]
    assert num_tokens == pytest.approx(sum(step.num_requests for step in records))


def test_every_metric_has_a_definition_and_a_unit():
    finished = make_finished()
    found = compute_metrics(finished.records.steps, finished.records.requests, finished.startup, finished.memory)
    assert found.keys() <= METRICS.keys()
    assert all(metric.definition for metric in METRICS.values())
    assert all(type(value) in (int, float) for value in found.values())
    assert {f"latency/{name}_mean" for name in LATENCIES} <= found.keys()


def test_a_run_without_a_token_has_counts_and_no_latency():
    rejected = make_request(0, (), first_scheduled_s=None, finish_reason="rejected", error="too long")
    found = compute_metrics([], [rejected], make_startup(buckets=()), {})
    assert found["throughput/num_failed_requests"] == 1
    assert found["latency/ttft_ms_count"] == 0
    assert not any(math.isnan(value) for value in found.values())
    assert latency_samples([rejected]) == {name: [] for name in LATENCIES}


def test_a_measurement_without_requests_has_no_figure_of_serving():
    found = compute_metrics([], [], make_startup(), {"rss_bytes": 5})
    assert {name.partition("/")[0] for name in found} == {"graph", "kv", "memory", "startup"}
    assert found["memory/rss_bytes"] == 5


def test_overlapping_steps_are_not_counted_twice():
    """With a commit that lags, a step is scheduled before the one before it ends; durations sum to the time passed."""
    apart = [make_step(0, start_s=0.0, end_s=1.0), make_step(1, start_s=1.5, end_s=2.0)]
    lagging = [make_step(0, start_s=0.0, end_s=1.0), make_step(1, start_s=0.5, end_s=2.0),
               make_step(2, start_s=1.1, end_s=3.0)]
    assert step_durations_s(apart) == [1.0, 0.5]
    assert step_durations_s(lagging) == [1.0, 1.0, 1.0]
