"""The kernels on a GPU in half precision: against the textbook, in a CUDA graph, and without waiting for the device."""

from dataclasses import replace

import pytest
import torch

from attention_cases import decode_batch, fill_pages, prefill_case, textbook
from engine.kernels import noise as reference_noise
from engine.kernels.attention import choose_attention
from engine.sampler import SamplingBatch, SamplingFilters, make_sampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
BACKENDS = [("reference", torch.bfloat16), ("triton", torch.bfloat16), ("triton", torch.float16),
            ("flash_attn", torch.bfloat16)]
HEADS = [(16, 8, 128), (9, 3, 64)]
BLOCK_SIZE = 256  # a page of flash-attn


@pytest.fixture(params=BACKENDS, ids=lambda case: f"{case[0]}-{case[1]}")
def backend_and_dtype(request):
    name, dtype = request.param
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    return choose_attention(name, DEVICE, dtype, 128)[0], dtype


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("context_lens", [[1, 0, 255, 256, 257, 1100, 0], [3000], [40] * 140],
                         ids=["mixed", "one", "many"])
def test_decode_matches_the_textbook(backend_and_dtype, heads, context_lens):
    (backend, dtype), (num_heads, num_kv_heads, head_dim) = backend_and_dtype, heads
    pages = fill_pages(context_lens, num_kv_heads, head_dim, BLOCK_SIZE, dtype, DEVICE)
    q_RHD = torch.randn(len(context_lens), num_heads, head_dim, device=DEVICE, dtype=dtype)
    out_RHD = backend.decode(q_RHD, pages.cache, decode_batch(pages, context_lens))
    for r, context_len in enumerate(context_lens):
        expected = textbook(q_RHD[r:r + 1], pages.keys[r], pages.values[r])[0]
        torch.testing.assert_close(out_RHD[r].double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert context_len or not out_RHD[r].any()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("prefixes", [[0, 0, 0, 0], [256, 0, 512, 0]], ids=["own keys", "cached prefix"])
def test_prefill_matches_the_textbook(backend_and_dtype, heads, prefixes):
    backend, dtype = backend_and_dtype
    case = prefill_case([1, 64, 333, 70], prefixes, *heads, BLOCK_SIZE, dtype, DEVICE)
    out_THD = backend.prefill(case.q_THD, case.k_TKD, case.v_TKD, case.pages.cache, case.batch)
    torch.testing.assert_close(out_THD.double().cpu(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_store_writes_live_rows_only(backend_and_dtype):
    backend, dtype = backend_and_dtype
    pages = fill_pages([300, 20], 3, 64, BLOCK_SIZE, dtype, DEVICE)
    block = int(pages.tables_RB[1, 0])
    expected = pages.whole.clone()
    fused_THD = torch.randn(3, 15, 64, device=DEVICE, dtype=dtype)
    k_TKD, v_TKD = fused_THD[:, 9:12], fused_THD[:, 12:]
    expected[block, 1, 0, [20, 255]], expected[block, 1, 1, [20, 255]] = k_TKD[[0, 2]], v_TKD[[0, 2]]
    slots_T = torch.tensor([block * BLOCK_SIZE + 20, -1, block * BLOCK_SIZE + 255], dtype=torch.int32, device=DEVICE)
    backend.store(k_TKD, v_TKD, pages.cache, slots_T)
    torch.testing.assert_close(pages.whole, expected, rtol=0, atol=0, equal_nan=True)


def test_a_recorded_decode_serves_other_lengths_bitwise(backend_and_dtype):
    backend, dtype = backend_and_dtype
    max_context_len, long_lens, short_lens = 2048, [700, 2000, 1, 513], [30, 0, 260, 0]
    first, second = (fill_pages(lens, 8, 128, BLOCK_SIZE, dtype, DEVICE, max_context_len // BLOCK_SIZE)
                     for lens in (long_lens, short_lens))
    # One cache for both, so that the recorded addresses stay: the second's blocks follow the first's.
    whole = torch.cat([first.whole, second.whole])
    cache = replace(first.cache, keys_NSKD=whole[:, 1, 0], values_NSKD=whole[:, 1, 1])
    # A table of its own: it is written below, and the first's is needed again.
    static = replace(decode_batch(first, long_lens, max_context_len), block_tables_RB=first.tables_RB.clone())
    static_q_RHD = torch.randn(4, 16, 128, device=DEVICE, dtype=dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.decode(static_q_RHD, cache, static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded_RHD = backend.decode(static_q_RHD, cache, static)
    for pages, lens, offset in ((second, short_lens, len(first.whole)), (first, long_lens, 0)):
        static.block_tables_RB.copy_(torch.where(pages.tables_RB < 2**30, pages.tables_RB + offset, pages.tables_RB))
        static.context_lens_R.copy_(torch.tensor(lens))
        static_q_RHD.normal_()
        recorded_RHD.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert recorded_RHD.isfinite().all()
        assert torch.equal(recorded_RHD, backend.decode(static_q_RHD, cache, static))


def test_store_and_decode_do_not_wait_for_the_device(backend_and_dtype):
    backend, dtype = backend_and_dtype
    pages = fill_pages([300, 20], 8, 128, BLOCK_SIZE, dtype, DEVICE)
    batch = decode_batch(pages, [300, 20])
    q_RHD, slots_R = torch.randn(2, 16, 128, device=DEVICE, dtype=dtype), torch.full_like(batch.context_lens_R, -1)
    backend.decode(q_RHD, pages.cache, batch)
    _without_waiting(lambda: (backend.store(q_RHD[:, :8], q_RHD[:, 8:], pages.cache, slots_R),
                              backend.decode(q_RHD, pages.cache, batch)))


@pytest.mark.parametrize("impl", ["torch", "compiled"])
def test_sampling_does_not_wait_for_the_device_and_keeps_greedy_rows(impl):
    logits_RV = torch.randn(40, 151_936, device=DEVICE)
    batch = _sampling_batch(40)
    sampler = make_sampler(impl)
    sampler(logits_RV, batch)
    tokens = _without_waiting(lambda: sampler(logits_RV, batch))
    assert torch.equal(tokens[::4].long(), logits_RV[::4].argmax(-1))


def test_a_seeded_request_draws_on_the_gpu_what_it_draws_on_a_cpu():
    logits_RV = torch.randn(40, 5003)
    on_cpu = make_sampler("torch")(logits_RV, _sampling_batch(40, torch.device("cpu")))
    on_gpu = make_sampler("torch")(logits_RV.to(DEVICE), _sampling_batch(40))
    # Sums that differ in the last bit can move a token across a filter's edge or between two equal sums: never many.
    assert (on_cpu != on_gpu.cpu()).sum() <= 1


def test_noise_on_the_gpu_is_the_specified_noise():
    from engine.kernels import noise_triton
    seeds, positions = torch.tensor([0, 2**62 + 12345, 7]), torch.tensor([0, 4095, 2**31 - 1], dtype=torch.int32)
    expected = reference_noise.noise(seeds, positions, 151_936)
    drawn = noise_triton.noise(seeds.to(DEVICE), positions.to(DEVICE), 151_936).cpu()
    torch.testing.assert_close(drawn, expected, atol=2e-5, rtol=2e-5)


def _sampling_batch(num_rows: int, device: torch.device = DEVICE) -> SamplingBatch:
    """Every fourth row greedy, the others with some filter each."""
    row = torch.arange(num_rows, device=device)
    return SamplingBatch(
        temperature_R=(row % 4) / 2, seed_R=row * 2**40, position_R=row.int(),
        filters=SamplingFilters(top_k_R=torch.where(row % 4 == 1, 20, 0).int(),
                                top_p_R=torch.where(row % 4 == 2, 0.9, 1.0),
                                min_p_R=torch.where(row % 4 == 3, 0.05, 0.0)))


def _without_waiting(work):
    """What `work` returns; raises where it makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
