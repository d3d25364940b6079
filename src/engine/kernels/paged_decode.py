"""Decode attention over the paged cache: every request's context is cut into splits that run side by side.

A step reads each cached key and value once and computes almost nothing, so the kernel is shaped for bandwidth: one
program takes one KV head of one split, and all query heads of the group ride along as the (padded) rows of a
tensor-core product. A split is `min_split` tokens, longer where a request would otherwise need more than `num_splits`
of them; a request that fits one split is finished on the spot, the others leave partial softmaxes that a second kernel
combines. The grid depends on the shapes and on `max_context_len` alone, so a graph that recorded it serves any lengths.

Shape letters: R requests, H query heads, K KV heads, D head dimension, N blocks, S tokens a block, B blocks a request,
P splits. Partial softmaxes are kept in base 2: exp2 is one instruction where exp is two.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MIN_DOT_ROWS = 16  # the fewest rows that a tensor core multiplies
TILE_BYTES = 16384  # of keys; two stages of keys and values then leave room for three programs an SM
MAX_TILE_TOKENS = 64
FEW_PROGRAMS = 128  # up to so many (request, KV head) pairs the device is empty and short splits fill it
SHORT_SPLIT, LONG_SPLIT = 128, 512  # tokens; measured on an H200, the long one for full batches
MAX_PROGRAMS = 1024  # at most so many programs for few requests, many times an H200's 132 SMs
MIN_SPLITS = 8
PARTIALS_A_STEP = tl.constexpr(16)  # that the combining kernel holds in registers


def paged_decode(q_RHD: torch.Tensor, keys_NSKD: torch.Tensor, values_NSKD: torch.Tensor, block_tables_RB: torch.Tensor,
                 context_lens_R: torch.Tensor, max_context_len: int) -> torch.Tensor:
    """Attention of one query a request over its context, [R, H, D]; zeros where the context length is 0.

    S must be a power of two of at least 16. Table entries past a context and slots past its last token are never used.
    """
    num_requests, num_heads, head_dim = q_RHD.shape
    block_size, num_kv_heads = keys_NSKD.shape[1:3]
    if num_heads % num_kv_heads or keys_NSKD.shape[3] != head_dim or keys_NSKD.stride() != values_NSKD.stride():
        raise ValueError("decode needs q [R, H, D] and equally strided caches [N, S, K, D] with H a multiple of K; got "
                         f"{tuple(q_RHD.shape)}, {tuple(keys_NSKD.shape)}, strides {keys_NSKD.stride()} and "
                         f"{values_NSKD.stride()}")
    out_RHD = torch.empty_like(q_RHD, memory_format=torch.contiguous_format)
    min_split, num_splits = _plan_splits(num_requests * num_kv_heads, max_context_len)
    num_partials = num_splits if num_splits > 1 else 0  # a single split writes its result and leaves no partial
    part_RHPD = q_RHD.new_empty((num_requests, num_heads, num_partials, head_dim), dtype=torch.float32)
    max_RHP = q_RHD.new_empty((num_requests, num_heads, num_partials), dtype=torch.float32)
    sum_RHP = torch.empty_like(max_RHP)
    head_dim_padded = triton.next_power_of_2(head_dim)
    tile = min(block_size, MAX_TILE_TOKENS, max(16, TILE_BYTES // (head_dim_padded * q_RHD.element_size())))
    group = num_heads // num_kv_heads
    _split_kernel[(num_kv_heads, num_splits, num_requests)](
        q_RHD, keys_NSKD, values_NSKD, block_tables_RB, context_lens_R, out_RHD, part_RHPD, max_RHP, sum_RHP,
        q_RHD.stride(0), q_RHD.stride(1), keys_NSKD.stride(0), keys_NSKD.stride(1), keys_NSKD.stride(2),
        block_tables_RB.stride(0), num_splits, min_split, head_dim ** -0.5 * LOG2_E,
        G=group, G_PAD=max(MIN_DOT_ROWS, triton.next_power_of_2(group)), H=num_heads, D=head_dim, D_PAD=head_dim_padded,
        S=block_size, TILE=tile, num_warps=4, num_stages=2)
    if num_splits > 1:
        _combine_kernel[(num_heads, num_requests)](
            part_RHPD, max_RHP, sum_RHP, context_lens_R, out_RHD, num_splits, min_split,
            H=num_heads, D=head_dim, D_PAD=head_dim_padded, TILE=tile, num_warps=2)
    return out_RHD


def _plan_splits(num_pairs: int, max_context_len: int) -> tuple[int, int]:
    """(fewest tokens of a split, number of splits) for so many (request, KV head) pairs; knows no live length."""
    min_split = SHORT_SPLIT if num_pairs <= FEW_PROGRAMS else LONG_SPLIT
    most = max(MIN_SPLITS, MAX_PROGRAMS // num_pairs)
    return min_split, max(1, min(triton.cdiv(max_context_len, min_split), most))


@triton.jit
def _split_tokens(context_len, num_splits, min_split, TILE: tl.constexpr):
    """Tokens in each split of a request: a whole number of tiles."""
    return tl.maximum(tl.cdiv(context_len, num_splits * TILE) * TILE, min_split)


@triton.jit(do_not_specialize=["num_splits", "min_split", "table_stride"])
def _split_kernel(
        q_ptr,  # [R, H, D]
        keys_ptr, values_ptr,  # [N, S, K, D]
        tables_ptr,  # [R, B] int32
        lens_ptr,  # [R] int32
        out_ptr,  # [R, H, D]
        part_ptr, max_ptr, sum_ptr,  # [R, H, P, D], [R, H, P], [R, H, P]
        q_stride_r, q_stride_h, cache_stride_n, cache_stride_s, cache_stride_h, table_stride, num_splits, min_split,
        scale, G: tl.constexpr, G_PAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
        S: tl.constexpr, TILE: tl.constexpr):
    kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    context_len = tl.load(lens_ptr + request)
    split_len = _split_tokens(context_len, num_splits, min_split, TILE)
    begin = split * split_len
    # The first split also runs for a row without context: it finds no tile and writes the zeros of padding.
    if (begin >= context_len) & (split > 0):
        return
    end = tl.minimum(begin + split_len, context_len)

    g, d, t = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE)
    head = kv_head * G + g
    is_query = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + request * q_stride_r + head[:, None] * q_stride_h + d[None, :], mask=is_query, other=0.0)
    # The 64 bits stay in one scalar a tile, `base`; the tile's own offsets fit 32 and do not change.
    offset = t[:, None] * cache_stride_s + d[None, :]
    running_max = tl.full((G_PAD,), -1e30, tl.float32)  # finite, so that no difference below is NaN
    running_sum = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    for start in tl.range(begin, end, TILE):
        # Splits start at whole tiles and blocks hold whole tiles: one look into the table serves a tile.
        block = tl.load(tables_ptr + request * table_stride + start // S).to(tl.int64)
        base = block * cache_stride_n + (start % S) * cache_stride_s + kv_head * cache_stride_h
        # Slots past the context may hold NaN: masked here, because a weight of zero would not silence it.
        is_token = (start + t < end)[:, None] & (d < D)[None, :]
        key = tl.load(keys_ptr + base + offset, mask=is_token, other=0.0)
        value = tl.load(values_ptr + base + offset, mask=is_token, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        score = tl.where((start + t < end)[None, :], score, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        running_max = new_max

    if split_len >= context_len:
        result = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
        place = (request * H + head)[:, None] * D + d[None, :]
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=is_query)
    else:
        part = (request * H + head) * num_splits + split
        tl.store(part_ptr + part[:, None] * D + d[None, :], acc, mask=is_query)
        tl.store(max_ptr + part, running_max, mask=g < G)
        tl.store(sum_ptr + part, running_sum, mask=g < G)


@triton.jit(do_not_specialize=["num_splits", "min_split"])
def _combine_kernel(
        part_ptr, max_ptr, sum_ptr,  # [R, H, P, D], [R, H, P], [R, H, P]
        lens_ptr,  # [R] int32
        out_ptr,  # [R, H, D]
        num_splits, min_split, H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr):
    request = tl.program_id(1).to(tl.int64)
    row = request * H + tl.program_id(0)
    context_len = tl.load(lens_ptr + request)
    split_len = _split_tokens(context_len, num_splits, min_split, TILE)
    if split_len >= context_len:  # the split kernel wrote the result itself
        return
    used = tl.cdiv(context_len, split_len)
    d = tl.arange(0, D_PAD)
    overall_max = -1e30
    total = 0.0
    acc = tl.zeros((D_PAD,), tl.float32)
    for start in range(0, used, PARTIALS_A_STEP):
        p = start + tl.arange(0, PARTIALS_A_STEP)
        part = row * num_splits + p
        part_max = tl.load(max_ptr + part, mask=p < used, other=float("-inf"))
        new_max = tl.maximum(overall_max, tl.max(part_max, 0))
        weight = tl.exp2(part_max - new_max)
        decay = tl.exp2(overall_max - new_max)
        total = total * decay + tl.sum(weight * tl.load(sum_ptr + part, mask=p < used, other=0.0), 0)
        is_part = (p < used)[:, None] & (d < D)[None, :]
        partial = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=is_part, other=0.0)
        acc = acc * decay + tl.sum(partial * weight[:, None], 0)
        overall_max = new_max
    tl.store(out_ptr + row * D + d, (acc / total).to(out_ptr.dtype.element_ty), mask=d < D)
