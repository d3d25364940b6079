"""Where a model comes from: its directory, and what config.json says about it.

A directory's config.json is the architecture. It is read here under every name that transformers has written it, and
what the decoder would compute wrongly (another activation, sliding windows, an unknown rope type) is refused by name
instead of ignored. Only json, safetensors, tokenizer and jinja files are fetched or read: no code of a model ever runs.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from engine.config import Architecture, ModelConfig

FAMILY_OF_CLASS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
CHECKPOINT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "max_position_embeddings", "rms_norm_eps")
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class ModelSource:
    """A model, resolved: nothing is `auto` any more. `directory` is None for dummy weights without a path."""

    directory: Path | None
    architecture: Architecture
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    load_format: str


def resolve_model(config: ModelConfig, device_type: str) -> ModelSource:
    """The model that `config` names, as it will run on `device_type`.

    ValueError when the directory or hub id cannot be read, is not a model that the decoder computes exactly, disagrees
    with `config.architecture`, or has fewer positions than `config.max_model_len`.
    """
    is_shape_known = config.is_dummy and config.architecture is not None  # then nothing needs to be fetched
    directory = None if config.path is None or is_shape_known else find_directory(config.path, not config.is_dummy)
    settings = {} if directory is None else read_json(directory / "config.json")
    if config.is_dummy and config.architecture is not None:
        architecture = config.architecture
    else:
        architecture = read_architecture(settings, f"{directory}/config.json")
        if config.architecture is not None:
            check_same(config.architecture, architecture, f"{directory}/config.json")
    if config.max_model_len > architecture.max_position_embeddings:
        raise ValueError(f"model.max_model_len must be at most the model's max_position_embeddings="
                         f"{architecture.max_position_embeddings}; got {config.max_model_len}")
    return ModelSource(
        directory=directory,
        architecture=architecture,
        dtype=choose_dtype(config, settings, device_type),
        eos_token_ids=frozenset() if directory is None else read_eos_token_ids(directory, settings),
        load_format="dummy" if config.is_dummy else "safetensors")


def find_directory(path: str, with_weights: bool) -> Path:
    """The directory at `path`, or that of the hub id `path`: the local cache's if it is whole, else downloaded."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise ValueError(f"model.path={path!r} is not a directory, and not a hub id (owner/name) either")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(path, local_files_only=True))
        if is_whole(cached, with_weights):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(path, allow_patterns=TEXT_FILES + ["*.safetensors"] * with_weights))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.path={path!r} is not a directory here, and as a hub id it could not be downloaded "
                         f"({type(error).__name__}: {reason}). Give a model directory, or download it where there is a "
                         f"network: hf download {path} --local-dir DIRECTORY") from error


def is_whole(directory: Path, with_weights: bool) -> bool:
    """Whether a cached snapshot holds config.json and, if asked for, every weight file."""
    if not (directory / "config.json").exists():
        return False
    index = directory / "model.safetensors.index.json"
    names = set(read_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return not with_weights or all((directory / name).exists() for name in names)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError names the file when there is none or it is not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {path.parent} is not a Hugging Face model directory") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; it holds a {type(content).__name__}")
    return content


