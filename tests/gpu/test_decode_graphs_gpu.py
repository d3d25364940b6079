"""CUDA graphs of decode on a GPU: bitwise parity for every scope, order and pool; inert padding; bytes that add up."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_engine_gpu import BACKENDS, CONFIG, config, random_prompts

from decode_cases import check_growing_batch, check_padding_is_inert, check_tiny_context
from engine import Engine, GraphConfig, KernelsConfig, KVConfig, SamplerConfig, SamplingParams, SchedulerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SCOPES = ("body", "logits", "step")
SAMPLERS = ("torch", "triton", "compiled")
CHECKED = GraphConfig(buckets="nano_vllm", parity_check="all")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("attention", BACKENDS)
def test_replay_equals_eager_bitwise_full_and_padded(attention, scope, sampler):
    graph = replace(CHECKED, scope=scope, buckets=[1, 2, 8, 24])
    with Engine(config(attention, graph=graph, sampler=SamplerConfig(impl=sampler))) as engine:
        records = engine.startup.parity
        outputs = engine.generate(random_prompts([300, 5, 64]), SamplingParams(temperature=0.8, max_tokens=8))
    assert [(record.batch_size, record.num_live) for record in records] == [(1, 1), (2, 2), (8, 3), (8, 8), (24, 9),
                                                                            (24, 24)]
    assert all(record.passed and record.max_difference == 0 for record in records)
    assert all(output.token_ids for output in outputs)


@pytest.mark.parametrize("pool", ["shared", "separate"])
@pytest.mark.parametrize("order", ["descending", "ascending", "shuffled", [16, 1, 24, 8, 2, 4]])
def test_every_capture_order_passes_parity(order, pool):
    for scope in SCOPES:
        graph = replace(CHECKED, scope=scope, capture_order=order, pool=pool)
        with Engine(config("triton", graph=graph)) as engine:
            assert all(record.passed for record in engine.startup.parity)
            assert [record.batch_size for record in engine.startup.buckets] == [1, 2, 4, 8, 16, 24]
            for record in engine.startup.buckets:
                assert record.num_nodes >= record.num_kernels > 20
                assert record.replay_ms > 0 and record.pool_bytes is not None


@pytest.mark.parametrize("sampler", ["torch", "triton"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_float32_tokens_equal_eager_in_every_scope(scope, overlap, sampler):
    prompts = random_prompts([5, 300, 256, 64, 1, 600, 33, 128, 511, 512, 513, 127] * 2)
    manners = [SamplingParams(max_tokens=40, ignore_eos=True),
               SamplingParams(temperature=0.9, seed=5, max_tokens=44, ignore_eos=True),
               SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=6, max_tokens=20, ignore_eos=True)]
    params = [manners[index % 3] for index in range(len(prompts))]
    base = replace(CONFIG, model=replace(CONFIG.model, dtype="float32"), kernels=KernelsConfig("triton"))
    with Engine(replace(base, graph=GraphConfig(mode="eager"), sampler=SamplerConfig(impl="torch"))) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    for kv in (KVConfig(tokens=32768), KVConfig(num_blocks=100)):  # the second forces preemption
        with Engine(replace(base, kv=kv, graph=replace(CHECKED, scope=scope), sampler=SamplerConfig(impl=sampler),
                            scheduler=SchedulerConfig(max_num_seqs=24, overlap=overlap))) as engine:
            assert [output.token_ids for output in engine.generate(prompts, params)] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("attention", BACKENDS)
def test_a_prompt_repeated_in_one_batch_gives_equal_answers(attention, temperature):
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40, ignore_eos=True)
    for graph in (GraphConfig(mode="eager"), GraphConfig(buckets=[5], scope="step"),
                  GraphConfig(buckets=[8], scope="step"), GraphConfig(buckets=[8])):  # eager, full, padded
        with Engine(config(attention, graph=graph, kv=KVConfig(tokens=32768, prefix_cache=False))) as engine:
            outputs = engine.generate(random_prompts([500]) * 5, params)
        assert len({tuple(output.token_ids) for output in outputs}) == 1, graph


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("attention", BACKENDS)
def test_padding_is_inert(attention, scope):
    with Engine(config(attention, graph=GraphConfig(buckets=[8, 24], scope=scope))) as engine:
        for num_live in (1, 5, 8):
            check_padding_is_inert(engine, num_live, size=8, context_len=700)
        check_padding_is_inert(engine, num_live=17, size=24, context_len=300)


FLOAT32 = {"model": replace(CONFIG.model, dtype="float32")}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_batch_that_grows_from_4_to_5_and_shrinks_back_keeps_its_answers(scope):
    check_growing_batch(config("triton", graph=GraphConfig(scope=scope), **FLOAT32),
                        random_prompts([130, 510, 30, 257, 15]), ends=(60, 60, 60, 60, 10))


def test_a_large_bucket_serves_a_tiny_context():
    """vLLM issue 53658: a tiny max_model_len with a large capture size overran the block table."""
    graph = replace(CHECKED, scope="step")
    check_tiny_context(config("triton", graph=graph, **FLOAT32), random_prompts([2] * 100), bucket=256)


# Captures before anything else has run: a library buffer that was first built inside a capture would be found here
# (torch issue 159594, SGLang issue 39078).
FOOTPRINT = """
import json, sys, torch
from engine import *
from engine.config import Architecture
arch = Architecture(family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
                    rope_theta=1e6, qk_norm=True, tie_word_embeddings=True)
graph = GraphConfig(**json.loads(sys.argv[1]))
config = EngineConfig(model=ModelConfig(architecture=arch, dtype="bfloat16"), device="cuda", graph=graph,
                      scheduler=SchedulerConfig(max_num_seqs=512), kv=KVConfig(tokens=65536),
                      kernels=KernelsConfig("triton"))
with Engine(config) as engine:
    # An eager step at the largest and the smallest size: both processes then have loaded the same kernels.
    probe = engine.probe()
    for size in (512, 1):
        probe.fill(size, size, 64)
        probe.eager()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    buckets = engine.startup.buckets
    print(json.dumps({"used": total - free, "reserved": torch.cuda.memory_reserved(),
                      "pool": sum(b.pool_bytes for b in buckets), "outside": sum(b.outside_bytes for b in buckets),
                      "num_buckets": len(buckets), "capture_s": sum(b.capture_s for b in buckets),
                      "warmup_s": sum(b.warmup_s for b in buckets), "nodes": [b.num_nodes for b in buckets]}))
"""


def footprint(**graph):
    """What a fresh process of its own holds on the device."""
    done = subprocess.run([sys.executable, "-c", FOOTPRINT, json.dumps(graph)], capture_output=True, text=True,
                          check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scope", SCOPES)
def test_the_bytes_of_all_buckets_are_what_the_process_takes_more_than_an_eager_one(scope):
    graphs, eager = footprint(scope=scope), footprint(mode="eager")
    assert graphs["num_buckets"] == 36, (graphs, eager)
    pool, outside = graphs["reserved"] - eager["reserved"], graphs["used"] - eager["used"]
    assert graphs["pool"] == pytest.approx(pool, rel=0.05)  # by torch's allocator
    assert graphs["pool"] + graphs["outside"] == pytest.approx(outside, rel=0.05)  # by the driver
