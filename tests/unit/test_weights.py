"""Weights arrive where they belong, and a checkpoint that does not fit is refused before anything is filled."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Architecture
from engine.kernels.reference import ReferenceAttention
from engine.model.decoder import Decoder
from engine.model.weights import init_dummy, load_weights

CPU = torch.device("cpu")
NORM = "model.norm.weight"


def make_decoder(dtype: torch.dtype = torch.float32, **overrides) -> Decoder:
    """A tiny Qwen3-like decoder that never attends."""
    settings = {"family": "qwen3", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
                "qk_norm": True, "qkv_bias": True}
    architecture = Architecture(**{**settings, **overrides})
    return Decoder(architecture, ReferenceAttention(), dtype=dtype, device=CPU, max_positions=16)


def random_checkpoint(decoder: Decoder) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator)
            for name, tensor in decoder.checkpoint_tensors().items()}


def save(tensors: dict[str, torch.Tensor], directory: Path) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def save_sharded(tensors: dict[str, torch.Tensor], directory: Path) -> Path:
    names = list(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", [save, save_sharded])
def test_every_tensor_arrives_converted_to_the_decoders_dtype(store, dtype, is_tied: bool, tmp_path: Path) -> None:
    decoder = make_decoder(dtype, tie_word_embeddings=is_tied)
    tensors = random_checkpoint(decoder)
    load_weights(decoder, store(tensors, tmp_path))
    for name, tensor in decoder.checkpoint_tensors().items():
        assert torch.equal(tensor, tensors[name].to(dtype)), name


def test_fused_matrices_hold_their_parts_in_order(tmp_path: Path) -> None:
    decoder = make_decoder()
    tensors = random_checkpoint(decoder)
    load_weights(decoder, save(tensors, tmp_path))
    attention, prefix = decoder.layers[1].attention, "model.layers.1.self_attn."
    for kind, fused in (("weight", attention.qkv.weight), ("bias", attention.qkv.bias)):
        assert torch.equal(fused, torch.cat([tensors[f"{prefix}{part}_proj.{kind}"] for part in "qkv"]))


def test_tied_embeddings_share_their_storage() -> None:
    decoder = make_decoder(tie_word_embeddings=True)
    assert decoder.head is decoder.embedding
    assert make_decoder().num_parameters - decoder.num_parameters == decoder.embedding.numel()


def test_a_tied_checkpoint_may_repeat_its_output_matrix(tmp_path: Path) -> None:
    decoder = make_decoder(tie_word_embeddings=True)
    tensors = random_checkpoint(decoder)
    load_weights(decoder, save({**tensors, "lm_head.weight": torch.zeros(50, 32)}, tmp_path))
    assert torch.equal(decoder.head, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(("change", "message"), [
    ({NORM: None}, r"lack model.norm.weight \[32\]"),
    ({"model.extra": torch.zeros(3, 4)}, r"does not have: model.safetensors: model.extra \[3, 4\]"),
    ({NORM: torch.zeros(31)}, r"model.safetensors: model.norm.weight has shape \[31\]; config.json implies \[32\]"),
    ({NORM: torch.zeros(32, dtype=torch.int8)}, "model.norm.weight is stored as I8; supported: F64, F32"),
])
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_filled(
        change: dict, message: str, tmp_path: Path) -> None:
    decoder = make_decoder()
    changed = {**random_checkpoint(decoder), **change}
    save({name: tensor for name, tensor in changed.items() if tensor is not None}, tmp_path)
    for tensor in decoder.checkpoint_tensors().values():
        tensor.fill_(torch.nan)
    with pytest.raises(ValueError, match=message):
        load_weights(decoder, tmp_path)
    assert all(tensor.isnan().all() for tensor in decoder.checkpoint_tensors().values())


@pytest.mark.parametrize("num_bytes", [0, 7, 200, -1])
def test_a_file_cut_short_is_refused_by_name(num_bytes: int, tmp_path: Path) -> None:
    decoder = make_decoder()
    file = save(random_checkpoint(decoder), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model.safetensors .* is not a whole safetensors file"):
        load_weights(decoder, tmp_path)


def test_a_file_with_a_damaged_header_is_refused_by_name(tmp_path: Path) -> None:
    decoder = make_decoder()
    file = save(random_checkpoint(decoder), tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors .* is not a whole safetensors file"):
        load_weights(decoder, tmp_path)


def test_an_index_that_names_absent_files_is_refused(tmp_path: Path) -> None:
    decoder = make_decoder()
    save_sharded(random_checkpoint(decoder), tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names files that are not in .*: model-2.safetensors"):
        load_weights(decoder, tmp_path)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    decoder = make_decoder()
    save_sharded(random_checkpoint(decoder), tmp_path)
    second = tmp_path / "model-2.safetensors"
    save_file({**load_file(second), "model.embed_tokens.weight": torch.zeros(50, 32)}, second)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is in .*model-1.* and in .*model-2.safetensors"):
        load_weights(decoder, tmp_path)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="only safetensors checkpoints are read"):
        load_weights(make_decoder(), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_follow_their_seed_and_are_finite(dtype: torch.dtype) -> None:
    first, same, other = make_decoder(dtype), make_decoder(dtype), make_decoder(dtype)
    for decoder, seed in ((first, 1), (same, 1), (other, 2)):
        for tensor in decoder.checkpoint_tensors().values():
            tensor.fill_(torch.nan)
        init_dummy(decoder, seed)
    for name, tensor in first.checkpoint_tensors().items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, same.checkpoint_tensors()[name])
        assert name.endswith("norm.weight") or not torch.equal(tensor, other.checkpoint_tensors()[name])
