"""Seeded sampling in one pass over the logits: noise is drawn where a logit is read, and never written.

Gumbel-max is an argmax, so the vocabulary is cut into chunks that run side by side; each leaves its best token and that
token's value, and a second kernel takes the best chunk. Tokens equal those of `engine.sampler.sample_by_seed` on the
same device: same bits, same formula, and the lowest token id wins a tie.

Shape letters: R requests (rows), V vocabulary, P chunks.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.noise_triton import gumbel_of_counters

FEW_ROWS, SMALL_CHUNK, LARGE_CHUNK = 16, 1024, 4096  # tokens: short chunks fill the device for few rows


def sample(logits_RV: torch.Tensor, temperature_R: torch.Tensor, seed_R: torch.Tensor,
           position_R: torch.Tensor) -> torch.Tensor:
    """Token ids [R] int32: argmax of logits / temperature + noise; of the logits where the temperature is 0.

    Logits may have any row stride and any float dtype; the last dimension must be contiguous (ValueError).
    """
    num_rows, vocab_size = logits_RV.shape
    if logits_RV.stride(1) != 1 or not len(temperature_R) == len(seed_R) == len(position_R) == num_rows:
        raise ValueError(f"sample needs logits [R, V] with a contiguous last dimension and temperature, seed and "
                         f"position [R]; got strides {logits_RV.stride()} and shapes {tuple(logits_RV.shape)}, "
                         f"{tuple(temperature_R.shape)}, {tuple(seed_R.shape)}, {tuple(position_R.shape)}")
    tokens_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    if num_rows == 0:
        return tokens_R
    chunk = SMALL_CHUNK if num_rows <= FEW_ROWS else LARGE_CHUNK
    num_chunks = triton.cdiv(vocab_size, chunk)
    best_RP = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits_RV.device)
    token_RP = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits_RV.device)
    _chunk_kernel[(num_chunks, num_rows)](
        logits_RV, temperature_R, seed_R, position_R, best_RP, token_RP, vocab_size, logits_RV.stride(0),
        COUNTERS=chunk // 4, num_warps=4)
    _best_chunk_kernel[(num_rows,)](
        best_RP, token_RP, tokens_R, num_chunks, P_PAD=triton.next_power_of_2(num_chunks), num_warps=1)
    return tokens_R


@triton.jit
def _chunk_kernel(
        logits_ptr,  # [R, V]
        temperature_ptr, seed_ptr, position_ptr,  # [R]
        best_ptr, token_ptr,  # [R, P]
        vocab_size, stride_r, COUNTERS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * (4 * COUNTERS) + tl.arange(0, 4 * COUNTERS)
    value = tl.load(logits_ptr + row * stride_r + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        counter = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
        noise = gumbel_of_counters(tl.load(seed_ptr + row), counter, tl.load(position_ptr + row))
        value = tl.div_rn(value, temperature) + noise  # as torch divides: two candidates must not change places
    # torch.argmax takes a NaN for the largest. Comparisons that are all false could choose a token of the padding.
    value = tl.where(value != value, float("inf"), value)
    best = tl.max(value, 0)
    # Cheaper than a reduction of (value, token) pairs, which compares three times for each token.
    first = tl.min(tl.where(value == best, token, vocab_size), 0)
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + place, best)
    tl.store(token_ptr + place, first)


@triton.jit(do_not_specialize=["num_chunks"])
def _best_chunk_kernel(
        best_ptr, token_ptr,  # [R, P]
        tokens_ptr,  # [R] int32
        num_chunks, P_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P_PAD)
    best = tl.load(best_ptr + row * num_chunks + p, mask=p < num_chunks, other=float("-inf"))
    chunk = tl.argmax(best, 0, tie_break_left=True)
    tl.store(tokens_ptr + row, tl.load(token_ptr + row * num_chunks + chunk))
