"""A plan says beforehand what the run then is: its buckets, its memory, its batches; and names what conflicts."""

import io
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from engine import Engine, GraphConfig, KVConfig, ModelConfig, SchedulerConfig
from engine.config import Architecture
from engine.graph.buckets import BUCKET_POLICIES, BucketOptions, BucketTable
from engine.kernels.reference import ReferenceAttention
from engine.model.decoder import Decoder
from experiments import machine
from experiments.config import PlanConfig, WorkloadConfig
from experiments.expected_batches import ExpectedBatches
from experiments.memory_plan import plan_memory
from experiments.plan import bucket_use, make_plan, size_list, uniform_padding, unreached_buckets
from experiments.plan_report import plan_parts
from experiments.result import write_json
from experiments.worker import timed_region
from experiments.workload import build_workload
from run_records import make_config

GIB = 1 << 30
H200 = PlanConfig(device_bytes=140 * GIB)
SMALL = WorkloadConfig(kind="fixed", num_requests=6, prompt_tokens=20, max_tokens=30)
policies = st.sampled_from(sorted(set(BUCKET_POLICIES) - {"tuned"}))


def planned(**sections):
    """A plan for a tiny model of 64 tokens."""
    base = make_config()
    model = replace(base.model, max_model_len=64)
    return replace(base, **{"device": "cpu", "mode": "plan", "model": model, "workload": SMALL, **sections})


def text_of(plan):
    console = Console(file=io.StringIO(), width=250)
    for part in plan_parts(plan):
        console.print(part)
    return console.file.getvalue()


def conflicts(**sections):
    return "\n".join(make_plan(planned(**sections)).conflicts)


@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"qkv_bias": True, "family": "qwen2"}, {"qk_norm": True, "family": "qwen3"},
    {"o_bias": True, "mlp_bias": True, "num_key_value_heads": 1}])
def test_parameters_and_bytes_are_those_of_the_decoder(changes):
    config = planned()
    arch = replace(config.model.architecture, **changes)
    config = replace(config, model=replace(config.model, architecture=arch))
    memory = plan_memory(config, None)
    decoder = Decoder(arch, ReferenceAttention(), torch.float32, torch.device("cpu"), config.model.max_model_len)
    assert (memory.num_parameters, memory.weight_bytes) == (decoder.num_parameters, decoder.num_bytes)


def test_the_published_size_of_a_model_is_found():
    arch = Architecture(family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072,
                        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                        max_position_embeddings=40960, tie_word_embeddings=True, qk_norm=True)
    memory = plan_memory(planned(model=ModelConfig(path="Qwen/Qwen3-0.6B", architecture=arch)), None)
    assert memory.num_parameters == 596_049_920, "the model card's, tied embeddings once"


@pytest.mark.parametrize("kv", [KVConfig(), KVConfig(tokens=1000), KVConfig(bytes=3_000_000), KVConfig(num_blocks=7),
                                KVConfig(num_blocks=9, block_size=16)])
def test_the_plan_is_what_the_engine_then_does(kv):
    config = planned(kv=kv, graph=GraphConfig(buckets="pow2"), scheduler=SchedulerConfig(max_num_seqs=12))
    plan = make_plan(config)
    with Engine(config, on_stage=lambda stage: None) as engine:
        startup = engine.startup
    memory = plan.memory
    geometry = memory.geometry
    assert (memory.num_blocks, geometry.block_size, memory.kv_bytes, geometry.bytes_per_token, memory.num_parameters) \
        == (startup.num_kv_blocks, startup.block_size, startup.kv_bytes, startup.kv_bytes_per_token,
            startup.num_parameters)
    assert memory.weight_bytes == startup.ledger.phase("ready").parts["weights"]
    assert plan.buckets.sizes == tuple(bucket.batch_size for bucket in startup.buckets)
    assert memory.kv_policy == startup.kv_policy


@pytest.mark.parametrize("sections", [
    {},
    {"scheduler": SchedulerConfig(max_num_seqs=4)},
    {"scheduler": SchedulerConfig(max_num_seqs=4, overlap=True)},
    {"scheduler": SchedulerConfig(max_num_seqs=6, above_largest_bucket="cap"), "graph": GraphConfig(buckets=[1, 3])},
    {"kv": KVConfig(num_blocks=13, block_size=16)},
    {"kv": KVConfig(num_blocks=13, block_size=16), "scheduler": SchedulerConfig(overlap=True)},
    {"workload": WorkloadConfig(kind="ladder", batch_sizes=[1, 5, 2], prompt_tokens=9, max_tokens=8)},
], ids=lambda sections: " ".join(sections) or "default")
def test_the_expected_batches_are_those_that_the_engine_forms(sections):
    config = planned(**sections)
    expected = make_plan(config).batches
    items = build_workload(config, None, config.model.architecture.vocab_size)
    with Engine(config, on_stage=lambda stage: None) as engine:
        timed_region(engine, items, lambda progress: None)
        steps = engine.records.steps
    assert expected.num_steps == Counter(step.num_requests for step in steps if step.phase == "decode")
    assert expected.num_prefill_steps == sum(step.phase == "prefill" for step in steps)
    assert expected.num_preemptions == sum(step.num_preempted for step in steps)
    assert expected.is_exact and not expected.rejections


