"""The kernels that a recorded decode step adds to the model's: rows and sampling, on a GPU, in half precision.

Tokens must equal those of the separate steps exactly: the same bits of noise, the same division, the same ties.
"""

from dataclasses import replace

import pytest
import torch

from engine.kernels import rows, rows_triton
from engine.kernels.rows import RowState, StepBuffers
from engine.sampler import SamplingBatch, sample_by_seed, sample_in_one_pass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = torch.device("cuda")
QWEN_VOCAB, BLOCK_SIZE, TABLE_WIDTH, GARBAGE = 151_936, 64, 640, 2**30


def sampling_batch(num_rows: int, seed: int = 0, hottest: float = 1.35) -> SamplingBatch:
    """Every fourth row greedy, the others at three temperatures up to `hottest`."""
    row = torch.arange(num_rows, device=DEVICE)
    return SamplingBatch(temperature_R=(row % 4) * (hottest / 3), seed_R=row * 2**33 + seed,
                         position_R=(row * 37 + seed).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [
    (1, QWEN_VOCAB), (8, QWEN_VOCAB), (17, 50_257), (64, 32_003), (256, QWEN_VOCAB), (512, 199)])
def test_one_pass_draws_the_tokens_of_the_separate_steps(num_rows, vocab_size, dtype):
    torch.manual_seed(0)
    for seed, scale in enumerate([0.5, 2.0, 6.0]):
        logits_RV = (torch.randn(num_rows, vocab_size + 5, device=DEVICE) * scale).to(dtype)[:, :vocab_size]
        batch = sampling_batch(num_rows, seed)
        assert torch.equal(sample_in_one_pass(logits_RV, batch), sample_by_seed(logits_RV, batch))


@pytest.mark.parametrize("num_rows", [4, 64])
def test_ties_and_nan_are_resolved_alike(num_rows):
    torch.manual_seed(0)
    logits_RV = torch.randint(0, 3, (num_rows, QWEN_VOCAB), device=DEVICE).bfloat16()
    logits_RV[1, [QWEN_VOCAB - 1, 70_000]] = float("nan")
    logits_RV[2] = float("nan")
    logits_RV[3] = 0
    for batch in (sampling_batch(num_rows), sampling_batch(num_rows, hottest=0.0)):
        tokens_R = sample_in_one_pass(logits_RV, batch)
        assert torch.equal(tokens_R, sample_by_seed(logits_RV, batch))
        assert tokens_R[1] == 70_000 and tokens_R[2] == 0


def test_rows_beyond_2_to_31_elements_are_read_where_they_lie():
    vocab_size, stride = 5000, 2**30 + 8
    wide = torch.zeros(2 * stride + vocab_size, dtype=torch.bfloat16, device=DEVICE)
    logits_RV = wide.as_strided((3, vocab_size), (stride, 1))
    logits_RV[0, 11] = logits_RV[1, 22] = logits_RV[2, 4999] = 1
    assert sample_in_one_pass(logits_RV, sampling_batch(3, hottest=0.0)).tolist() == [11, 22, 4999]


def make_state(num_rows: int) -> RowState:
    """Random rows; some are at a block's first token, and the last is scratch."""
    position_N = torch.randint(0, TABLE_WIDTH * BLOCK_SIZE - 8, (num_rows + 1,), device=DEVICE).int()
    position_N[::3] = position_N[::3] // BLOCK_SIZE * BLOCK_SIZE
    position_N[num_rows] = -1
    return RowState(
        last_token_N=torch.randint(0, QWEN_VOCAB, (num_rows + 1,), device=DEVICE).int(), position_N=position_N,
        temperature_N=torch.arange(num_rows + 1, device=DEVICE) % 4 * 0.45,
        seed_N=torch.randint(0, 2**62, (num_rows + 1,), device=DEVICE),
        block_tables_NB=torch.randint(0, 2**24, (num_rows + 1, TABLE_WIDTH), device=DEVICE).int())


