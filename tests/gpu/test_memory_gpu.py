"""KV memory on a GPU: the policies keep to their limit or say how far not, the ledger explains all, nothing stays."""

import gc
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from engine import (
    Engine,
    EngineConfig,
    GraphConfig,
    KernelsConfig,
    KVConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from engine.config import Architecture
from engine.decode_step import DecodeStep
from engine.memory.address_range import AddressRange
from engine.memory.ledger import READY, RUN_PEAK
from engine.units import GIB, MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ARCHITECTURE = Architecture(
    family="qwen3", vocab_size=4000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, qk_norm=True,
    tie_word_embeddings=True)
CONFIG = EngineConfig(
    model=ModelConfig(architecture=ARCHITECTURE, dtype="bfloat16", max_model_len=1024), device="cuda",
    scheduler=SchedulerConfig(max_num_seqs=512), graph=GraphConfig(buckets="vllm"),
    kernels=KernelsConfig(attention="triton"))
MEASURING = ["allocate_first", "profile_then_allocate", "capture_then_allocate"]
MAX_UNEXPLAINED = 64 * MIB


def in_use() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def limited(policy: str, num_bytes: int, **parts: object) -> EngineConfig:
    """A limit that leaves about `num_bytes` of the device."""
    total = torch.cuda.mem_get_info()[1]
    return replace(CONFIG, kv=KVConfig(policy=policy, memory_fraction=(in_use() + num_bytes) / total), **parts)


def prompts(num: int, longest: int) -> list[list[int]]:
    rng = random.Random(num)
    return [[rng.randrange(ARCHITECTURE.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(num)]


@pytest.mark.parametrize("policy", MEASURING)
def test_the_ledger_explains_what_the_driver_reports_in_every_phase_and_at_the_peak(policy):
    # Less than the 1 GiB that 512 requests of 1024 tokens could use: the limit is what decides.
    with Engine(limited(policy, 1536 * MIB)) as engine:
        assert engine.startup.kv_sized_by == "limit" and len(engine.startup.buckets) >= 36
        engine.generate(prompts(64, 512), SamplingParams(max_tokens=4, ignore_eos=True))
        engine.start_measurement()
        engine.generate(prompts(600, 900), SamplingParams(temperature=0.8, top_k=20, max_tokens=8, ignore_eos=True))
        ledger = engine.memory_ledger()
    assert ledger.source == "nvml" and ledger.phase_names[-2:] == (READY, RUN_PEAK)
    assert abs(ledger.unexplained_bytes) <= MAX_UNEXPLAINED
    assert ledger.phase(READY).parts["context"] > 100 * MIB, "measured in a bare process"
    graphs = ledger.phase(READY).parts["graph_pool"] + ledger.phase(READY).parts["graphs_outside_pool"]
    assert abs(graphs - sum(record.num_bytes for record in engine.startup.buckets)) <= 4 * MIB
    if policy == "capture_then_allocate":
        assert ledger.overrun_bytes == 0 and ledger.unused_bytes < MAX_UNEXPLAINED
    if policy == "allocate_first":
        assert ledger.planned["graph_pool"] == 0 and graphs > 8 * MIB, "the trap: nothing is planned for graphs"


def test_every_policy_gives_the_same_tokens_also_far_beyond_the_memory_mapped_at_capture():
    params, sent = SamplingParams(max_tokens=32, ignore_eos=True), prompts(300, 900)
    model = replace(CONFIG.model, dtype="float32")
    with Engine(replace(CONFIG, model=model, graph=GraphConfig(mode="eager"), kv=KVConfig(tokens=400_000))) as engine:
        expected = [output.token_ids for output in engine.generate(sent, params)]
    for policy in MEASURING:
        with Engine(limited(policy, 4 * GIB, model=model)) as engine:
            assert [output.token_ids for output in engine.generate(sent, params)] == expected, policy
            used = max(step.num_used_blocks for step in engine.records.steps)
            assert used > 500 and all(step.path == "graph" for step in engine.records.steps if step.phase == "decode")


@pytest.mark.parametrize("policy", MEASURING)
def test_starting_and_closing_many_times_leaks_nothing(policy):
    config = replace(limited(policy, 2 * GIB), graph=GraphConfig(buckets="pow2"))
    used = []
    for _ in range(6):
        with Engine(config) as engine:
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        del engine
        used.append(in_use())
    assert max(used[1:]) - min(used[1:]) <= 2 * MIB, used


@pytest.mark.parametrize("policy", MEASURING)
def test_nothing_stays_after_a_start_that_fails_in_the_middle_of_a_capture(monkeypatch, policy):
    config = limited(policy, 2 * GIB)
    with Engine(config):
        pass
    before, run = in_use(), DecodeStep.run

    def fail(step: DecodeStep, *args: object) -> None:
        run(step, *args)
        if torch.cuda.is_current_stream_capturing() and step.caches[0].keys_NSKD.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecodeStep, "run", fail)
    with pytest.raises(ValueError, match=r"out of device memory during capture: limit .* weights "):
        Engine(config)
    assert in_use() - before <= 2 * MIB


def test_a_device_that_is_full_at_capture_refuses_the_start_or_drops_graphs_and_the_accounting_policies_run():
    with Engine(replace(CONFIG, kv=KVConfig(tokens=4096))):
        pass  # libraries and kernels are there from now on
    before, total = in_use(), torch.cuda.mem_get_info()[1]
    ballast = torch.empty(total - before - 1200 * MIB, dtype=torch.uint8, device="cuda")
    # Graphs by the hundred, each with a pool of its own, and little room for activations that they could take.
    full = replace(CONFIG, graph=GraphConfig(buckets="every", pool="separate", max_bucket=256),
                   scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=1024))
    held = in_use()

    def config(policy: str, on_shortage: str = "error") -> EngineConfig:
        return replace(full, kv=KVConfig(policy=policy, memory_fraction=1.0, on_shortage=on_shortage))

    with pytest.raises(ValueError, match=r"out of device memory during capture: limit .* weights .* kv cache"):
        Engine(config("allocate_first"))
    assert in_use() - held <= 4 * MIB, "nothing of the failed start stays"
    for policy in ("profile_then_allocate", "capture_then_allocate"):
        with Engine(config(policy)) as engine:
            assert len(engine.startup.buckets) == 256
            assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].output_token_ids
    with Engine(config("allocate_first", "drop_buckets")) as engine:
        dropped, kept = engine.startup.dropped_buckets, [record.batch_size for record in engine.startup.buckets]
        assert dropped and sorted([*dropped, *kept]) == list(range(1, 257)) and kept[-1] == 256
        assert any("kv.on_shortage=drop_buckets" in warning for warning in engine.records.warnings)
    del ballast


