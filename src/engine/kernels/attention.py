"""The contract of an attention backend, and the choice of one.

A backend stores new keys and values into the paged KV cache, and attends: causally over prompts (prefill) and from one
query a request over its cached context (decode). Shape letters: T tokens, R requests, H query heads, K KV heads, D head
dimension, N blocks, S tokens a block. Query head h reads KV head h // (H // K). The softmax scale is D ** -0.5.
Backends are imported when they are chosen, so this module needs neither Triton nor flash-attn nor a GPU.
"""

import importlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine.batch import DecodeBatch, PrefillBatch

MAX_HEAD_DIM = 256  # of flash-attn, and of the Triton kernels' tiles
HALF_PRECISION = (torch.float16, torch.bfloat16)
BACKENDS = {  # name -> module and class, in the order in which `auto` prefers them
    "flash_attn": ("flash_attention", "FlashAttention"),
    "triton": ("triton_attention", "TritonAttention"),
    "reference": ("reference", "ReferenceAttention"),
}


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: views [N, S, K, D], strided over the whole cache, last dimension contiguous."""

    keys_NSKD: torch.Tensor
    values_NSKD: torch.Tensor


class AttentionBackend(ABC):
    """Three operations on one layer. Implementations launch no host synchronisation in `store` and `decode`."""

    name: str
    default_block_size: int  # tokens a KV block when kv.block_size is auto

    def check_block_size(self, block_size: int) -> None:  # noqa: B027 - a backend without a bound inherits this
        """Raise ValueError where the backend cannot read a cache of `block_size` tokens a block."""

    @abstractmethod
    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
        """Write each token's key and value at its slot; a token with slot -1 writes nothing."""

    @abstractmethod
    def prefill(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache,
                batch: PrefillBatch) -> torch.Tensor:
        """Causal attention of each request's new tokens over its cached prefix and themselves; returns [T, H, D].

        Called after `store`. The last query of a request is aligned with its last key.
        """

    @abstractmethod
    def decode(self, q_RHD: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
        """Attention of one query a request over its first context_lens_R cached tokens; returns [R, H, D].

        Called after `store`. Rows with context length 0 are padding: they read nothing and their output is zero.
        """


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype,
                     head_dim: int) -> tuple[AttentionBackend, str]:
    """The backend that `kernels.attention` names, and a sentence that says why.

    `auto` takes the first of flash_attn, triton, reference that runs here. A named backend that does not run here is a
    ValueError that says what is missing.
    """
    setting = f"{device.type}, {str(dtype).removeprefix('torch.')}, head_dim {head_dim}"
    if requested == "auto":
        candidates = tuple(BACKENDS) if device.type == "cuda" else ("reference",)  # Triton's interpreter is for tests
        missing = {name: _find_missing(name, device, dtype, head_dim) for name in candidates}
        chosen = next(name for name, need in missing.items() if need is None)
        skipped = "".join(f"; {name} needs {need}" for name, need in missing.items() if need)
        return _build(chosen), f"auto chose {chosen} for {setting}{skipped}"
    if requested not in BACKENDS:
        raise ValueError(f"kernels.attention must be one of auto, {', '.join(BACKENDS)}; got {requested!r}")
    if need := _find_missing(requested, device, dtype, head_dim):
        raise ValueError(f"kernels.attention={requested} needs {need}; got {setting}")
    return _build(requested), f"{requested} was asked for ({setting})"


def _build(name: str) -> AttentionBackend:
    module, cls = BACKENDS[name]
    return getattr(importlib.import_module(f"engine.kernels.{module}"), cls)()


def _find_missing(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What keeps the backend from running here, as a phrase; None when nothing does."""
    if name == "reference":
        return None
    if device.type != "cuda" and (name == "flash_attn" or os.environ.get("TRITON_INTERPRET") != "1"):
        return "a CUDA device"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim at most {MAX_HEAD_DIM}"
    if name == "flash_attn":
        if dtype not in HALF_PRECISION:
            return "float16 or bfloat16"
        if head_dim % 8:
            return "head_dim a multiple of 8"
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"the {name} package ({error})"
    return None
