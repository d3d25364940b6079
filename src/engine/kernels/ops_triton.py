"""The operations of `ops.py` in Triton, one launch each: values are read once and written once.

Between two steps of an operation values stay in float32, where PyTorch rounds them to the model's dtype; that is the
only difference. Shape letters as in `ops.py`.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention import LayerCache
from engine.kernels.ops import Heads, Places

HEADS_A_PROGRAM = 4
GATE_COLUMNS = 1024


class TritonOps:
    """For a GPU; under TRITON_INTERPRET=1 also on a CPU, for tests."""

    def add_rms_norm(self, hidden_TE: torch.Tensor, update_TE: torch.Tensor | None, weight_E: torch.Tensor,
                     eps: float) -> torch.Tensor:
        num_tokens, size = hidden_TE.shape
        if hidden_TE.stride() != (size, 1) or (update_TE is not None and update_TE.stride() != (size, 1)):
            raise ValueError(f"add_rms_norm needs contiguous rows; got {tuple(hidden_TE.shape)} with strides "
                             f"{hidden_TE.stride()}, update {None if update_TE is None else update_TE.stride()}")
        out_TE = torch.empty_like(hidden_TE)
        padded = triton.next_power_of_2(size)
        _add_norm_kernel[(num_tokens,)](
            hidden_TE, hidden_TE if update_TE is None else update_TE, weight_E, out_TE, eps, E=size, E_PAD=padded,
            HAS_UPDATE=update_TE is not None, num_warps=min(8, max(1, padded // 256)))
        return out_TE

    def rotate_and_store(self, heads_TJD: torch.Tensor, heads: Heads, places: Places,
                         cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_tokens, num_all, head_dim = heads_TJD.shape
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        keys, values = cache.keys_NSKD, cache.values_NSKD
        if num_all != num_heads + 2 * num_kv_heads or not heads_TJD.is_contiguous():
            raise ValueError(f"rotate_and_store needs contiguous heads [T, {num_heads + 2 * num_kv_heads}, D]; got "
                             f"{tuple(heads_TJD.shape)} with strides {heads_TJD.stride()}")
        if keys.shape[2:] != (num_kv_heads, head_dim) or keys.stride() != values.stride() or keys.stride(3) != 1:
            raise ValueError(f"rotate_and_store needs equally strided caches [N, S, {num_kv_heads}, {head_dim}]; got "
                             f"{tuple(keys.shape)} with strides {keys.stride()} and {values.stride()}")
        has_norm = heads.q_norm_D is not None and heads.k_norm_D is not None
        _rotate_kernel[(num_tokens, triton.cdiv(num_all, HEADS_A_PROGRAM))](
            heads_TJD, heads.q_norm_D if has_norm else heads_TJD, heads.k_norm_D if has_norm else heads_TJD,
            places.cosine_T1D, places.sine_T1D, places.slot_mapping_T, keys, values,
            places.cosine_T1D.stride(0), keys.stride(0), keys.stride(1), keys.stride(2), heads.eps,
            H=num_heads, K=num_kv_heads, D=head_dim, HALF_PAD=triton.next_power_of_2(head_dim // 2), S=keys.shape[1],
            HAS_NORM=has_norm, HEADS=HEADS_A_PROGRAM, num_warps=1)
        return heads_TJD.split((num_heads, num_kv_heads, num_kv_heads), dim=1)

    def silu_and_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        num_tokens, width = gate_up_TF.shape
        if gate_up_TF.stride() != (width, 1):
            raise ValueError(f"silu_and_mul needs contiguous rows; got {tuple(gate_up_TF.shape)} with strides "
                             f"{gate_up_TF.stride()}")
        out = gate_up_TF.new_empty(num_tokens, width // 2)
        _gate_kernel[(num_tokens, triton.cdiv(width // 2, GATE_COLUMNS))](
            gate_up_TF, out, SIZE=width // 2, COLUMNS=GATE_COLUMNS, num_warps=4)
        return out


@triton.jit
def _add_norm_kernel(
        hidden_ptr, update_ptr,  # [T, E]
        weight_ptr,  # [E]
        out_ptr,  # [T, E]
        eps, E: tl.constexpr, E_PAD: tl.constexpr, HAS_UPDATE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    is_column = e < E
    hidden = tl.load(hidden_ptr + token * E + e, mask=is_column, other=0.0)
    if HAS_UPDATE:
        update = tl.load(update_ptr + token * E + e, mask=is_column, other=0.0)
        hidden = (hidden.to(tl.float32) + update.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + token * E + e, hidden, mask=is_column)
    x = hidden.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(weight_ptr + e, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * E + e, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["cache_stride_n"])
def _rotate_kernel(
        heads_ptr,  # [T, J, D], overwritten
        q_norm_ptr, k_norm_ptr,  # [D]; not read without norms
        cosine_ptr, sine_ptr,  # [T, 1, D] float32
        slots_ptr,  # [T] int32
        keys_ptr, values_ptr,  # [N, S, K, D]
        rope_stride_t, cache_stride_n, cache_stride_s, cache_stride_h, eps, H: tl.constexpr, K: tl.constexpr,
        D: tl.constexpr, HALF_PAD: tl.constexpr, S: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = D // 2
    d = tl.arange(0, HALF_PAD)
    inside = (j < H + 2 * K)[:, None] & (d < half)[None, :]
    is_query, is_value = (j < H)[:, None], (j >= H + K)[:, None]
    place = heads_ptr + (token * (H + 2 * K) + j[:, None]) * D + d[None, :]
    low_in, high_in = tl.load(place, mask=inside, other=0.0), tl.load(place + half, mask=inside, other=0.0)
    low, high = low_in.to(tl.float32), high_in.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        is_column = d < half
        q_low, q_high = tl.load(q_norm_ptr + d, mask=is_column), tl.load(q_norm_ptr + half + d, mask=is_column)
        k_low, k_high = tl.load(k_norm_ptr + d, mask=is_column), tl.load(k_norm_ptr + half + d, mask=is_column)
        low *= scale * tl.where(is_query, q_low[None, :], k_low[None, :]).to(tl.float32)
        high *= scale * tl.where(is_query, q_high[None, :], k_high[None, :]).to(tl.float32)
    # The table repeats its half, and its first sine is negated: the second half of it is the plain one.
    cosine = tl.load(cosine_ptr + token * rope_stride_t + d, mask=d < half, other=0.0)[None, :]
    sine = tl.load(sine_ptr + token * rope_stride_t + half + d, mask=d < half, other=0.0)[None, :]
    turned_low = (low * cosine - high * sine).to(low_in.dtype)
    turned_high = (high * cosine + low * sine).to(low_in.dtype)
    tl.store(place, turned_low, mask=inside & ~is_value)
    tl.store(place + half, turned_high, mask=inside & ~is_value)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        kv_head = tl.where(j < H + K, j - H, j - H - K).to(tl.int64)
        cached = (slot // S) * cache_stride_n + (slot % S) * cache_stride_s + kv_head[:, None] * cache_stride_h
        cached += d[None, :]
        is_key = inside & ~is_query & ~is_value
        tl.store(keys_ptr + cached, turned_low, mask=is_key)
        tl.store(keys_ptr + cached + half, turned_high, mask=is_key)
        tl.store(values_ptr + cached, low_in, mask=inside & is_value)
        tl.store(values_ptr + cached + half, high_in, mask=inside & is_value)


@triton.jit
def _gate_kernel(
        gate_up_ptr,  # [T, F]: the gate, then what it gates
        out_ptr,  # [T, F / 2]
        SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    gate = tl.load(gate_up_ptr + token * 2 * SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * SIZE + SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty),
             mask=is_column)
