"""The paged KV cache: one block-major tensor [N blocks, L layers, key or value, S tokens, K KV heads, D head dim].

A block holds all layers of its tokens, so the cache grows by whole blocks and its strides do not depend on their count.
A layer's keys are a strided view of it.
"""

import math
from dataclasses import dataclass

import torch

from engine.config import Architecture
from engine.kernels.attention import LayerCache


@dataclass(frozen=True)
class KVCache:
    """Memory for `num_blocks` blocks of `block_size` tokens. Not cleared: kernels never read an unwritten slot."""

    blocks_NLPSKD: torch.Tensor

    @classmethod
    def allocate(cls, arch: Architecture, num_blocks: int, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> "KVCache":
        """A cache of `num_blocks` blocks of `block_size` tokens, uninitialised."""
        return cls(torch.empty(_shape(arch, num_blocks, block_size), dtype=dtype, device=device))

    @classmethod
    def over(cls, memory: torch.Tensor, arch: Architecture, num_blocks: int, block_size: int,
             dtype: torch.dtype) -> "KVCache":
        """A cache of `num_blocks` blocks in the first bytes of `memory`, which must outlive it."""
        shape = _shape(arch, num_blocks, block_size)
        return cls(memory[:math.prod(shape) * dtype.itemsize].view(dtype).view(shape))

    def first(self, num_blocks: int) -> "KVCache":
        """Its first blocks, at the same addresses."""
        return KVCache(self.blocks_NLPSKD[:num_blocks])

    @property
    def num_blocks(self) -> int:
        return self.blocks_NLPSKD.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.blocks_NLPSKD.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.blocks_NLPSKD.nbytes

    def layers(self) -> tuple[LayerCache, ...]:
        """Each layer's keys and values as views."""
        blocks = self.blocks_NLPSKD
        return tuple(LayerCache(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(blocks.shape[1]))


def _shape(arch: Architecture, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return num_blocks, arch.num_hidden_layers, 2, block_size, arch.num_key_value_heads, arch.head_dim
