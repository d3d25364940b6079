"""config.json is read under every name transformers gave it, and refused where the decoder would be wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.config import Architecture, ModelConfig
from engine.model.source import resolve_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True,
    "torch_dtype": "float16", "eos_token_id": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def resolve(directory: Path, settings: dict[str, Any], device_type: str = "cpu", **config: Any):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    return resolve_model(ModelConfig(**{"path": str(directory), "max_model_len": 128, **config}), device_type)


def test_a_llama_config_is_read(tmp_path: Path) -> None:
    source = resolve(tmp_path, LLAMA)
    assert source.directory == tmp_path
    assert source.load_format == "safetensors"
    assert source.architecture == Architecture(
        family="llama", vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5,
        rope_theta=5e5, tie_word_embeddings=True)


@pytest.mark.parametrize(("name", "settings", "flags"), [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
    ("Qwen2ForCausalLM", {}, (True, False, False, False)),
    ("Qwen3ForCausalLM", {"head_dim": 32}, (False, False, False, True)),
    ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}, (True, True, False, True)),
])
def test_families_differ_by_flags(name: str, settings: dict, flags: tuple, tmp_path: Path) -> None:
    found = resolve(tmp_path, {**LLAMA, "architectures": [name], **settings}).architecture
    assert (found.qkv_bias, found.o_bias, found.mlp_bias, found.qk_norm) == flags
    assert found.family == name.removesuffix("ForCausalLM").lower()


def test_the_family_is_read_from_model_type_where_no_class_is_named(tmp_path: Path) -> None:
    assert resolve(tmp_path, {**LLAMA, "architectures": None, "model_type": "qwen2"}).architecture.family == "qwen2"


@pytest.mark.parametrize("rope", [
    {"rope_theta": 7e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 7e4, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **LLAMA3}},
    {"rope_theta": 7e4, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
])
def test_rope_settings_are_read_in_every_form_and_as_transformers_reads_them(rope: dict, tmp_path: Path) -> None:
    """nano-vllm issues 167 and 189."""
    found = resolve(tmp_path, {**LLAMA, **rope}).architecture
    assert (found.rope_theta, found.rope_scaling) == (7e4, {"rope_type": "llama3", **LLAMA3})
    if rope["rope_theta"]:
        theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
        assert {key: theirs[key] for key in (*LLAMA3, "rope_theta")} == {**LLAMA3, "rope_theta": 7e4}


@pytest.mark.parametrize("rope", [
    {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": None}])
def test_default_rope_needs_no_scaling(rope: dict, tmp_path: Path) -> None:
    found = resolve(tmp_path, {**LLAMA, **rope}).architecture
    assert (found.rope_theta, found.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(("settings", "message"), [
    ({"architectures": ["MixtralForCausalLM"]}, "architectures must be one of LlamaForCausalLM.*'MixtralForCausalLM'"),
    ({"architectures": [], "model_type": "gemma"}, "model_type must be one of llama.*'gemma'"),
    ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "lacks head_dim"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu; got 'gelu'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type must be default or llama3; got 'yarn'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "llama3 lack low_freq_factor, high_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0; got 0.5"),
    ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window=True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window attention is not supported"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantized weights are not supported.*awq"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    ({"max_position_embeddings": 100}, "max_model_len must be at most.*max_position_embeddings=100; got 128"),
])
def test_what_the_decoder_would_get_wrong_is_refused_by_name(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(tmp_path, {**LLAMA, **settings})


def test_an_architecture_that_contradicts_the_directory_is_refused_with_both_values(tmp_path: Path) -> None:
    found = resolve(tmp_path, LLAMA).architecture
    assert resolve(tmp_path, LLAMA, architecture=found).architecture == found
    with pytest.raises(ValueError, match=r"model.architecture.hidden_size=128 contradicts .*, which says 64"):
        resolve(tmp_path, LLAMA, architecture=dataclasses.replace(found, hidden_size=128))


def test_dummy_weights_follow_the_stated_architecture_else_the_directory(tmp_path: Path) -> None:
    stated = dataclasses.replace(resolve(tmp_path, LLAMA).architecture, num_hidden_layers=3)
    assert resolve(tmp_path, LLAMA, load_format="dummy", architecture=stated).architecture == stated
    assert resolve(tmp_path, LLAMA, load_format="dummy").architecture.num_hidden_layers == 2
    alone = resolve_model(ModelConfig(architecture=stated, max_model_len=128), "cpu")
    assert (alone.directory, alone.load_format, alone.eos_token_ids) == (None, "dummy", frozenset())


@pytest.mark.parametrize(("device_type", "config", "stated", "expected"), [
    ("cpu", {}, "bfloat16", torch.float32),
    ("cpu", {"dtype": "float16"}, "bfloat16", torch.float16),
    ("cuda", {}, "float16", torch.float16),
    ("cuda", {}, None, torch.bfloat16),
    ("cuda", {"load_format": "dummy"}, "float32", torch.bfloat16),
])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_dtype_is_the_checkpoints_own_on_a_gpu(device_type: str, config: dict, stated: str | None,
                                                    expected: torch.dtype, key: str, tmp_path: Path) -> None:
    assert resolve(tmp_path, {**LLAMA, "torch_dtype": None, key: stated}, device_type, **config).dtype == expected


def test_a_dtype_that_cannot_be_followed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'float8_e4m3fn'; set model.dtype"):
        resolve(tmp_path, {**LLAMA, "torch_dtype": "float8_e4m3fn"}, "cuda")


def test_every_end_of_text_id_of_both_files_counts(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert resolve(tmp_path, LLAMA).eos_token_ids == {2, 7, 9}
    assert resolve(tmp_path, {**LLAMA, "eos_token_id": None}).eos_token_ids == {7, 9}


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), ("{", "not valid JSON"), ("[]", "a list")])
def test_a_directory_that_is_no_model_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        resolve_model(ModelConfig(path=str(tmp_path)), "cpu")


def test_a_path_that_is_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.path='/no/such/model' is not a directory, and not a hub id"):
        resolve_model(ModelConfig(path="/no/such/model"), "cpu")


def test_a_hub_id_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"model.path='owner/missing' .* hf download owner/missing"):
        resolve_model(ModelConfig(path="owner/missing"), "cpu")
