"""Sampling in one pass: token for token what `sample_by_seed` draws from the same noise, over poisoned memory.

Both sides draw their noise from the same kernel here, so that equal means equal: on a CPU the specification's
logarithms may differ from the interpreter's in the last place.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.kernels import noise_triton
from engine.kernels.sample_triton import FEW_ROWS, LARGE_CHUNK, SMALL_CHUNK, sample
from engine.sampler import SamplingBatch, sample_by_seed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEMPERATURES = [0.0, 0.7, 1.0, 5.0, 1e-3]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def _one_noise_and_poisoned_scratch():
    """Partial results of `torch.empty` start as values that would win, and as tokens that do not exist."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(INF if tensor.is_floating_point() else 2**30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_noise_of", lambda device: noise_triton.noise)
        patch.setattr(torch, "empty", poisoned)
        yield


def make_batch(num_rows: int, temperatures=TEMPERATURES, seed: int = 0) -> SamplingBatch:
    row = torch.arange(num_rows, device=DEVICE)
    temperature_R = torch.tensor([temperatures[r % len(temperatures)] for r in range(num_rows)], device=DEVICE)
    return SamplingBatch(temperature_R, seed_R=row + seed, position_R=(row * 100).int())


def draw(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return sample(logits_RV, batch.temperature_R, batch.seed_R, batch.position_R)


def as_a_view(logits_RV: torch.Tensor, gap: int) -> torch.Tensor:
    """The same logits as rows of a wider buffer, with a NaN, which would win, wherever they do not lie."""
    num_rows, vocab_size = logits_RV.shape
    wide = torch.full((num_rows, vocab_size + gap), NAN, dtype=logits_RV.dtype, device=DEVICE)
    wide[:, :vocab_size] = logits_RV
    return wide[:, :vocab_size]


@settings(max_examples=20, deadline=None)
@given(num_rows=st.integers(1, FEW_ROWS + 4), vocab_size=st.integers(1, LARGE_CHUNK + 9), gap=st.integers(1, 40),
       dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 2**62), decimals=st.integers(0, 3))
def test_one_pass_draws_what_the_separate_steps_draw(num_rows, vocab_size, gap, dtype, seed, decimals):
    generator = torch.Generator().manual_seed(seed % 2**31)
    # Rounded, so that rows have ties.
    logits_RV = (torch.randn(num_rows, vocab_size, generator=generator) * 3).round(decimals=decimals).to(DEVICE, dtype)
    batch = make_batch(num_rows, seed=seed)
    tokens_R = draw(as_a_view(logits_RV, gap), batch)
    assert tokens_R.dtype == torch.int32
    assert torch.equal(tokens_R, sample_by_seed(logits_RV, batch))


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("vocab_size", [1, 3, SMALL_CHUNK, SMALL_CHUNK + 1, LARGE_CHUNK - 1, LARGE_CHUNK + 16])
def test_every_chunk_boundary_is_covered_once(num_rows, vocab_size):
    logits_RV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits_RV[:, -1] += 8  # the last token is often the best
    batch = make_batch(num_rows)
    assert torch.equal(draw(as_a_view(logits_RV, 7), batch), sample_by_seed(logits_RV, batch))


@pytest.mark.parametrize("num_rows", [2, FEW_ROWS + 1])
@pytest.mark.parametrize("places", [(5, 6), (1023, 1024), (3, 4096), (4095, 8000), (1500, 2600)], ids=str)
def test_the_lowest_of_equal_logits_wins_within_and_across_chunks(num_rows, places):
    logits_RV = torch.zeros(num_rows, 8191, device=DEVICE)
    logits_RV[:, list(places)] = 2.5
    tokens_R = draw(logits_RV, make_batch(num_rows, temperatures=[0.0]))
    assert tokens_R.tolist() == [places[0]] * num_rows
    assert draw(torch.zeros_like(logits_RV), make_batch(num_rows, temperatures=[0.0])).tolist() == [0] * num_rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [[4100], [5000, 17], [0], slice(None)], ids=str)
def test_a_nan_wins_as_in_torch_and_a_row_of_them_names_a_token_that_exists(temperature, bad):
    logits_RV = torch.randn(3, 5003, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits_RV[1, bad] = NAN
    batch = make_batch(3, temperatures=[temperature])
    tokens_R = draw(logits_RV, batch)
    assert torch.equal(tokens_R, sample_by_seed(logits_RV, batch))
    assert tokens_R[1] == (0 if bad == slice(None) else min(bad))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_that_a_filter_dropped_are_never_drawn(temperature):
    logits_RV = torch.full((24, 9001), -INF, device=DEVICE)
    kept = [8, 1023, 4096, 9000]
    logits_RV[:, kept] = 1.0
    batch = make_batch(24, temperatures=[temperature])
    tokens_R = draw(logits_RV, batch)
    assert torch.equal(tokens_R, sample_by_seed(logits_RV, batch))
    assert set(tokens_R.tolist()) == (set(kept) if temperature else {8})


def test_division_rounds_as_in_torch():
    """Neighbouring floats, too large for noise to matter: whether they tie depends on the quotient's last bit."""
    generator = torch.Generator().manual_seed(0)
    low_R = torch.rand(64, generator=generator) * 1e12 + 1e12
    logits_RV = torch.stack([low_R, low_R.nextafter(torch.tensor(INF))], 1).to(DEVICE)
    batch = make_batch(64, temperatures=(torch.rand(64, generator=generator) + 0.5).tolist())
    tokens_R = draw(logits_RV, batch)
    assert torch.equal(tokens_R, sample_by_seed(logits_RV, batch))
    assert set(tokens_R.tolist()) == {0, 1}


def test_no_row_gives_no_token():
    assert draw(torch.empty(0, 50, device=DEVICE), make_batch(0)).shape == (0,)


def test_mismatched_shapes_and_strides_are_refused_with_all_of_them():
    with pytest.raises(ValueError, match=r"strides \(1, 3\) and shapes \(3, 5\), \(3,\)"):
        draw(torch.zeros(5, 3, device=DEVICE).T, make_batch(3))
    with pytest.raises(ValueError, match=r"\(4, 5\), \(3,\), \(3,\), \(3,\)"):
        draw(torch.zeros(4, 5, device=DEVICE), make_batch(3))