def test_small_blocks_and_many_requests_do_preempt():
    """The comparison with the engine means little if nothing is ever preempted in it."""
    assert make_plan(planned(kv=KVConfig(num_blocks=13, block_size=16))).batches.num_preemptions > 0


@given(st.integers(1, 200), policies)
def test_padding_over_equally_likely_batches_agrees_with_brute_force(limit, policy):
    table = BucketTable.build(policy, limit, 512)
    padding = uniform_padding(table)
    pairs = [(size, next(bucket for bucket in table.sizes if bucket >= size)) for size in range(1, limit + 1)]
    padded = sum(bucket for _, bucket in pairs)
    assert padding.mean_waste == pytest.approx(sum(bucket - size for size, bucket in pairs) / padded, abs=1e-12)
    assert padding.worst_waste == pytest.approx(max(1 - size / bucket for size, bucket in pairs), abs=1e-12)


@given(st.sets(st.integers(1, 60), min_size=1).map(sorted) | st.tuples(st.integers(1, 300), policies).map(
    lambda drawn: BUCKET_POLICIES[drawn[1]](drawn[0], BucketOptions())))
def test_a_list_of_sizes_is_told_whole(sizes):
    told = []
    for part in size_list(sizes).split(", "):
        first, last, step = re.fullmatch(r"(\d+)(?: to (\d+)(?: by (\d+))?)?", part).groups()
        told += range(int(first), int(last or first) + 1, int(step or 1))
    assert told == sizes


def test_evenly_spaced_sizes_are_told_by_their_ends():
    assert size_list(BUCKET_POLICIES["nano_vllm"](100, BucketOptions())) == "1, 2, 4, 8, 16 to 96 by 16, 100"
    assert size_list([1, 2, 3, 4]) == "1 to 4"


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1), st.integers(1, 30), policies)
def test_every_expected_step_is_counted_in_one_bucket_or_as_eager(num_steps, limit, policy):
    table = BucketTable.build(policy, limit, 512)
    batches = ExpectedBatches(1, 0, num_steps, 0, 0, (), True)
    uses = bucket_use(table, batches)
    assert sum(use.num_steps for use in uses) == sum(num_steps.values())
    assert sum(use.num_live_rows for use in uses) == sum(size * count for size, count in num_steps.items())
    assert all(0 <= use.padding_waste < 1 for use in uses)
    idle = unreached_buckets(table, batches)
    assert set(table.sizes) == {use.bucket for use in uses if use.bucket is not None} | set(idle)
    may_end_early = unreached_buckets(table, replace(batches, is_exact=False))
    assert set(may_end_early) <= set(idle), "smaller batches than expected may come"


@pytest.mark.parametrize(("sections", "said"), [
    ({"graph": GraphConfig(buckets=[1, 2])}, "batches of 3 to 256 requests run eager"),
    ({"graph": GraphConfig(buckets=[1, 2]), "scheduler": SchedulerConfig(above_largest_bucket="cap")},
     "at most 2 requests run at once"),
    ({}, "20 buckets never replayed by this workload: 1, 2, 4, 16 to 256 by 16"),
    ({}, "scheduler.max_num_seqs=256 is above the 6 requests that workload.kind=fixed sends at once"),
    ({"kv": KVConfig(tokens=40, block_size=10)}, "40 tokens, below one request of model.max_model_len=64"),
    ({"kv": KVConfig(tokens=40, block_size=10)}, "6 of 6 requests would be rejected; the first needs 5 KV blocks"),
    ({"kv": KVConfig(num_blocks=10, block_size=10)}, "would take 1,792 KV blocks and 10 fit: beyond 1 such requests"),
    ({"kv": KVConfig(num_blocks=10, block_size=10)}, "KV blocks run out"),
    ({"plan": PlanConfig(device_bytes=1 << 20)}, "weights, buffers, graphs and KV cache take"),
    ({"device": "auto", "plan": PlanConfig(device_bytes=1 << 16)}, "so the run would be refused: weights"),
    ({"graph": GraphConfig(mode="eager", buckets="pow2")}, "graph.buckets has no effect: graph.mode=eager"),
])
def test_what_conflicts_is_said_in_one_line(sections, said):
    [line] = [line for line in conflicts(**sections).splitlines() if said in line]
    assert line


