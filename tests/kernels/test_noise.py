"""The noise generator: published vectors, the bits of Triton's own philox, and independence of row and company."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import noise_triton
from engine.kernels.noise import gumbel, noise, philox

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONES = 0xFFFFFFFF

# Random123, tests/kat_vectors: philox4x32 10, counter, key, result.
PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_philox_gives_the_published_words(counter, key, result):
    words = philox(*(torch.tensor(word) for word in (*counter, *key)))
    assert [int(word) for word in words] == result


@triton.jit
def _philox_kernel(out_ptr, seed_ptr, position, SIZE: tl.constexpr):
    counter = tl.arange(0, SIZE)
    zero = counter * 0
    words = tl.philox(tl.load(seed_ptr), counter, zero + position, zero, zero)
    for lane in tl.static_range(4):
        tl.store(out_ptr + counter * 4 + lane, words[lane].to(tl.int64))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_philox_gives_the_words_of_triton(seed, position):
    out = torch.empty(32, 4, dtype=torch.int64, device=DEVICE)
    _philox_kernel[(1,)](out, torch.tensor([seed], device=DEVICE), position, SIZE=32)
    zero = torch.tensor(0)
    words = philox(torch.arange(32), torch.tensor(position), zero, zero,
                   torch.tensor(seed & ONES), torch.tensor(seed >> 32))
    assert torch.equal(torch.stack([word.expand(32) for word in words], 1), out.cpu() & ONES)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=7),
       st.integers(1, 5000))
def test_a_row_of_noise_does_not_depend_on_its_company_or_the_vocabulary(keys, vocab_size):
    seeds, positions = (torch.tensor(column) for column in zip(*keys, strict=True))
    together = noise(seeds, positions.int(), vocab_size)
    assert together.shape == (len(keys), vocab_size) and together.isfinite().all()
    for r in range(len(keys)):
        assert torch.equal(noise(seeds[r:r + 1], positions[r:r + 1].int(), vocab_size + 9)[0, :vocab_size], together[r])


@pytest.mark.parametrize("vocab_size", [1, 7, 4096, 4099])
def test_the_kernel_draws_the_noise_of_the_specification(vocab_size):
    seeds = torch.tensor([0, 12345678901234567, 2**63 - 1], device=DEVICE)
    positions = torch.tensor([0, 77, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    expected = noise(seeds.cpu(), positions.cpu(), vocab_size)
    torch.testing.assert_close(noise_triton.noise(seeds, positions, vocab_size).cpu(), expected, atol=2e-5, rtol=1e-5)


def test_every_random_word_gives_a_finite_value():
    assert gumbel(torch.tensor([0, 1, 511, 512, ONES - 512, ONES])).isfinite().all()


def test_noise_has_the_mean_and_the_variance_of_a_gumbel():
    sample = noise(torch.arange(4), torch.arange(4, dtype=torch.int32), 50_000).double()
    assert abs(sample.mean() - 0.5772) < 0.01  # Euler's constant; 3.4 standard errors
    assert abs(sample.var() - torch.pi**2 / 6) < 0.04
