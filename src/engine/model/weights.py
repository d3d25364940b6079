"""Fills a decoder's preallocated weights: from safetensors files, or with seeded random values.

Files are memory-mapped and each tensor is copied from its pages straight into its place (a slice of a fused matrix
where the decoder has one), converted to the decoder's dtype on the way: there is never a second copy of the model. All
headers are read first, so that a checkpoint which does not fit is refused before any memory is filled.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.model.decoder import Decoder
from engine.model.source import read_json

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
DUMMY_STD = 0.02  # what these families are initialised with; activations stay far from float16's limit
NAMES_SHOWN = 5


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_weights(decoder: Decoder, directory: Path) -> None:
    """Fill `decoder` from the safetensors files of `directory`.

    ValueError when a file is absent or damaged, or a tensor is missing, unknown or of another shape than the decoder's.
    """
    targets = decoder.checkpoint_tensors()
    stored = read_headers(weight_files(directory))
    check_fit(targets, stored, directory, decoder.architecture.tie_word_embeddings)
    for name, target in targets.items():
        # One mapping a tensor: pages of tensors already copied do not stay in this process.
        with safe_open(stored[name].file, framework="pt") as file:
            target.copy_(file.get_tensor(name))


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's files: model.safetensors, or those that its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ValueError(f"{directory} holds neither {single.name} nor {index.name}: only safetensors checkpoints are "
                         "read (model.load_format=dummy needs no weights)")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    if absent := [file.name for file in files if not file.exists()]:
        raise ValueError(f"{index} names files that are not in {directory}: {shown(absent)}")
    return files


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor of the files by name; ValueError names a file that is no whole safetensors file."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    part = handle.get_slice(name)
                    if name in stored:
                        raise ValueError(f"{name} is in {stored[name].file} and in {file}")
                    stored[name] = StoredTensor(file, tuple(part.get_shape()), part.get_dtype())
        except SafetensorError as error:
            raise ValueError(f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}. It may "
                             "have been cut short: fetch it again") from error
    return stored


def check_fit(targets: dict[str, torch.Tensor], stored: dict[str, StoredTensor], directory: Path,
              is_tied: bool) -> None:
    """Raise ValueError unless the stored tensors are those of the decoder, in its shapes."""
    if missing := [f"{name} {list(target.shape)}" for name, target in targets.items() if name not in stored]:
        raise ValueError(f"{directory}: weights lack {shown(missing)}")
    if surplus := [f"{tensor.file.name}: {name} {list(tensor.shape)}" for name, tensor in stored.items()
                   if name not in targets and not is_redundant(name, is_tied)]:
        raise ValueError(f"{directory}: weights hold tensors that the architecture does not have: {shown(surplus)}")
    for name, target in targets.items():
        tensor = stored[name]
        if tensor.shape != tuple(target.shape):
            raise ValueError(f"{tensor.file}: {name} has shape {list(tensor.shape)}; config.json implies "
                             f"{list(target.shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{tensor.file}: {name} is stored as {tensor.dtype}; supported: {', '.join(FLOAT_DTYPES)}")


def is_redundant(name: str, is_tied: bool) -> bool:
    """Whether a tensor says again what the config says: a tied output matrix, or old Llama's rotary frequencies."""
    return (is_tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")


def shown(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def init_dummy(decoder: Decoder, seed: int) -> None:
    """Fill `decoder` with random values: norms 1, everything else normal around 0.

    Drawn on the decoder's device, so that large models start fast: the same seed gives the same values on the same kind
    of device and in the same dtype, not across them.
    """
    tensors = decoder.checkpoint_tensors()
    generator = torch.Generator(decoder.embedding.device).manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
