"""The whole engine on a GPU: replay equals eager bitwise, tokens equal the reference's, memory comes back."""

import random
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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ARCHITECTURE = Architecture(
    family="qwen3", vocab_size=4000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, qk_norm=True,
    tie_word_embeddings=True)
CONFIG = EngineConfig(
    model=ModelConfig(architecture=ARCHITECTURE, dtype="bfloat16", max_model_len=1024), device="cuda",
    scheduler=SchedulerConfig(max_num_seqs=24), graph=GraphConfig(buckets="nano_vllm"), kv=KVConfig(tokens=32768))
BACKENDS = ["flash_attn", "triton", "reference"]


def config(attention: str, **parts: object) -> EngineConfig:
    if attention == "flash_attn":
        pytest.importorskip("flash_attn")
    return replace(CONFIG, kernels=KernelsConfig(attention=attention), **parts)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(ARCHITECTURE.vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("attention", ["triton", "reference"])
@pytest.mark.parametrize("overlap", [False, True])
def test_float32_tokens_equal_on_every_path(attention, overlap):
    prompts = random_prompts([5, 300, 256, 64, 1, 600, 33] * 4)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    model = replace(CONFIG.model, dtype="float32")
    with Engine(replace(CONFIG, model=model, graph=GraphConfig(mode="eager"),
                        kernels=KernelsConfig(attention="reference", ops="torch"))) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    for kv in (KVConfig(tokens=32768), KVConfig(num_blocks=60)):  # the second forces preemption
        parts = {"model": model, "kv": kv, "scheduler": replace(CONFIG.scheduler, overlap=overlap)}
        with Engine(config(attention, **parts)) as engine:
            assert [output.token_ids for output in engine.generate(prompts, params)] == expected
            assert engine.startup.replay == "cuda_graph"


def test_sampling_does_not_depend_on_company_or_on_the_graph():
    params = SamplingParams(temperature=0.8, top_k=50, seed=7, max_tokens=16, ignore_eos=True)
    prompt, *others = random_prompts([20, 50, 60, 70])
    model = replace(CONFIG.model, dtype="float32")
    alone = []
    for mode in ("full", "eager"):
        with Engine(replace(CONFIG, model=model, graph=GraphConfig(mode=mode))) as engine:
            alone.append(engine.generate([prompt], params)[0].token_ids)
            alone.append(engine.generate([*others, prompt], params)[-1].token_ids)
    assert all(tokens == alone[0] for tokens in alone)
