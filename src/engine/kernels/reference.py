"""Attention in plain PyTorch: the specification the other backends must agree with, and the engine's path on a CPU.

Prefill and the CPU's decode take one request at a time and read exactly its tokens, so a row's result does not depend
on its company. Decode on another device must not ask for the lengths (that would wait for the device, and a graph could
not record it): it gathers whole tables and masks keys *and* values, because an unwritten slot may hold NaN and NaN * 0
is NaN.

Shape letters: T tokens, R requests, H query heads, K KV heads, G = H // K, D head dimension, S tokens a block, C tokens
of context.
"""

import torch
import torch.nn.functional as F

from engine.batch import DecodeBatch, PrefillBatch
from engine.kernels.attention import AttentionBackend, LayerCache


class ReferenceAttention(AttentionBackend):
    """Runs anywhere, in any floating dtype. On CUDA its decode copies R x max_context_len keys and values: slow."""

    name = "reference"
    default_block_size = 128  # a context in one block is read in place: measured 1.9 times as fast as in two

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
        write = _write_live if slot_mapping_T.is_cpu else _write_padded
        write(k_TKD, cache.keys_NSKD, slot_mapping_T)
        write(v_TKD, cache.values_NSKD, slot_mapping_T)

    def prefill(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache,
                batch: PrefillBatch) -> torch.Tensor:
        starts_q, starts_k = batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.tolist()
        tables = None if batch.block_tables_RB is None else batch.block_tables_RB.tolist()
        out_THD = torch.empty_like(q_THD)
        for r in range(len(starts_q) - 1):
            new = slice(starts_q[r], starts_q[r + 1])
            if tables is None:
                k_CKD, v_CKD = k_TKD[new], v_TKD[new]
            else:
                context_len = starts_k[r + 1] - starts_k[r]
                k_CKD = _read_context(cache.keys_NSKD, tables[r], context_len)
                v_CKD = _read_context(cache.values_NSKD, tables[r], context_len)
            out_THD[new] = _causal(q_THD[new], k_CKD, v_CKD)
        return out_THD

    def decode(self, q_RHD: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
        attend = _decode_each if q_RHD.is_cpu else _decode_padded
        num_kv_heads = cache.keys_NSKD.shape[2]
        # Query heads that share a KV head are laid out as its queries, so no key or value is repeated.
        q_RKGD = q_RHD.unflatten(1, (num_kv_heads, -1))
        return attend(q_RKGD, cache, batch).flatten(1, 2)


def _write_live(new_TKD: torch.Tensor, cached_NSKD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Select the live rows, then write them. Counting them is free on a CPU."""
    is_live_T = slot_mapping_T >= 0
    slots_T = slot_mapping_T[is_live_T].long()
    block_size = cached_NSKD.shape[1]
    cached_NSKD[slots_T // block_size, slots_T % block_size] = new_TKD[is_live_T]


def _write_padded(new_TKD: torch.Tensor, cached_NSKD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Write every row without counting the live ones, which would make the host wait for the device.

    A padded row repeats the first live row's write; with no live row at all, slot 0's old content is written back.
    """
    is_live_T = slot_mapping_T >= 0
    rows_T = torch.where(is_live_T, torch.arange(len(new_TKD), device=new_TKD.device), is_live_T.byte().argmax())
    slots_T = slot_mapping_T[rows_T].clamp(min=0).long()
    block_size = cached_NSKD.shape[1]
    place = slots_T // block_size, slots_T % block_size
    cached_NSKD[place] = torch.where(is_live_T[rows_T][:, None, None], new_TKD[rows_T], cached_NSKD[place])


def _read_context(cached_NSKD: torch.Tensor, block_table: list[int], context_len: int) -> torch.Tensor:
    """The first `context_len` tokens of a request, [C, K, D]; a view where they lie in one block."""
    block_size = cached_NSKD.shape[1]
    blocks = [cached_NSKD[block] for block in block_table[:-(-context_len // block_size)]]
    # Concatenated views: measured twice as fast on a CPU as indexing with the table.
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:context_len]


def _causal(q_THD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor) -> torch.Tensor:
    """Causal attention of one request's T last tokens over its C tokens; returns [T, H, D]."""
    num_new, context_len = len(q_THD), len(k_CKD)
    mask = None
    if num_new != context_len:  # is_causal aligns the first query with the first key; a cached prefix moves it
        mask = torch.ones(num_new, context_len, dtype=torch.bool, device=q_THD.device).tril(context_len - num_new)
    out_HTD = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None], k_CKD.transpose(0, 1)[None], v_CKD.transpose(0, 1)[None],
        attn_mask=mask, is_causal=mask is None, enable_gqa=q_THD.shape[1] != k_CKD.shape[1])[0]
    return out_HTD.transpose(0, 1)


def _decode_each(q_RKGD: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
    """One request at a time, reading its own blocks only. Looks at lengths and tables, which is free on a CPU."""
    context_lens = batch.context_lens_R.tolist()
    max_blocks = -(-max(context_lens) // cache.keys_NSKD.shape[1])
    tables = batch.block_tables_RB[:, :max_blocks].tolist()
    out_RKGD = torch.zeros_like(q_RKGD)
    for r, context_len in enumerate(context_lens):
        if context_len:
            k_KCD = _read_context(cache.keys_NSKD, tables[r], context_len).transpose(0, 1)
            v_KCD = _read_context(cache.values_NSKD, tables[r], context_len).transpose(0, 1)
            out_RKGD[r] = F.scaled_dot_product_attention(q_RKGD[r:r + 1], k_KCD[None], v_KCD[None])[0]
    return out_RKGD


def _decode_padded(q_RKGD: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
    """All requests at once over `max_context_len` tokens, masked; never looks at a length, so a graph can record it."""
    block_size = cache.keys_NSKD.shape[1]
    num_blocks = -(-batch.max_context_len // block_size)
    positions_C = torch.arange(num_blocks * block_size, device=q_RKGD.device)
    is_past_RC = positions_C >= batch.context_lens_R[:, None]
    # Table entries past the context may be anything: block 0 stands in, and is masked with the rest.
    tables_RB = batch.block_tables_RB[:, :num_blocks].masked_fill(is_past_RC[:, ::block_size], 0)
    hidden_RC11 = is_past_RC[:, :, None, None]
    k_RKCD = cache.keys_NSKD[tables_RB].flatten(1, 2).masked_fill_(hidden_RC11, 0).transpose(1, 2)
    v_RKCD = cache.values_NSKD[tables_RB].flatten(1, 2).masked_fill_(hidden_RC11, 0).transpose(1, 2)
    # A row of no context may see its first position, whose value is now zero: an empty softmax would be NaN.
    is_seen_RC = ~is_past_RC | (positions_C == 0)
    return F.scaled_dot_product_attention(q_RKGD, k_RKCD, v_RKCD, attn_mask=is_seen_RC[:, None, None, :])