def test_what_another_process_holds_is_accounted_apart():
    program = ("import torch; x = torch.empty(20 << 30, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); "
               "print('held', flush=True); input()")
    with Engine(replace(CONFIG, kv=KVConfig(tokens=4096))):
        pass
    alone = in_use()
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            total = torch.cuda.mem_get_info()[1]
            with Engine(replace(CONFIG, kv=KVConfig(policy="capture_then_allocate",
                                                    memory_fraction=(in_use() + GIB) / total))) as engine:
                ledger = engine.memory_ledger()
            assert 20 * GIB <= ledger.last.other_bytes <= 22 * GIB
            assert abs(ledger.unexplained_bytes) <= MAX_UNEXPLAINED and ledger.overrun_bytes == 0
            match = r"KV cache needs .* is left: limit .* other processes 2[01]\."
            with pytest.raises(ValueError, match=match) as caught:
                Engine(replace(CONFIG, kv=KVConfig(policy="profile_then_allocate", memory_fraction=alone / total)))
            assert "would fit: kv.memory_fraction=" in str(caught.value)
        finally:
            other.communicate("\n")


def test_no_more_is_taken_than_can_be_used():
    config = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=1), kv=KVConfig())
    with Engine(config) as engine:
        assert engine.startup.kv_policy == "capture_then_allocate" and engine.startup.kv_sized_by == "use"
        assert engine.startup.num_kv_blocks * engine.startup.block_size == 1024


def test_a_stated_cache_that_does_not_fit_is_refused_with_the_sum_before_anything_is_loaded():
    stages: list[str] = []
    with pytest.raises(ValueError, match=r"stated KV cache takes 1000\.00 GiB but .* is free: .* kv\.tokens=\d+ would"):
        Engine(replace(CONFIG, kv=KVConfig(bytes=1000 * GIB)), on_stage=stages.append)
    assert "load" not in stages


def test_an_address_range_maps_what_is_asked_for_and_gives_it_back():
    device = torch.device("cuda", torch.cuda.current_device())
    before = in_use()
    addresses = AddressRange(64 * GIB, device)
    addresses.map_up_to(3 * MIB)
    assert addresses.mapped_bytes == 4 * MIB and in_use() - before == 4 * MIB, "whole granules"
    memory = addresses.tensor()
    graph, result = torch.cuda.CUDAGraph(), torch.zeros(4, dtype=torch.uint8, device=device)
    with torch.cuda.graph(graph):
        result.copy_(memory[-4:])  # not mapped yet
    addresses.map_up_to(64 * GIB)
    memory[-4:] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=device)
    graph.replay()
    assert result.tolist() == [1, 2, 3, 4]
    with pytest.raises(torch.OutOfMemoryError):
        AddressRange(200 * GIB, device).map_up_to(200 * GIB)
    del memory, graph, result
    addresses.close()
    addresses.close()
    assert in_use() - before <= 4 * MIB
