"""Whatever is recorded, in whatever order, for whatever sizes: the answers are those of eager execution."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from decode_cases import check_growing_batch, check_padding_is_inert
from engine import Engine, EngineConfig, GraphConfig, KVConfig, ModelConfig, SamplingParams, SchedulerConfig
from engine.config import Architecture
from engine.decode_step import STAGES, DecodeStep
from engine.graph import recorder
from engine.graph.graphs import capture_order
from engine.graph.parity import buckets_to_check

ARCHITECTURE = Architecture(
    family="qwen3", vocab_size=331, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, qk_norm=True, tie_word_embeddings=True)
CONFIG = EngineConfig(
    model=ModelConfig(architecture=ARCHITECTURE, dtype="float32", max_model_len=256), device="cpu",
    scheduler=SchedulerConfig(max_num_seqs=8), graph=GraphConfig(buckets=[1, 2, 4, 8], parity_check="all"),
    kv=KVConfig(tokens=4096, block_size=16))
SCOPES = ("body", "logits", "step")
MANNERS = [  # of sampling, in one batch
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=4, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.8, min_p=0.01, seed=5, max_tokens=30, ignore_eos=True)]


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(ARCHITECTURE.vocab_size) for _ in range(length)] for length in lengths]


def answers(config, lengths=(5, 40, 16, 1, 33, 17, 64, 2, 9, 30), params=None):
    params = params or [MANNERS[index % len(MANNERS)] for index in range(len(lengths))]
    with Engine(config) as engine:
        tokens = [output.token_ids for output in engine.generate(prompts(lengths), params)]
        return tokens, engine.startup, engine.records


def with_graph(config=CONFIG, **changes):
    return replace(config, graph=replace(config.graph, **changes))


@pytest.fixture(scope="module")
def expected():
    return answers(with_graph(mode="eager"))[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_every_scope_gives_the_tokens_of_eager_execution(scope, overlap, expected):
    config = replace(with_graph(scope=scope), scheduler=replace(CONFIG.scheduler, overlap=overlap))
    tokens, startup, records = answers(config)
    assert tokens == expected
    assert startup.scope == scope
    assert {step.path for step in records.steps if step.phase == "decode"} == {"graph"}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_preempted_requests_draw_the_same_tokens_in_every_scope(scope, overlap, expected):
    config = replace(with_graph(scope=scope), kv=KVConfig(num_blocks=13, block_size=16),
                     scheduler=replace(CONFIG.scheduler, overlap=overlap))
    tokens, _, records = answers(config)
    assert tokens == expected
    assert sum(record.num_preemptions for record in records.requests) > 0


def test_filters_leave_the_step_graph_and_the_record_says_so(expected):
    params = [MANNERS[0], MANNERS[2]]
    tokens, _, records = answers(with_graph(scope="step"), lengths=(5, 40), params=params)
    assert tokens == answers(with_graph(mode="eager"), lengths=(5, 40), params=params)[0]
    reasons = [step.reason for step in records.steps if step.phase == "decode"]
    assert reasons[0] == "captured_sampled_outside"
    assert reasons[-1] == "captured"  # the request with filters has ended first


@pytest.mark.parametrize("order", ["descending", "ascending", "shuffled", [4, 1, 8, 2]])
@pytest.mark.parametrize("pool", ["shared", "separate"])
def test_every_capture_order_passes_the_parity_check(order, pool, expected):
    tokens, startup, _ = answers(with_graph(capture_order=order, pool=pool, scope="step", capture_seed=5))
    assert tokens == expected
    assert startup.capture_order == tuple(capture_order(order, [1, 2, 4, 8], 5))
    assert [record.batch_size for record in startup.buckets] == [1, 2, 4, 8]
    checked = [(record.batch_size, record.num_live) for record in startup.parity]
    assert checked == [(1, 1), (2, 2), (4, 3), (4, 4), (8, 5), (8, 8)]
    assert all(record.passed and record.max_difference == 0 for record in startup.parity)


def test_orders_hold_every_size_once_and_a_seed_fixes_the_shuffle():
    sizes = list(range(1, 30))
    assert capture_order("descending", sizes, 0) == sizes[::-1]
    assert capture_order("ascending", sizes, 0) == sizes
    shuffled = capture_order("shuffled", sizes, 1)
    assert sorted(shuffled) == sizes
    assert shuffled == capture_order("shuffled", sizes, 1) != capture_order("shuffled", sizes, 2)


def test_the_sampled_parity_check_has_both_ends():
    sizes = list(range(2, 80, 3))
    chosen = buckets_to_check("sampled", sizes)
    assert chosen[0] == sizes[0] and chosen[-1] == sizes[-1] and 2 < len(chosen) < len(sizes)
    assert buckets_to_check("all", sizes) == sizes
    assert buckets_to_check("sampled", [1, 2]) == [1, 2]
    assert buckets_to_check("none", sizes) == []


class FaultyRecorder(recorder.EmulatedRecorder):
    """Records the third work wrongly: its replay does `fault` instead."""

    def __init__(self, fault):
        self.fault, self.num_recorded = fault, 0

    def record(self, work):
        self.num_recorded += 1
        return recorder.Recording(self.fault(work) if self.num_recorded == 3 else work)


def does_nothing(work):
    return lambda: None


def does_it_twice(work):
    return lambda: (work(), work())


def gathers_nothing(work):
    def replay():
        with mock.patch.object(DecodeStep, "inputs", lambda *arguments: None):
            work()
    return replay


def stores_nothing(work):
    def replay():
        with mock.patch("engine.kernels.reference._write_live", lambda *arguments: None):
            work()
    return replay


@pytest.mark.parametrize(("scope", "fault"), [
    ("body", does_nothing), ("logits", does_nothing), ("step", does_nothing), ("step", does_it_twice),
    ("step", gathers_nothing), ("body", stores_nothing), ("step", stores_nothing)])
def test_a_bucket_that_replays_wrongly_stops_the_run_or_is_dropped(monkeypatch, scope, fault, expected):
    monkeypatch.setattr("engine.graph.builder.make_recorder", lambda device, has_shared_pool: FaultyRecorder(fault))
    with pytest.raises(ValueError, match=r"graph.parity_check: .*bucket 2 with 2 live rows.*on_parity_failure=disable"):
        Engine(with_graph(scope=scope))
    tokens, startup, records = answers(with_graph(scope=scope, on_parity_failure="disable"))
    assert startup.disabled_buckets == (2,)
    assert tokens == expected
    assert 2 not in {step.bucket for step in records.steps}
    assert any("bucket 2" in warning for warning in records.warnings)


def test_steps_run_eager_when_every_bucket_has_failed(monkeypatch, expected):
    class Broken(recorder.EmulatedRecorder):
        def record(self, work):
            return recorder.Recording(lambda: None)

    monkeypatch.setattr("engine.graph.builder.make_recorder", lambda device, has_shared_pool: Broken())
    tokens, _, records = answers(with_graph(on_parity_failure="disable"))
    assert tokens == expected
    assert {step.reason for step in records.steps if step.phase == "decode"} == {"parity_failed"}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prompt_repeated_in_one_batch_gives_equal_answers(scope, temperature):
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=20, ignore_eos=True)
    for changes in ({"mode": "eager"}, {"buckets": [5]}, {"buckets": [8]}):  # eager, full and padded buckets
        with Engine(with_graph(scope=scope, **changes)) as engine:
            outputs = engine.generate(prompts([33]) * 5, params)
        assert len({tuple(output.token_ids) for output in outputs}) == 1


@pytest.mark.parametrize("scope", SCOPES)
def test_a_batch_that_grows_from_4_to_5_and_shrinks_back_keeps_its_answers(scope):
    check_growing_batch(with_graph(scope=scope), prompts((10, 20, 30, 40, 15)), ends=(30, 30, 30, 30, 8))


@pytest.mark.parametrize("scope", SCOPES)
def test_padding_is_inert(scope):
    with Engine(with_graph(scope=scope)) as engine:
        check_padding_is_inert(engine, num_live=5, size=8, context_len=50)


def test_stages_run_in_the_order_of_their_names():
    with Engine(CONFIG) as engine:
        probe = engine.probe()
        probe.fill(num_live=3, size=4, context_len=9)
        position = probe.step.rows.state.position_N[:3].clone()
        for stage in STAGES:
            probe.eager((stage,))
        assert torch.equal(probe.step.rows.state.position_N[:3], position + 1)
        assert torch.equal(probe.step.rows.state.last_token_N[:3], probe.step.static.tokens_R[:3])


def test_no_graph_left_is_an_error_where_every_batch_must_have_one(monkeypatch):
    monkeypatch.setattr("engine.graph.builder.make_recorder",
                        lambda device, has_shared_pool: FaultyRecorder(does_nothing))
    scheduler = replace(CONFIG.scheduler, max_num_seqs=2, above_largest_bucket="error")
    config = replace(with_graph(on_parity_failure="disable", buckets=[2]), scheduler=scheduler)
    with mock.patch.object(FaultyRecorder, "record", lambda self, work: recorder.Recording(lambda: None)), \
            pytest.raises(ValueError, match=r"scheduler\.above_largest_bucket=error: no graph is left: .*bucket 2"):
        Engine(config)


def test_a_probe_is_refused_while_requests_are_unfinished():
    with Engine(CONFIG) as engine:
        engine.add_request([1, 2, 3], MANNERS[0])
        with pytest.raises(ValueError, match="1 requests are unfinished"):
            engine.probe()


def test_batches_above_the_largest_bucket_run_eager_are_counted_and_warned_of_once():
    """SGLang issue 33483: eager for ever under load, in silence."""
    tokens, _, records = answers(with_graph(buckets=[2, 4]))
    assert {step.reason for step in records.steps if step.num_requests > 4 and step.phase == "decode"} == {
        "above_largest_bucket"}
    assert sum("above the largest bucket" in warning for warning in records.warnings) == 1
    scheduler = replace(CONFIG.scheduler, above_largest_bucket="cap")
    capped = with_graph(replace(CONFIG, scheduler=scheduler), buckets=[2, 4])
    tokens_capped, _, records = answers(capped)
    assert tokens_capped == tokens
    assert max(step.num_running for step in records.steps) == 4
    assert {step.path for step in records.steps if step.phase == "decode"} == {"graph"}


def test_above_largest_bucket_error_refuses_what_leaves_batches_without_a_graph():
    scheduler = replace(CONFIG.scheduler, above_largest_bucket="error")
    with pytest.raises(ValueError, match=r"scheduler\.above_largest_bucket=error: batches of 5 to 8 requests"):
        replace(CONFIG, scheduler=scheduler, graph=GraphConfig(buckets=[4]))
    assert answers(replace(CONFIG, scheduler=scheduler))[0]
