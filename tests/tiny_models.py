"""Tiny random checkpoints of every family, written by transformers itself, and a tiny tokenizer.

transformers' own model of a checkpoint is the reference that the engine is held to.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
           "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_all_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3_wide_heads_tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_biases": ("qwen3", {"attention_bias": True}),
}


def make_checkpoint(directory: Path, family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Save a tiny float32 model of `family` to `directory` and return it; `overrides` go to its config.

    Weights are ten times as wide as usual, norms and biases random too, so that logits are far apart and every tensor
    matters to them.
    """
    config_class, model_class = CLASSES[family]
    settings = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
                "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, **overrides}
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(directory)
    return model


TOKENIZER_TEXT = ["the quick brown fox jumps over the lazy dog", "naïve café, 日本語 日本", "😀😃 👩‍👩‍👧 stop here"]
CHAT_TEMPLATE = ("{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
                 "{% if add_generation_prompt %}<s>assistant: {% endif %}")


def make_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE, vocab_size: int = 320) -> None:
    """Save a small byte-level BPE tokenizer: every byte is a token, so that characters of several bytes fall apart.

    Ids 0, 1, 2 are <unk>, <s> and </s>. A checkpoint needs at least this `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