def test_a_run_whose_parts_fit_has_no_conflict():
    sections = {"scheduler": SchedulerConfig(max_num_seqs=6), "graph": GraphConfig(buckets=[6])}
    assert conflicts(**sections) == ""


def test_a_gpu_is_planned_for_where_there_is_none(monkeypatch):
    monkeypatch.setattr(machine, "gpu_bytes", lambda: None)
    config = planned(device="auto", plan=H200, kv=KVConfig(memory_fraction=0.5))
    machine.check_machine(config)
    machine.check_machine(replace(config, device="cuda"))
    memory = make_plan(config).memory
    assert (memory.device_type, memory.kv_policy) == ("cuda", "capture_then_allocate")
    assert (memory.device_bytes, memory.limit_bytes) == (140 * GIB, 70 * GIB)
    assert memory.choices["model.dtype"] == "bfloat16"
    assert memory.num_blocks == memory.geometry.num_useful_blocks, "the tiny model's worst case fits"
    with pytest.raises(ValueError, match=r"plan\.device_bytes=\.\.\. plans for one"):
        machine.check_machine(replace(config, device="cuda", plan=PlanConfig()))


def test_the_cache_of_a_gpu_is_what_weights_buffers_and_known_graphs_leave(tmp_path):
    rows = [{"batch_size": size, "replay_ms": None, "bytes": size << 20} for size in (1, 8)]
    write_json(tmp_path / "decode_batches.json", {"schema_version": 1, "buckets": rows,
                                                  "batch_sizes": [{"batch_size": 1, "num_steps": 1}]})
    sections = {"device": "auto", "plan": PlanConfig(device_bytes=1 << 27), "kv": KVConfig(memory_fraction=0.5),
                "scheduler": SchedulerConfig(max_num_seqs=4096)}
    graph = GraphConfig(buckets=[1, 4, 8])
    memory = make_plan(planned(graph=graph, **sections)).memory
    assert memory.graph_bytes is None, "no run has measured it"
    known = make_plan(planned(graph=replace(graph, histogram=str(tmp_path)), **sections)).memory
    assert known.graph_bytes == 10 << 20, "the smallest graphs take as much, and the largest brings the pool"
    left = (1 << 26) - memory.weight_bytes - memory.buffer_bytes
    assert memory.num_blocks == left // memory.geometry.block_bytes
    assert known.num_blocks == (left - (10 << 20)) // memory.geometry.block_bytes


def test_without_a_tokenizer_the_batches_of_texts_are_left_out_and_it_is_said():
    base = planned().model
    model = replace(base, path="somebody/a-model", architecture=base.architecture)
    plan = make_plan(planned(model=model, workload=WorkloadConfig(kind="text")))
    assert plan.batches is None
    assert any("needs the tokenizer of somebody/a-model, which is not here" in note for note in plan.notes)
    assert any("the shape is the model group's" in note for note in plan.notes), "nothing was downloaded"


def test_a_measurement_without_a_workload_has_no_batches():
    plan = make_plan(planned(measure="launch_overhead"))
    assert plan.batches is None and "sends no workload" in text_of(plan)


def test_a_long_workload_is_cut_and_it_is_said(monkeypatch):
    monkeypatch.setattr("experiments.expected_batches.MAX_TOKENS", 100)
    plan = make_plan(planned())
    assert (plan.batches.num_requests, plan.batches.num_left_out) == (3, 3)
    assert "first 3 requests; 3 more are left out" in text_of(plan)


@pytest.mark.parametrize("graph", [GraphConfig(), GraphConfig(mode="eager"), GraphConfig(buckets="every"),
                                   GraphConfig(buckets="tuned", histogram={3: 5, 6: 7}), GraphConfig(buckets=[6, 1])])
def test_a_plan_shows_buckets_memory_and_batches(graph):
    text = text_of(make_plan(planned(graph=graph)))
    for expected in ("policy", "KV of a token", "tokens that fit", "requests of 64 tokens that fit"):
        assert expected in text


def test_a_stated_cache_below_one_block_is_refused_as_the_run_would():
    with pytest.raises(ValueError, match=r"kv\.bytes must be at least one block of 128 tokens, .* bytes; got 100"):
        make_plan(make_config(kv=KVConfig(bytes=100)))
