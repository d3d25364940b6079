"""What a configuration refuses, and what it says has no effect."""

from dataclasses import replace

import pytest

from engine import EngineConfig, KernelsConfig, KVConfig, ModelConfig, SchedulerConfig
from experiments.config import GraphConfig, PlanConfig, TrackerConfig, WorkloadConfig
from run_records import make_config

MODEL = ModelConfig(path="somewhere")


@pytest.mark.parametrize(("parts", "message"), [
    ({"kernels": KernelsConfig(attention="flash_attn")}, "kernels.attention=flash_attn needs a GPU"),
    ({"kernels": KernelsConfig(attention="triton")}, "kernels.attention=triton needs a GPU"),
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
    ({"graph": GraphConfig(mode="eager", parity_check="all")}, "graph.parity_check"),
    ({"graph": GraphConfig(mode="eager"), "scheduler": SchedulerConfig(above_largest_bucket="cap")},
     "scheduler.above_largest_bucket"),
    ({"graph": GraphConfig(mode="eager"), "kv": KVConfig(on_shortage="drop_buckets")}, "kv.on_shortage"),
    ({"graph": GraphConfig(mode="eager"), "kv": KVConfig(policy="profile_then_allocate", rehearse="all")},
     "kv.rehearse"),
    ({"graph": GraphConfig(step=8)}, "graph.step"),
    ({"graph": GraphConfig(buckets="step", max_graphs=8)}, "graph.max_graphs"),
    ({"graph": GraphConfig(buckets="pow2", max_graph_bytes=8)}, "graph.max_graph_bytes"),
    ({"graph": GraphConfig(histogram={8: 1})}, "graph.histogram"),
    ({"graph": GraphConfig(capture_seed=1)}, "graph.capture_seed"),
    ({"graph": GraphConfig(on_parity_failure="disable")}, "graph.on_parity_failure"),
    ({"plan": PlanConfig(device_bytes=1 << 30)}, "plan.device_bytes"),
    ({"workload": WorkloadConfig(kind="fixed", batch_sizes=[1])}, "workload.batch_sizes"),
    ({"workload": WorkloadConfig(kind="ladder", num_requests=3)}, "workload.num_requests"),
    ({"workload": WorkloadConfig(kind="nano_vllm_bench", max_tokens=3)}, "workload.max_tokens"),
    ({"workload": WorkloadConfig(kind="text", prompt_tokens=3)}, "workload.prompt_tokens"),
    ({"model": replace(MODEL, dummy_seed=3)}, "model.dummy_seed"),
    ({"tracker": TrackerConfig(kind="none", mode="offline")}, "tracker.mode"),
])
def test_a_setting_without_effect_is_said(parts, key):
    assert [line.split()[0] for line in make_config(**parts).without_effect()] == [key]
    assert make_config().without_effect() == []


@pytest.mark.parametrize("parts", [
    {"graph": GraphConfig(buckets="step", step=8)},
    {"graph": GraphConfig(buckets="tuned", histogram={8: 1}, max_graphs=4)},
    {"graph": GraphConfig(capture_order="shuffled", capture_seed=3)},
    {"graph": GraphConfig(parity_check="all", on_parity_failure="disable")},
    {"graph": GraphConfig(histogram={8: 1}), "mode": "plan", "plan": PlanConfig(device_bytes=1 << 30)},
    {"measure": "launch_overhead", "workload": WorkloadConfig(kind="text", batch_sizes=[4], prompt_tokens=7)},
])
def test_a_setting_with_effect_is_not_said_to_have_none(parts):
    assert make_config(**parts).without_effect() == []


@pytest.mark.parametrize(("parts", "message"), [
    ({"mode": "dry"}, "mode must be one of run, plan; got 'dry'"),
    ({"measure": "speed"}, "measure must be one of serve, launch_overhead; got 'speed'"),
    ({"workload": WorkloadConfig(kind="ladder", max_tokens=4000)}, r"\+ workload.max_tokens=4000 must be at most"),
    ({"workload": WorkloadConfig(kind="ladder", batch_sizes=[1, 300])},
     "workload.batch_sizes: 300 is above scheduler.max_num_seqs=256"),
])
def test_a_run_that_makes_no_sense_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        make_config(**parts)


@pytest.mark.parametrize(("sizes", "message"), [([], "at least one batch size"), ([0], "each size must be"),
                                                ([True], "each size must be"), ([65_536], r"in \[1, 65535\]")])
def test_a_ladder_has_batch_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        WorkloadConfig(kind="ladder", batch_sizes=sizes)
