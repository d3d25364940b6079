"""Causal attention over prompts of any lengths laid end to end: one program takes a tile of one request's new tokens.

Keys and values come either from the batch itself or, where a request continues a cached prefix, from the paged cache
through its block table. Both are one walk: without a table a "block" is one token and tokens follow each other.

Shape letters: T tokens, R requests, H query heads, K KV heads, D head dimension, N blocks, S tokens a block, B blocks a
request.
"""

import torch
import triton
import triton.language as tl

from engine.batch import PrefillBatch
from engine.kernels.paged_decode import LOG2_E

TILE, WIDE_TILE = 64, 32  # queries and keys a tile; compiled for sm_90, a larger wide tile spills registers


def prefill_attention(q_THD: torch.Tensor, keys_NSKD: torch.Tensor, values_NSKD: torch.Tensor,
                      batch: PrefillBatch) -> torch.Tensor:
    """Attention of each request's new tokens over its prefix and themselves, [T, H, D].

    With block tables the keys are the cache, S a power of two of at least 16; without, the batch's own as [T, 1, K, D].
    """
    _, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = keys_NSKD.shape[1:3]
    if num_heads % num_kv_heads or keys_NSKD.shape[3] != head_dim or keys_NSKD.shape != values_NSKD.shape:
        raise ValueError(f"prefill needs q [T, H, D], keys and values [N, S, K, D] with H a multiple of K; got "
                         f"{tuple(q_THD.shape)}, {tuple(keys_NSKD.shape)}, {tuple(values_NSKD.shape)}")
    is_paged = batch.block_tables_RB is not None
    # Without tables any int32 pointer will do in their place: the kernel does not read it.
    tables = batch.cu_seqlens_k if batch.block_tables_RB is None else batch.block_tables_RB
    head_dim_padded = triton.next_power_of_2(head_dim)
    is_wide = head_dim_padded > 128 or q_THD.element_size() > 2
    tile = WIDE_TILE if is_wide else TILE
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(batch.max_seqlen_q, tile), num_heads, len(batch.cu_seqlens_q) - 1)
    _prefill_kernel[grid](
        q_THD, keys_NSKD, values_NSKD, tables, batch.cu_seqlens_q, batch.cu_seqlens_k, out_THD,
        q_THD.stride(0), q_THD.stride(1), keys_NSKD.stride(0), keys_NSKD.stride(1), keys_NSKD.stride(2),
        values_NSKD.stride(0), values_NSKD.stride(1), values_NSKD.stride(2), tables.stride(0),
        head_dim ** -0.5 * LOG2_E, G=num_heads // num_kv_heads, H=num_heads, D=head_dim, D_PAD=head_dim_padded,
        S=block_size, IS_PAGED=is_paged, ROWS=tile, TILE=min(tile, block_size) if is_paged else tile,
        num_warps=4, num_stages=2)
    return out_THD


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
        q_ptr,  # [T, H, D]
        keys_ptr, values_ptr,  # [N, S, K, D]; [T, 1, K, D] when not paged
        tables_ptr,  # [R, B] int32
        starts_q_ptr, starts_k_ptr,  # [R + 1] int32
        out_ptr,  # [T, H, D]
        q_stride_t, q_stride_h, k_stride_n, k_stride_s, k_stride_h, v_stride_n, v_stride_s, v_stride_h, table_stride,
        scale, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
        IS_PAGED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    start_q = tl.load(starts_q_ptr + request).to(tl.int64)
    start_k = tl.load(starts_k_ptr + request).to(tl.int64)
    num_new = (tl.load(starts_q_ptr + request + 1) - start_q).to(tl.int32)
    context_len = (tl.load(starts_k_ptr + request + 1) - start_k).to(tl.int32)
    # The last tiles of a prompt see the most keys: they start first, so that no long one is left alone at the end.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first_row >= num_new:
        return
    row, d, t = first_row + tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, TILE)
    position = context_len - num_new + row  # the last query is aligned with the last key
    is_query = (row < num_new)[:, None] & (d < D)[None, :]
    token = start_q + row
    q = tl.load(q_ptr + token[:, None] * q_stride_t + head * q_stride_h + d[None, :], mask=is_query, other=0.0)
    running_max = tl.full((ROWS,), -1e30, tl.float32)  # finite, so that no difference below is NaN
    running_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    end = tl.minimum(context_len, context_len - num_new + first_row + ROWS)
    # The 64 bits stay in one scalar a tile; the tile's own offsets fit 32 and do not change.
    k_offset = t[:, None] * (k_stride_s if IS_PAGED else k_stride_n) + d[None, :]
    v_offset = t[:, None] * (v_stride_s if IS_PAGED else v_stride_n) + d[None, :]
    for start in tl.range(0, end, TILE):
        if IS_PAGED:  # blocks hold whole tiles: one look into the table serves a tile
            block = tl.load(tables_ptr + request * table_stride + start // S).to(tl.int64)
            k_base = block * k_stride_n + (start % S) * k_stride_s
            v_base = block * v_stride_n + (start % S) * v_stride_s
        else:
            k_base, v_base = (start_k + start) * k_stride_n, (start_k + start) * v_stride_n
        # Slots past the context may hold NaN: masked here, because a weight of zero would not silence it.
        is_token = (start + t < context_len)[:, None] & (d < D)[None, :]
        key = tl.load(keys_ptr + k_base + (head // G) * k_stride_h + k_offset, mask=is_token, other=0.0)
        value = tl.load(values_ptr + v_base + (head // G) * v_stride_h + v_offset, mask=is_token, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((start + t)[None, :] <= position[:, None], score, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        running_max = new_max
    result = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    place = token[:, None] * (H * D) + head * D + d[None, :]
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=is_query)
