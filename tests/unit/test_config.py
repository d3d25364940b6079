"""What a configuration refuses, and what it says has no effect."""

from dataclasses import replace

import pytest

from engine import EngineConfig, KernelsConfig, KVConfig, ModelConfig
from experiments.config import GraphConfig, TrackerConfig, WorkloadConfig
from run_records import make_config

MODEL = ModelConfig(path="somewhere")


@pytest.mark.parametrize(("parts", "message"), [
    ({"kernels": KernelsConfig(attention="flash_attn")}, "kernels.attention=flash_attn needs a GPU"),
    ({"kernels": KernelsConfig(attention="triton")}, "kernels.attention=triton needs a GPU"),
    ({"kv": KVConfig(policy="allocate_first")}, "kv.policy=allocate_first measures a GPU's memory"),
    ({"kv": KVConfig(memory_fraction=0.5)}, "kv.memory_fraction=0.5 is a share of a GPU's memory"),
])
def test_what_a_cpu_has_not_is_refused_when_a_cpu_is_asked_for(parts, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model=MODEL, device="cpu", **parts)


def test_a_fixed_cache_needs_a_size_on_a_gpu():
    with pytest.raises(ValueError, match=r"needs kv\.bytes, kv\.tokens or kv\.num_blocks"):
        EngineConfig(model=MODEL, kv=KVConfig(policy="fixed")).check_runs_on("cuda")


@pytest.mark.parametrize("fraction", [0, -1, 1.1, "x", True + 1])
def test_a_memory_fraction_is_a_number_between_zero_and_one(fraction):
    with pytest.raises(ValueError, match=r"kv\.memory_fraction must be a number in \(0, 1\]"):
        KVConfig(memory_fraction=fraction)


@pytest.mark.parametrize(("parts", "key"), [
    ({"graph": GraphConfig(buckets=[1, 2], max_bucket=4)}, "graph.max_bucket"),
    ({"graph": GraphConfig(mode="eager", buckets="pow2")}, "graph.buckets"),
    ({"workload": WorkloadConfig(kind="nano_vllm_bench", max_tokens=3)}, "workload.max_tokens"),
    ({"workload": WorkloadConfig(kind="text", prompt_tokens=3)}, "workload.prompt_tokens"),
    ({"model": replace(MODEL, dummy_seed=3)}, "model.dummy_seed"),
    ({"tracker": TrackerConfig(kind="none", mode="offline")}, "tracker.mode"),
])
def test_a_setting_without_effect_is_said(parts, key):
    assert [line.split()[0] for line in make_config(**parts).without_effect()] == [key]
    assert make_config().without_effect() == []