def read_architecture(settings: Mapping[str, Any], where: str) -> Architecture:
    """The architecture that a config.json describes; `where` names it in errors."""
    family = read_family(settings, where)
    required = (*REQUIRED_KEYS, "head_dim") if family == "qwen3" else REQUIRED_KEYS
    if missing := [key for key in required if settings.get(key) is None]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    check_supported(settings, where)
    num_heads = settings["num_attention_heads"]
    has_attention_bias = bool(settings.get("attention_bias", False))
    return Architecture(
        family=family,
        **{key: settings[key] for key in REQUIRED_KEYS},
        num_key_value_heads=settings.get("num_key_value_heads") or num_heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // num_heads,
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or has_attention_bias,
        o_bias=family != "qwen2" and has_attention_bias,
        mlp_bias=family == "llama" and bool(settings.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        **read_rope(settings, where))


def read_family(settings: Mapping[str, Any], where: str) -> str:
    """The family by `architectures`, or by `model_type` where that is absent."""
    classes = settings.get("architectures") or []
    known = FAMILY_OF_CLASS if classes else {family: family for family in FAMILY_OF_CLASS.values()}
    found = classes[0] if classes else settings.get("model_type")
    if found not in known:
        key = "architectures" if classes else "model_type"
        raise ValueError(f"{where}: {key} must be one of {', '.join(known)}; got {found!r}")
    return known[found]


def check_supported(settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a setting that changes what a model computes and that the decoder does not follow."""
    if (activation := settings.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{where}: hidden_act must be silu; got {activation!r}")
    if quantization := settings.get("quantization_config"):
        raise ValueError(f"{where}: quantized weights are not supported; quantization_config={quantization}")
    layer_types = settings.get("layer_types") or []
    if settings.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"{where}: sliding window attention is not supported; use_sliding_window="
                         f"{settings.get('use_sliding_window')}, layer_types={sorted(set(layer_types))}")


def read_rope(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of an Architecture.

    transformers 5 writes one dict, `rope_parameters`; earlier versions wrote `rope_theta` beside `rope_scaling`, whose
    type is under `rope_type` or, still earlier, `type`.
    """
    rope = {**(settings.get("rope_parameters") or {}), **(settings.get("rope_scaling") or {})}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or settings.get("rope_theta")
    result: dict[str, Any] = {} if theta is None else {"rope_theta": float(theta)}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{where}: rope settings that differ by layer are not supported; got {rope}")
    if (share := rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))) not in (None, 1.0):
        raise ValueError(f"{where}: partial_rotary_factor must be 1.0; got {share}")
    if rope_type == "default":
        return result
    if rope_type != "llama3":
        raise ValueError(f"{where}: rope_type must be default or llama3; got {rope_type!r}")
    if missing := [key for key in LLAMA3_KEYS if rope.get(key) is None]:
        raise ValueError(f"{where}: rope settings of type llama3 lack {', '.join(missing)}")
    original = rope.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    result["rope_scaling"] = {"rope_type": "llama3", **{key: rope[key] for key in LLAMA3_KEYS},
                              "original_max_position_embeddings": original}
    return result


def check_same(stated: Architecture, found: Architecture, where: str) -> None:
    """Raise ValueError naming the first key in which the configured architecture differs from the directory's."""
    for key in (item.name for item in fields(Architecture)):
        if getattr(stated, key) != getattr(found, key):
            raise ValueError(f"model.architecture.{key}={getattr(stated, key)!r} contradicts {where}, which says "
                             f"{getattr(found, key)!r}: choose the model group that fits model.path, or model=custom")


def choose_dtype(config: ModelConfig, settings: Mapping[str, Any], device_type: str) -> torch.dtype:
    """What `model.dtype` means here; `auto` is float32 on a CPU, else the checkpoint's own, bfloat16 if it has none."""
    if config.dtype != "auto":
        return CHECKPOINT_DTYPES[config.dtype]
    if device_type == "cpu":
        return torch.float32
    stated = settings.get("dtype") or settings.get("torch_dtype") or "bfloat16"
    if config.is_dummy:
        return torch.bfloat16
    if stated not in CHECKPOINT_DTYPES:
        raise ValueError(f"model.dtype=auto cannot follow the checkpoint's dtype {stated!r}; set model.dtype to one of "
                         + ", ".join(CHECKPOINT_DTYPES))
    return CHECKPOINT_DTYPES[stated]


def read_eos_token_ids(directory: Path, settings: Mapping[str, Any]) -> frozenset[int]:
    """Every token id that config.json or generation_config.json names as an end of text."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    stated = (settings.get("eos_token_id"), generation.get("eos_token_id"))
    return frozenset(token_id for value in stated if value is not None
                     for token_id in (value if isinstance(value, list) else [value]))
