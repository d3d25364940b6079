"""Every attention backend that runs here against the textbook formula in float64, over poisoned memory.

The inputs of `attention_cases` poison what no request wrote; here what `torch.empty` gives is poisoned as well.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import Pages, decode_batch, fill_pages, prefill_case, textbook
from engine.kernels import paged_decode, reference
from engine.kernels.attention import choose_attention
from engine.kernels.reference import ReferenceAttention
from engine.kernels.triton_attention import TritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = {"reference": ReferenceAttention, "triton": TritonAttention}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def check_decode(backend, context_lens, num_heads, num_kv_heads, head_dim, block_size, dtype, max_context_len=None):
    pages = fill_pages(context_lens, num_kv_heads, head_dim, block_size, dtype, DEVICE,
                       max_context_len and -(-max_context_len // block_size))
    q_RHD = torch.randn(len(context_lens), num_heads, head_dim).to(dtype).to(DEVICE)
    out_RHD = backend.decode(q_RHD, pages.cache, decode_batch(pages, context_lens, max_context_len))
    assert out_RHD.shape == q_RHD.shape and out_RHD.dtype == dtype
    for r, context_len in enumerate(context_lens):
        expected = textbook(q_RHD[r:r + 1], pages.keys[r], pages.values[r])[0]
        torch.testing.assert_close(out_RHD[r].double().cpu(), expected, atol=TOLERANCE[dtype], rtol=0)
        assert context_len or not out_RHD[r].any()


@pytest.fixture(autouse=True)
def _poison_empty_tensors(monkeypatch):
    """Outputs and scratch of `torch.empty` start as NaN, so that what a kernel forgets to write shows."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


def _poisoned(make):
    def make_poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor
    return make_poisoned


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
       st.sampled_from([(9, 3, 64), (2, 2, 16), (7, 1, 32)]), st.sampled_from([16, 32]),
       st.randoms(use_true_random=False))
def test_decode_matches_the_textbook_whatever_the_lengths(name, context_lens, heads, block_size, random):
    torch.manual_seed(random.randrange(2**31))
    check_decode(BACKENDS[name](), context_lens, *heads, block_size, torch.float32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (16, 8, 128), (4, 4, 80), (14, 2, 96)], ids=str)
def test_decode_matches_the_textbook_at_block_boundaries_and_for_padding(name, dtype, heads):
    check_decode(BACKENDS[name](), [1, 0, 15, 16, 17, 83, 0], *heads, block_size=16, dtype=dtype)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("context_lens", [[600, 0, 1], [129, 128], [127]], ids=str)
def test_decode_matches_the_textbook_where_a_context_is_split(name, context_lens):
    check_decode(BACKENDS[name](), context_lens, 4, 2, 32, block_size=64, dtype=torch.float32)


def test_decode_matches_the_textbook_where_splits_outgrow_their_minimum(monkeypatch):
    for name, value in {"SHORT_SPLIT": 16, "MIN_SPLITS": 3, "MAX_PROGRAMS": 1}.items():
        monkeypatch.setattr(paged_decode, name, value)
    check_decode(TritonAttention(), [200, 33, 0, 48], 2, 2, 16, block_size=16, dtype=torch.float32, max_context_len=640)


@given(st.integers(1, 4096), st.integers(1, 2**17))
def test_splits_cover_any_bound_and_keep_the_grid_small(num_pairs, max_context_len):
    min_split, num_splits = paged_decode._plan_splits(num_pairs, max_context_len)
    most = max(paged_decode.MAX_PROGRAMS, paged_decode.MIN_SPLITS * num_pairs)
    assert num_splits >= 1 and num_pairs * num_splits <= most
    longest = max(min_split, -(-max_context_len // num_splits))  # what the kernel makes a split then
    assert longest * num_splits >= max_context_len


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_does_not_depend_on_its_company_or_on_the_bound(name):
    pages = fill_pages([40, 17, 64], 2, 32, 16, torch.float32, DEVICE)
    q_RHD = torch.randn(3, 4, 32, device=DEVICE)
    together = BACKENDS[name]().decode(q_RHD, pages.cache, decode_batch(pages, [40, 17, 64]))
    for r, context_len in enumerate([40, 17, 64]):
        alone = Pages(pages.cache, pages.tables_RB[r:r + 1], [], [], pages.whole)
        out = BACKENDS[name]().decode(q_RHD[r:r + 1], pages.cache, decode_batch(alone, [context_len]))
        torch.testing.assert_close(out[0], together[r], atol=1e-6, rtol=0)


def test_the_reference_decodes_the_same_with_and_without_a_look_at_the_lengths():
    pages = fill_pages([40, 0, 64], 2, 32, 16, torch.float32, DEVICE)
    q_RKGD = torch.randn(3, 2, 2, 32, device=DEVICE)
    batch = decode_batch(pages, [40, 0, 64], max_context_len=80)
    torch.testing.assert_close(reference._decode_padded(q_RKGD, pages.cache, batch),
                               reference._decode_each(q_RKGD, pages.cache, batch), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("is_paged", [False, True], ids=["own keys", "cached prefix"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (7, 1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill_matches_the_textbook(name, is_paged, heads, dtype):
    new_lens, prefixes = [1, 16, 70, 3], [16, 0, 32, 48] if is_paged else [0] * 4
    case = prefill_case(new_lens, prefixes, *heads, block_size=16, dtype=dtype, device=DEVICE)
    out_THD = BACKENDS[name]().prefill(case.q_THD, case.k_TKD, case.v_TKD, case.pages.cache, case.batch)
    torch.testing.assert_close(out_THD.double().cpu(), case.expected(), atol=TOLERANCE[dtype], rtol=0)


def test_auto_takes_the_reference_on_a_cpu_and_says_so():
    backend, reason = choose_attention("auto", torch.device("cpu"), torch.float32, 64)
    assert isinstance(backend, ReferenceAttention) and "reference" in reason and "cpu" in reason


@pytest.mark.parametrize(("dtype", "head_dim", "device", "named"), [
    (torch.float32, 64, "cuda", "float16 or bfloat16"), (torch.bfloat16, 512, "cuda", "at most 256"),
    (torch.bfloat16, 64, "cpu", "CUDA"), (torch.bfloat16, 60, "cuda", "multiple of 8")])
def test_an_explicit_backend_that_cannot_run_is_refused_by_what_is_missing(dtype, head_dim, device, named):
    with pytest.raises(ValueError, match=rf"kernels.attention=flash_attn needs .*{named}.*; got {device}"):
        choose_attention("flash_attn", torch.device(device), dtype, head_dim)


def test_triton_on_a_cpu_is_refused_outside_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"kernels\.attention=triton needs a CUDA device"):
        choose_attention("triton", torch.device("cpu"), torch.float32, 64)


def test_a_block_size_that_the_kernels_cannot_read_is_refused_by_its_key():
    TritonAttention().check_block_size(TritonAttention.default_block_size)
    for block_size in (8, 48):
        with pytest.raises(ValueError, match=f"kv.block_size .* got {block_size}"):
            TritonAttention().check_block_size(block_size)
    ReferenceAttention().check_block_size(5)
