"""Greedy tokens of the whole engine equal transformers' own, in float32, whatever the route a request takes."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine import Engine, EngineConfig, GraphConfig, KVConfig, ModelConfig, SamplingParams, SchedulerConfig
from tiny_models import VARIANTS, make_checkpoint

BLOCK_SIZE = 16
MAX_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 50, 64, 90)  # to beyond several blocks


FAMILIES = ("llama_llama3_rope", "qwen2_tied", "qwen3")  # the decoder's own test covers every variant


@dataclass
class Checkpoint:
    """A saved model and transformers' greedy answers to prompts, computed once a prompt."""

    directory: Path
    model: PreTrainedModel
    _answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        answer = self._answers.get(tuple(prompt), [])
        if len(answer) < max_tokens:
            with torch.inference_mode():
                ids = self.model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False,
                                          eos_token_id=None, pad_token_id=0)
            answer = self._answers[tuple(prompt)] = ids[0, len(prompt):].tolist()
        return answer[:max_tokens]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, overrides = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    return Checkpoint(directory, make_checkpoint(directory, family, **overrides))


def engine_config(directory: Path, **parts: object) -> EngineConfig:
    base = EngineConfig(
        model=ModelConfig(path=str(directory), dtype="float32", max_model_len=256),
        device="cpu",
        scheduler=SchedulerConfig(max_num_seqs=8),
        graph=GraphConfig(buckets=[2, 4, 6]),
        kv=KVConfig(tokens=2048, block_size=BLOCK_SIZE))
    return replace(base, **parts)


def random_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 199) for _ in range(length)] for length in lengths]


def check(engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> None:
    outputs = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == checkpoint.greedy(prompt, max_tokens), f"prompt of {len(prompt)} tokens"
        assert output.finish_reason == "length"


def test_tokens_equal_over_mixed_lengths_and_batches_that_hit_and_miss_buckets(checkpoint):
    with Engine(engine_config(checkpoint.directory)) as engine:
        check(engine, checkpoint, random_prompts(PROMPT_LENGTHS))
        reasons = {(step.reason, step.bucket) for step in engine.records.steps}
    # twelve prompts through eight rows: batches of 8 run above the largest bucket, the last ones inside buckets
    assert {("captured", 4), ("above_largest_bucket", None), ("prefill", None)} <= reasons
    assert all(step.num_padded_rows == step.bucket - step.num_requests for step in engine.records.steps if step.bucket)


def test_tokens_equal_in_eager_mode(checkpoint):
    with Engine(engine_config(checkpoint.directory, graph=GraphConfig(mode="eager"))) as engine:
        check(engine, checkpoint, random_prompts((5, 40)))
        assert {step.reason for step in engine.records.steps} == {"prefill", "enforce_eager"}


def test_tokens_equal_when_commit_lags_one_step(checkpoint):
    with Engine(engine_config(checkpoint.directory, scheduler=SchedulerConfig(max_num_seqs=6, overlap=True))) as engine:
        check(engine, checkpoint, random_prompts((3, 40, 17, 1, 60, 33)))


def test_tokens_equal_with_prefix_hits(checkpoint):
    shared = random_prompts((40,))[0]
    prompts = [shared + tail for tail in random_prompts((1, 9, 30), seed=2)] + [shared[:33], shared]
    with Engine(engine_config(checkpoint.directory)) as engine:
        check(engine, checkpoint, [shared])
        check(engine, checkpoint, prompts)
        cached = [record.num_cached_tokens for record in engine.records.requests]
    assert cached[0] == 0 and min(cached[1:]) >= BLOCK_SIZE


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_when_a_small_cache_forces_preemption(checkpoint, overlap):
    config = engine_config(checkpoint.directory, kv=KVConfig(num_blocks=9, block_size=BLOCK_SIZE),
                           scheduler=SchedulerConfig(max_num_seqs=6, overlap=overlap))
    with Engine(config) as engine:
        check(engine, checkpoint, random_prompts((20, 30, 25, 28, 31)), max_tokens=40)
        assert sum(record.num_preemptions for record in engine.records.requests) > 0
        assert sum(record.num_recomputed_tokens for record in engine.records.requests) > 0


def test_shared_prefixes_survive_preemption(checkpoint):
    """nano-vllm issues 207 and 233: a shared prefix in a small pool, with preemption, was an index error."""
    shared = random_prompts((34,))[0]
    prompts = [shared + tail for tail in random_prompts((3, 5, 8, 2), seed=3)]
    with Engine(engine_config(checkpoint.directory, kv=KVConfig(num_blocks=8, block_size=BLOCK_SIZE))) as engine:
        check(engine, checkpoint, [shared], max_tokens=2)
        check(engine, checkpoint, prompts, max_tokens=50)
        assert sum(record.num_preemptions for record in engine.records.requests) > 0
        assert max(record.num_cached_tokens for record in engine.records.requests) > 0


def test_equal_prompts_of_one_prefill_give_equal_tokens(checkpoint):
    """nano-vllm issue 208: the second of two equal prompts read blocks that were not computed yet."""
    prompt = random_prompts((50,))[0]
    with Engine(engine_config(checkpoint.directory)) as engine:
        check(engine, checkpoint, [prompt] * 5)
