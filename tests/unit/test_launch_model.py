"""The launch model predicts from its terms alone, and its sentences follow from the numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import GraphConfig, SchedulerConfig
from experiments.config import WorkloadConfig
from experiments.launch_model import (
    LAUNCH_QUEUE,
    MODEL_COLUMNS,
    PREFILL_COLUMNS,
    TERM_COLUMNS,
    DecodeMeasurement,
    LaunchCost,
    PrefillMeasurement,
    Timing,
    Work,
    decode_sentences,
    hidden_launches_sentence,
    idle_sentences,
    overlap_sentences,
    partial_row,
    prefill_sentences,
    price_sentence,
    steadiness_sentences,
    table,
)
from experiments.launch_overhead import MAX_STEPS, measurements
from experiments.launch_timing import work_in_trace
from run_records import make_config

times_ms = st.floats(0.001, 1000)
timings = st.builds(Timing, times_ms, times_ms)
works = st.integers(1, 2000).flatmap(lambda num_kernels: st.builds(
    Work, st.just(num_kernels), st.integers(0, num_kernels), st.integers(0, 100), times_ms))
steps = st.builds(DecodeMeasurement, st.integers(1, 512), st.integers(1, 4096), works, st.integers(1, 2000), times_ms,
                  times_ms, st.builds(LaunchCost, times_ms, times_ms), timings, timings)
# The lesson's: 400 kernels of 5 us and 1.5 ms of compute.
LESSON = DecodeMeasurement(
    batch_size=1, context_tokens=512, work=Work(400, 100, 0, 1.5), num_graph_nodes=400, empty_graph_ms=0.45,
    empty_kernels_ms=0.4, cost=LaunchCost(5.0, 5.0), eager=Timing(2.0, 3.5), graph=Timing(0.01, 1.55))


def prefill(num_tokens: int, host_ms: float, compute_ms: float, num_launches: int = 400) -> PrefillMeasurement:
    return PrefillMeasurement(num_tokens, Work(num_launches, 0, 0, compute_ms),
                              Timing(host_ms, max(host_ms, compute_ms)))


@given(steps, timings, timings)
def test_no_term_comes_from_the_step_times_that_it_predicts(step, eager, graph):
    other = replace(step, eager=eager, graph=graph)
    assert (other.predicted_eager_ms, other.predicted_graph_ms) == (step.predicted_eager_ms, step.predicted_graph_ms)
    assert table(TERM_COLUMNS, [other]) == table(TERM_COLUMNS, [step])


@given(steps)
def test_a_launch_is_priced_between_the_two_empty_kernels(step):
    low, high = sorted((step.cost.torch_us, step.cost.triton_us))
    assert low <= step.launch_us * (1 + 1e-9) and step.launch_us <= high * (1 + 1e-9)


@given(steps)
def test_what_the_graph_leaves_out_is_launched_beside_it(step):
    whole = replace(step, num_graph_nodes=step.work.num_launches)
    half = replace(step, num_graph_nodes=step.work.num_launches // 2)
    num_outside = step.work.num_launches - step.work.num_launches // 2
    assert half.predicted_graph_ms - whole.predicted_graph_ms == pytest.approx(num_outside * step.launch_us / 1000,
                                                                               abs=1e-6)


@given(st.lists(steps, min_size=1, max_size=4), st.lists(st.builds(prefill, st.integers(1, 16384), times_ms, times_ms)))
def test_whatever_was_measured_has_its_sentences(measured, prefills):
    sentences = [*decode_sentences(measured), *prefill_sentences(prefills)]
    assert all(sentence.endswith(".") and "nan" not in sentence for sentence in sentences)


def test_the_lessons_example():
    assert LESSON.predicted_eager_ms == pytest.approx(3.5)
    assert LESSON.predicted_graph_ms == pytest.approx(1.55)
    assert LESSON.predicted_speedup == pytest.approx(2.26, abs=0.005)
    [row] = table(MODEL_COLUMNS, [LESSON])
    assert row["eager_predicted_ms"] == pytest.approx(row["eager_ms"])
    assert "Speed-up by the graph, predicted and measured: 2.26x and 2.26x at batch 1." in decode_sentences([LESSON])


def test_an_eager_step_near_the_larger_of_host_and_gpu_is_said_to_overlap():
    overlapped = replace(LESSON, batch_size=8, eager=Timing(3.0, 3.1))
    added, side_by_side = overlap_sentences([LESSON, overlapped])
    assert "add up" in added and "batch 1:" in added
    assert "side by side" in side_by_side and "batch 8:" in side_by_side


@pytest.mark.parametrize(("host_ms", "said"), [(2.0, "is right"), (6.0, "3.0 times as much"), (1.0, "too large")])
def test_the_price_of_a_launch_is_compared_with_an_empty_kernels(host_ms, said):
    assert said in price_sentence([replace(LESSON, eager=Timing(host_ms, 3.5))])


@pytest.mark.parametrize(("graph_ms", "said"), [
    (1.4, "more than the 1.40 ms"), (1.55, "compute alone, within 5%"), (1.9, "no kernel runs for 0.40 of 1.90 ms")])
def test_gaps_between_kernels_are_what_a_replay_takes_beyond_them(graph_ms, said):
    [sentence] = idle_sentences([replace(LESSON, batch_size=8), replace(LESSON, graph=Timing(0.01, graph_ms))])
    assert said in sentence


def test_launches_are_hidden_where_compute_is_longer():
    assert hidden_launches_sentence([LESSON]).startswith("At every batch size measured launching takes longer")
    large = replace(LESSON, batch_size=256, work=Work(400, 100, 0, 5.0))
    assert hidden_launches_sentence([LESSON, large]).startswith("At batch 256 compute takes longer")


def test_prefill_is_bound_by_launches_up_to_the_length_that_hides_them():
    no_graph, launch_bound = prefill_sentences([prefill(16, 4.0, 1.0), prefill(512, 4.1, 3.0), prefill(1024, 4.2, 6.0),
                                                prefill(2048, 4.2, 12.0)])
    assert no_graph.startswith("Prefill of 1,024 tokens and more needs no graph")
    assert launch_bound.startswith("Launching binds prefill below 1,024 tokens") and "4.0 times" in launch_bound


def test_prefill_of_one_kind_at_every_length_is_said_so():
    [always] = prefill_sentences([prefill(16, 4.0, 1.0), prefill(32, 4.0, 2.0)])
    assert "at every length measured" in always
    [never] = prefill_sentences([prefill(16, 1.0, 4.0), prefill(32, 1.0, 5.0)])
    assert never.startswith("Prefill of 16 tokens and more needs no graph")


def test_more_launches_than_the_queue_holds_are_pointed_out():
    assert "may include waiting" in prefill_sentences([prefill(16, 1.0, 4.0, LAUNCH_QUEUE + 1)])[-1]


def test_a_row_of_which_little_is_known_has_every_column():
    row = partial_row(PREFILL_COLUMNS, num_tokens=16, total_ms=2.0)
    assert row.keys() == PREFILL_COLUMNS.keys()
    assert row["num_launches"] is None and row["total_ms"] == 2.0


def test_a_traces_kernels_and_copies_are_counted_and_their_durations_added():
    events = [
        {"ph": "X", "cat": "kernel", "name": "_store_kernel", "dur": 2.5},
        {"ph": "X", "cat": "kernel", "name": "triton_poi_fused_div_0", "dur": 1.0},
        {"ph": "X", "cat": "kernel", "name": "void gemm<bf16>(...)", "dur": 6.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "dur": 0.5},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 4.0},
        {"ph": "M", "name": "process_name"}]
    assert work_in_trace(events, {"_store_kernel"}) == Work(3, 2, 1, 0.01)


@given(st.integers(1, 4096), st.integers(4096, 20000))
def test_contexts_and_prompts_stay_within_what_the_engine_can_hold(prompt_tokens, max_num_batched_tokens):
    config = make_config(measure="launch_overhead",
                         workload=WorkloadConfig(kind="ladder", batch_sizes=[8, 1], prompt_tokens=prompt_tokens),
                         scheduler=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens))
    plan = measurements(config, captured=(1, 4, 8), max_num_live=8)
    assert plan.batch_sizes == (1, 8)
    assert 1 <= plan.context_tokens <= config.model.max_model_len - MAX_STEPS
    assert plan.prefill_tokens[0] == 16 and plan.prefill_tokens[-1] == 4096 == config.model.max_model_len
    assert bool(plan.notes) == (plan.context_tokens != prompt_tokens)


def test_a_batch_size_that_cannot_be_measured_is_named_and_none_at_all_refused():
    config = make_config(workload=WorkloadConfig(kind="ladder", batch_sizes=[1, 3, 64]))
    [note] = measurements(config, captured=(1, 64), max_num_live=8).notes
    assert note.endswith("batch 3, 64.")
    with pytest.raises(ValueError, match=r"workload.batch_sizes=\[1, 3, 64\]: captured are \[8\]"):
        measurements(config, captured=(8,), max_num_live=8)


def test_without_graphs_there_is_nothing_to_compare():
    with pytest.raises(ValueError, match=r"graph\.mode must be full"):
        make_config(measure="launch_overhead", graph=GraphConfig(mode="eager"))


def test_a_host_whose_speed_changed_is_told():
    assert steadiness_sentences(LaunchCost(6.0, 8.0), LaunchCost(6.0, 9.0)) == []
    for before, after in ((8.0, 16.0), (16.0, 8.0)):
        [sentence] = steadiness_sentences(LaunchCost(6.0, before), LaunchCost(6.0, after))
        assert f"took {before:.1f} us before and {after:.1f} us after" in sentence and "factor of 2.0" in sentence
