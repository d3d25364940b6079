"""The default model on real prompts: 64 greedy tokens each are transformers' own, in float32."""

import json
from importlib.resources import files

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, ModelConfig, SamplingParams, SchedulerConfig
from experiments.paths import repository_root

MODEL = repository_root() / "models" / "SmolLM2-135M-Instruct"
NUM_PROMPTS, MAX_TOKENS = 8, 64

pytestmark = pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="`make model` brings the model")


def test_greedy_answers_to_real_prompts_equal_those_of_transformers():
    lines = (files("experiments") / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    config = EngineConfig(model=ModelConfig(path=str(MODEL), dtype="float32", max_model_len=1024), device="cpu",
                          scheduler=SchedulerConfig(max_num_seqs=6))
    with Engine(config) as engine:
        prompts = []
        for line in map(json.loads, lines):
            messages = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
            prompts.append(engine.tokenizer.encode_chat(messages))
        outputs = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == MAX_TOKENS
        # Greedy token by token is the same as this: each token is the best one after those before it.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0]
        assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == output.token_ids
