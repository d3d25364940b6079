"""Sampling noise as a pure function of (request seed, position, token id): a counter-based generator, Philox-4x32-10.

Nothing is drawn from a stream, so a request's noise is the same whatever its row, its batch or its company, and a
preempted request meets it again. The bits are those of `tl.philox` (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011): key = seed, counter = (token id // 4, position, 0, 0), and a token takes lane token id % 4.
This file is the specification and the CPU's path; on a GPU `noise_triton` draws the same bits in one launch.
"""

import torch

MASK_32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
COUNTERS_AT_ONCE = 1 << 15  # so that the int64 temporaries stay in a CPU core's cache


def noise(seed_R: torch.Tensor, position_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise, [R, vocab_size] float32: the argmax of log-probabilities plus it is a sample."""
    lanes = -(-vocab_size // 4)
    noise_RV = torch.empty(len(seed_R), lanes * 4, dtype=torch.float32, device=seed_R.device)
    counter_L = torch.arange(lanes, device=seed_R.device)
    rows_at_once = max(1, COUNTERS_AT_ONCE // lanes)
    for first in range(0, len(seed_R), rows_at_once):
        some = slice(first, first + rows_at_once)
        key = seed_R[some, None]
        zero = torch.zeros_like(key)
        bits = philox(counter_L[None, :], position_R[some, None].long(), zero, zero, key & MASK_32, key >> 32 & MASK_32)
        for lane, bits_RL in enumerate(bits):
            noise_RV[some, lane::4] = gumbel(bits_RL)
    return noise_RV[:, :vocab_size]


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values, float32, of 32-bit words in int64. The uniform never reaches 0 or 1: 23 bits, centred."""
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def philox(c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor,
           k1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four 32-bit words of Philox-4x32-10 for counter c and key k; int64 tensors that broadcast together.

    An int64 product wraps, which leaves all its 64 bits right; only what is multiplied next needs the mask.
    """
    for round_ in range(NUM_ROUNDS):
        product_a, product_b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (product_b >> 32 ^ c1 ^ (k0 + round_ * KEY_STEPS[0])) & MASK_32
        c2 = (product_a >> 32 ^ c3 ^ (k1 + round_ * KEY_STEPS[1])) & MASK_32
        c1, c3 = product_b, product_a
    return c0, c1 & MASK_32, c2, c3 & MASK_32
