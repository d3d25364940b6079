"""transformers' own `generate` on the shipped prompts, in one batch: what the default run on a CPU is compared with.

    python -m experiments.transformers_baseline MODEL_DIRECTORY [--max-tokens 64] [--dtype float32]

Counts output tokens as the engine does: up to and with the end-of-sequence token, not the padding after it.
"""

import argparse
import statistics
import time
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.workload import read_prompts

NUM_RUNS = 3


def main() -> None:
    """Print output tokens a second of each run, the first of which warms up, and the median of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    prompts = read_prompts(files("experiments") / "data" / "prompts.jsonl")
    conversations = [list(map(dict, conversation.messages)) for conversation, _ in prompts]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    rates = []
    for _ in range(1 + NUM_RUNS):
        start_s = time.perf_counter()
        with torch.inference_mode():
            output_ids = model.generate(**batch, max_new_tokens=arguments.max_tokens, do_sample=False)
        duration_s = time.perf_counter() - start_s
        num_tokens = count_tokens(output_ids[:, batch["input_ids"].shape[1]:], model.generation_config.eos_token_id)
        rates.append(num_tokens / duration_s)
        print(f"{num_tokens} output tokens in {duration_s:.2f} s: {rates[-1]:.1f} tokens/s", flush=True)
    print(f"median of {NUM_RUNS} after the first: {statistics.median(rates[1:]):.1f} tokens/s")


def count_tokens(output_ids: torch.Tensor, eos_token_id: int | list[int]) -> int:
    """Tokens of all rows up to and with each row's first end-of-sequence token."""
    ends = torch.isin(output_ids, torch.tensor(eos_token_id))
    return int((ends.cumsum(-1) - ends.long() == 0).sum())


if __name__ == "__main__":
    main()