def make_step(size: int) -> StepBuffers:
    def column(dtype):
        return torch.full((size,), GARBAGE, dtype=dtype, device=DEVICE)
    return StepBuffers(*(column(torch.int32) for _ in range(6)), column(torch.float32), column(torch.int64),
                       torch.full((size, TABLE_WIDTH), GARBAGE, dtype=torch.int32, device=DEVICE))


def fill_step(step: StepBuffers, state: RowState, num_live: int) -> None:
    """Random distinct rows and new blocks where a block begins; the rest is padding, and every output is garbage."""
    scratch_row = len(state.position_N) - 1
    for name, column in vars(step).items():
        if name not in ("rows_R", "new_blocks_R"):
            column.fill_(GARBAGE)
    step.rows_R.fill_(scratch_row)
    step.rows_R[:num_live] = torch.randperm(scratch_row, device=DEVICE)[:num_live].int()
    is_first_R = state.position_N[step.rows_R] % BLOCK_SIZE == 0
    step.new_blocks_R.copy_(torch.where(is_first_R, torch.randint(0, 2**24, is_first_R.shape, device=DEVICE), -1))


def clone(columns):
    return replace(columns, **{name: column.clone() for name, column in vars(columns).items()})


def assert_same(step: StepBuffers, expected: StepBuffers, state: RowState, expected_state: RowState) -> None:
    for name, column in vars(expected_state).items():
        assert torch.equal(getattr(state, name), column), name
    is_read_RB = torch.arange(TABLE_WIDTH, device=DEVICE) * BLOCK_SIZE < expected.context_lens_R[:, None]
    for name, column in vars(expected).items():
        is_compared = is_read_RB if name == "block_tables_RB" else ...
        assert torch.equal(getattr(step, name)[is_compared], column[is_compared]), name


@pytest.mark.parametrize(("size", "num_live"), [(1, 1), (8, 5), (256, 256), (512, 300)])
def test_a_recorded_step_of_rows_and_sampler_serves_other_rows(size, num_live):
    torch.manual_seed(0)
    state, step = make_state(num_rows=600), make_step(size)
    logits_RV = torch.empty(size, QWEN_VOCAB, dtype=torch.bfloat16, device=DEVICE)

    def launch():
        rows_triton.read_rows(state, step, BLOCK_SIZE)
        tokens_R = sample_in_one_pass(logits_RV, SamplingBatch(step.temperature_R, step.seed_R, step.context_lens_R))
        rows_triton.advance_rows(state, step.rows_R, tokens_R)
        return tokens_R

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    fill_step(step, state, 0)  # padding alone: recording changes no row
    logits_RV.normal_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        recorded_R = launch()
    for live in (num_live, 1, 0, num_live):
        fill_step(step, state, live)
        logits_RV.normal_(std=3)
        expected_state, expected = clone(state), clone(step)
        rows.read_rows(expected_state, expected, BLOCK_SIZE)
        batch = SamplingBatch(expected.temperature_R, expected.seed_R, expected.context_lens_R)
        tokens_R = sample_by_seed(logits_RV, batch)
        rows.advance_rows(expected_state, expected.rows_R, tokens_R)
        recorded_R.fill_(GARBAGE)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded_R, tokens_R)
        assert_same(step, expected, state, expected_state)


@pytest.mark.parametrize("kernels", [rows, rows_triton])
def test_rows_and_sampler_do_not_wait_for_the_device(kernels):
    state, step = make_state(num_rows=20), make_step(16)
    logits_RV = torch.randn(16, QWEN_VOCAB, device=DEVICE).bfloat16()

    def launch():
        kernels.read_rows(state, step, BLOCK_SIZE)
        tokens_R = sample_in_one_pass(logits_RV, SamplingBatch(step.temperature_R, step.seed_R, step.context_lens_R))
        kernels.advance_rows(state, step.rows_R, tokens_R)

    fill_step(step, state, 10)
    launch()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
