"""Both samplers: greedy rows, the filters against Hugging Face's, the distribution, and the promise about seeds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.config import SAMPLERS
from engine.sampler import IMPLEMENTATIONS, SamplingBatch, SamplingFilters, filter_logits, make_sampler


def sampling_batch(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None,
                   positions=None) -> SamplingBatch:
    def column(value, dtype):
        values = value if isinstance(value, list) else [value] * num_rows
        return torch.tensor(values, dtype=dtype)
    temperature_R = column(temperature, torch.float32)
    top_k_R, top_p_R, min_p_R = column(top_k, torch.int32), column(top_p, torch.float32), column(min_p, torch.float32)
    has_filter = bool(top_k_R.any() or (top_p_R < 1).any() or min_p_R.any())
    return SamplingBatch(
        temperature_R,
        seed_R=torch.arange(num_rows) if seeds is None else seeds,
        position_R=torch.zeros(num_rows, dtype=torch.int32) if positions is None else positions.int(),
        all_greedy=not temperature_R.any(),
        filters=SamplingFilters(top_k_R, top_p_R, min_p_R) if has_filter else None)


def test_every_configurable_sampler_exists():
    assert {"auto", *IMPLEMENTATIONS} == set(SAMPLERS)
    with pytest.raises(ValueError, match=r"sampler.impl must be one of torch, triton, compiled; got 'dice'"):
        make_sampler("dice")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_greedy_rows_take_the_first_largest_logit_beside_sampled_rows(impl, top_p):
    logits_RV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits_RV[0, [7, 3]] = 9.0
    batch = sampling_batch(6, temperature=[0.0, 0.0, 1.0, 0.0, 0.7, 2.0], top_p=top_p)
    tokens = make_sampler(impl)(logits_RV, batch)
    assert tokens.dtype == torch.int32 and tokens[0] == 3
    assert torch.equal(tokens[[1, 3]].long(), logits_RV[[1, 3]].argmax(-1))
    all_greedy = make_sampler(impl)(logits_RV, sampling_batch(6, temperature=0.0))
    assert torch.equal(all_greedy.long(), logits_RV.argmax(-1))


def hugging_face(logits_V, temperature, top_k, top_p, min_p):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits_V[None].clone())[0]


filters = st.tuples(st.sampled_from([0.3, 1.0, 1.7]), st.sampled_from([0, 1, 2, 5, 40, 1000]),
                    st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]), st.sampled_from([0.0, 0.02, 0.3, 1.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(filters, min_size=1, max_size=70), st.integers(0, 2**31))
def test_filters_keep_what_hugging_face_keeps(rows, seed):
    logits_RV = torch.randn(len(rows), 97, generator=torch.Generator().manual_seed(seed)) * 3
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*rows, strict=True))
    kept_RV = filter_logits(logits_RV, sampling_batch(len(rows), temperature, top_k, top_p, min_p))
    for r, row in enumerate(rows):
        assert torch.equal(kept_RV[r].isfinite(), hugging_face(logits_RV[r], *row).isfinite()), row
        assert torch.equal(kept_RV[r][kept_RV[r].isfinite()], logits_RV[r][kept_RV[r].isfinite()])


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    logits_RV = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]]).repeat(2, 1)
    kept_RV = filter_logits(logits_RV, sampling_batch(2, top_k=[2, 0], top_p=[1.0, 0.6]))
    assert kept_RV.isfinite().tolist() == [[False, True, True, True, True]] * 2


@pytest.mark.parametrize("impl", ["torch", "compiled"])  # triton's tokens equal torch's
@pytest.mark.parametrize("top_k", [0, 4])
def test_tokens_come_with_their_probabilities(impl, top_k):
    torch.manual_seed(0)
    num_draws, temperature = 20_000, 0.8
    logits_V = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -3.0, 1.0])
    # One request at many positions, so that noise which ignored the position would show.
    batch = sampling_batch(num_draws, temperature, top_k, seeds=torch.full((num_draws,), 42),
                           positions=torch.arange(num_draws))
    counts = make_sampler(impl)(logits_V.expand(num_draws, -1).contiguous(), batch).bincount(minlength=7)
    expected = torch.softmax(hugging_face(logits_V, temperature, top_k, 1.0, 0.0), -1) * num_draws
    assert not counts[expected == 0].any()
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert chi_square < 30  # 3 or 6 degrees of freedom: by chance less than once in 20,000


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 5))
def test_a_seeded_request_draws_the_same_in_any_row_of_any_batch(order, size):
    torch.manual_seed(0)
    logits_RV = torch.randn(5, 301)
    whole = sampling_batch(5, [1.0, 0.5, 0.0, 2.0, 1.0], top_k=[0, 3, 0, 20, 0],
                           seeds=torch.tensor([7, 7, 8, 9, 2**62]), positions=torch.tensor([3, 4, 5, 6, 7]))
    expected = make_sampler("torch")(logits_RV, whole)
    rows = torch.tensor(order[:size])
    filters = SamplingFilters(*(column[rows] for column in vars(whole.filters).values()))
    part = replace(whole, temperature_R=whole.temperature_R[rows], seed_R=whole.seed_R[rows],
                   position_R=whole.position_R[rows], filters=filters)
    assert torch.equal(make_sampler("torch")(logits_RV[rows], part), expected[rows])


@settings(max_examples=15, deadline=None)
@given(num_rows=st.integers(1, 9), vocab_size=st.integers(2, 6000), seed=st.integers(0, 2**62))
def test_one_pass_draws_the_tokens_of_the_reference(num_rows, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator).round(decimals=1)  # with ties
    batch = sampling_batch(num_rows, [0.5 * (row % 3) for row in range(num_rows)],
                           seeds=torch.arange(num_rows) + seed, positions=torch.arange(num_rows) * 100)
    assert torch.equal(make_sampler("triton")(logits_RV, batch), make_sampler("torch")(logits_RV, batch))


def test_another_seed_or_position_draws_other_tokens():
    logits_RV = torch.zeros(64, 1000)
    first = make_sampler("torch")(logits_RV, sampling_batch(64))
    assert len(first.unique()) > 32
    moved = make_sampler("torch")(logits_RV, sampling_batch(64, positions=torch.ones(64)))
    assert (first != moved).sum() > 32
