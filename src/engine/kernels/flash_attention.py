"""flash-attn 2 behind the backend contract: its varlen kernel for prefill, its KV cache kernel for decode.

What its sources promise and this file relies on: the causal mask is aligned at the bottom right; pages are addressed as
block id x stride(0) in 64 bits, so a layer's strided view of the whole cache will do; a page holds a multiple of 256
tokens; block tables are int32 and entries past the context are never read; values past the context are zero-filled in
shared memory, so a NaN in an unwritten slot stays where it is. A row with context length 0 visits no page: without
splits the kernel writes zeros, with splits every partial has weight zero, so the output is zero both ways.
"""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from engine.batch import DecodeBatch, PrefillBatch
from engine.kernels.attention import AttentionBackend, LayerCache
from engine.kernels.kv_store import store_kv

PAGE_MULTIPLE = 256


class FlashAttention(AttentionBackend):
    """The fastest prefill on Ampere and newer, in half precision; needs kv.block_size a multiple of 256."""

    name = "flash_attn"
    default_block_size = PAGE_MULTIPLE

    def check_block_size(self, block_size: int) -> None:
        if block_size % PAGE_MULTIPLE or block_size < 1:
            raise ValueError(f"kv.block_size must be a multiple of {PAGE_MULTIPLE} with kernels.attention=flash_attn; "
                             f"got {block_size}")

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
        store_kv(k_TKD, v_TKD, cache, slot_mapping_T)

    def prefill(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache,
                batch: PrefillBatch) -> torch.Tensor:
        paged = batch.block_tables_RB is not None
        if paged:
            self.check_block_size(cache.keys_NSKD.shape[1])
        return flash_attn_varlen_func(
            q_THD, cache.keys_NSKD if paged else k_TKD, cache.values_NSKD if paged else v_TKD,
            cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=batch.cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k,
            causal=True, block_table=batch.block_tables_RB)

    def decode(self, q_RHD: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
        block_size = cache.keys_NSKD.shape[1]
        self.check_block_size(block_size)
        # flash-attn splits the context by the table's width, so columns that no row can reach would cost splits.
        num_blocks = max(1, -(-batch.max_context_len // block_size))
        return flash_attn_with_kvcache(
            q_RHD[:, None], cache.keys_NSKD, cache.values_NSKD, cache_seqlens=batch.context_lens_R,
            block_table=batch.block_tables_RB[:, :num_blocks], causal=True)[:, 0]
