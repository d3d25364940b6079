"""Attention in Triton behind the backend contract: any floating dtype, any query group, block sizes a power of two.

The kernels live one idea a file: `kv_store` scatters, `paged_prefill` attends causally over prompts, `paged_decode`
reads a request's context in parallel splits. This file only joins them.
"""

import torch

from engine.batch import DecodeBatch, PrefillBatch
from engine.kernels.attention import AttentionBackend, LayerCache
from engine.kernels.kv_store import store_kv
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import prefill_attention

MIN_BLOCK_SIZE = 16  # the smallest tile that a tensor core multiplies; a tile never crosses a block


class TritonAttention(AttentionBackend):
    """Written for Hopper, compiled for what it runs on; under TRITON_INTERPRET=1 it runs on a CPU, for tests."""

    name = "triton"
    default_block_size = 64

    def check_block_size(self, block_size: int) -> None:
        if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
            raise ValueError(f"kv.block_size must be a power of two of at least {MIN_BLOCK_SIZE} with "
                             f"kernels.attention=triton; got {block_size}")

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
        store_kv(k_TKD, v_TKD, cache, slot_mapping_T)

    def prefill(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache,
                batch: PrefillBatch) -> torch.Tensor:
        if batch.block_tables_RB is None:
            return prefill_attention(q_THD, k_TKD[:, None], v_TKD[:, None], batch)
        self.check_block_size(cache.keys_NSKD.shape[1])
        return prefill_attention(q_THD, cache.keys_NSKD, cache.values_NSKD, batch)

    def decode(self, q_RHD: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
        self.check_block_size(cache.keys_NSKD.shape[1])
        return paged_decode(q_RHD, cache.keys_NSKD, cache.values_NSKD, batch.block_tables_RB, batch.context_lens_R,
                            batch.max_context_len)
