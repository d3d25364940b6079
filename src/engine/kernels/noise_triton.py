"""The noise of `noise.py` on a GPU in one launch: some hundred integer operations in torch become one write of [R, V].

The random bits are equal; the two logarithms may round differently in the last place.
"""

import torch
import triton
import triton.language as tl

COUNTERS_A_PROGRAM = 1024


def noise(seed_R: torch.Tensor, position_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise, [R, vocab_size] float32, as `engine.kernels.noise.noise` specifies it."""
    noise_RV = torch.empty(len(seed_R), vocab_size, dtype=torch.float32, device=seed_R.device)
    grid = (triton.cdiv(vocab_size, 4 * COUNTERS_A_PROGRAM), len(seed_R))
    if len(seed_R):
        _noise_kernel[grid](seed_R, position_R, noise_RV, vocab_size, COUNTERS=COUNTERS_A_PROGRAM)
    return noise_RV


@triton.jit
def gumbel_of_counters(seed, counter, position):
    """Gumbel noise of the tokens 4 x counter .. 4 x counter + 3 at one position, for a range of counters, in order."""
    zero = counter * 0
    x0, x1, x2, x3 = tl.philox(seed, counter, zero + position, zero, zero)
    # Lanes 0..3 of a counter are neighbouring tokens: interleaved in registers, they are contiguous.
    bits = tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3))
    # int32 after the shift, since 23 bits fit and a signed conversion is the cheaper one.
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _noise_kernel(
        seed_ptr,  # [R] int64
        position_ptr,  # [R] int32
        noise_ptr,  # [R, V] float32
        vocab_size, COUNTERS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    counter = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
    noise = gumbel_of_counters(tl.load(seed_ptr + row), counter, tl.load(position_ptr + row))
    token = tl.program_id(0) * (4 * COUNTERS) + tl.arange(0, 4 * COUNTERS)
    tl.store(noise_ptr + row * vocab_size + token, noise, mask=token < vocab_size)
