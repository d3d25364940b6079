"""Scatter of new keys and values into the paged cache: one launch for both, one program a token.

A token with slot -1 is skipped inside the kernel, so that a graph whose rows are partly padding writes only live rows.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention import LayerCache


def store_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
    """Write each token's key and value at its slot; slot -1 writes nothing. Any strides, last dimension contiguous."""
    keys, values = cache.keys_NSKD, cache.values_NSKD
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    if k_TKD.shape != v_TKD.shape or k_TKD.shape[1:] != keys.shape[2:] or len(slot_mapping_T) != num_tokens:
        raise ValueError(f"store needs keys and values [T, K, D], slots [T] and a cache [N, S, K, D]; got "
                         f"{tuple(k_TKD.shape)}, {tuple(v_TKD.shape)}, {tuple(slot_mapping_T.shape)}, "
                         f"{tuple(keys.shape)}")
    if keys.stride() != values.stride() or keys.stride(3) != 1 or k_TKD.stride(2) != 1 or v_TKD.stride(2) != 1:
        raise ValueError("store needs keys and values of equal cache strides with a contiguous last dimension; got "
                         f"{keys.stride()}, {values.stride()}, {k_TKD.stride()}, {v_TKD.stride()}")
    if num_tokens == 0:
        return
    _store_kernel[(num_tokens,)](
        k_TKD, v_TKD, keys, values, slot_mapping_T,
        k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2),
        K=num_kv_heads, D=head_dim, S=keys.shape[1],
        K_PAD=triton.next_power_of_2(num_kv_heads), D_PAD=triton.next_power_of_2(head_dim), num_warps=4)


@triton.jit
def _store_kernel(
        k_ptr, v_ptr,  # [T, K, D]
        keys_ptr, values_ptr,  # [N, S, K, D]
        slots_ptr,  # [T] int32
        k_stride_t, k_stride_h, v_stride_t, v_stride_h, cache_stride_n, cache_stride_s, cache_stride_h,
        K: tl.constexpr, D: tl.constexpr, S: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    h = tl.arange(0, K_PAD)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    inside = (h < K) & (d < D)
    place = (slot // S) * cache_stride_n + (slot % S) * cache_stride_s + h * cache_stride_h + d
    key = tl.load(k_ptr + token * k_stride_t + h * k_stride_h + d, mask=inside)
    value = tl.load(v_ptr + token * v_stride_t + h * v_stride_h + d, mask=inside)
    tl.store(keys_ptr + place, key, mask=inside)
    tl.store(values_ptr + place, value, mask=inside)
