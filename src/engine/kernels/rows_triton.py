"""The operations of `rows.py` on a GPU, in one launch each: one program a row, no look from the host."""

import torch
import triton
import triton.language as tl

from engine.kernels.rows import RowState, StepBuffers

COLUMNS_AT_ONCE = 256
ROWS_A_PROGRAM = 256


def read_rows(state: RowState, step: StepBuffers, block_size: int) -> None:
    """As `engine.kernels.rows.read_rows` specifies; table columns beyond a row's position are not copied."""
    _read_kernel[(len(step.rows_R),)](
        step.rows_R, step.new_blocks_R, state.last_token_N, state.position_N, state.temperature_N, state.seed_N,
        state.block_tables_NB, step.input_ids_R, step.positions_R, step.slot_mapping_R, step.context_lens_R,
        step.temperature_R, step.seed_R, step.block_tables_RB, state.block_tables_NB.stride(0),
        step.block_tables_RB.stride(0), S=block_size, COLUMNS=COLUMNS_AT_ONCE, num_warps=2)


@triton.jit(do_not_specialize=["rows_stride", "step_stride"])
def _read_kernel(
        rows_ptr, new_blocks_ptr,  # [R] int32
        last_token_ptr, position_ptr, temperature_ptr, seed_ptr, row_tables_ptr,  # [N], and [N, B]
        ids_ptr, positions_ptr, slots_ptr, lens_ptr, step_temperature_ptr, step_seed_ptr, tables_ptr,  # [R], and [R, B]
        rows_stride, step_stride, S: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + r).to(tl.int64)
    position = tl.load(position_ptr + row)
    tl.store(lens_ptr + r, position + 1)
    if position < 0:
        tl.store(ids_ptr + r, 0)
        tl.store(positions_ptr + r, 0)
        tl.store(slots_ptr + r, -1)
        tl.store(step_temperature_ptr + r, 0.0)
        tl.store(step_seed_ptr + r, 0)
        return
    last = position // S
    row_table = row_tables_ptr + row * rows_stride
    new_block = tl.load(new_blocks_ptr + r)
    newest = tl.where(new_block >= 0, new_block, tl.load(row_table + last))
    for start in range(0, last + 1, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        block = tl.load(row_table + column, mask=column < last, other=0)
        block = tl.where(column == last, newest, block)
        tl.store(tables_ptr + r * step_stride + column, block, mask=column <= last)
    tl.store(row_table + last, newest)
    tl.store(ids_ptr + r, tl.load(last_token_ptr + row))
    tl.store(positions_ptr + r, position)
    tl.store(slots_ptr + r, newest * S + position % S)
    tl.store(step_temperature_ptr + r, tl.load(temperature_ptr + row))
    tl.store(step_seed_ptr + r, tl.load(seed_ptr + row))


def advance_rows(state: RowState, rows_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    """As `engine.kernels.rows.advance_rows` specifies."""
    grid = (triton.cdiv(len(rows_R), ROWS_A_PROGRAM),)
    _advance_kernel[grid](rows_R, tokens_R, state.last_token_N, state.position_N, len(rows_R), ROWS=ROWS_A_PROGRAM,
                          num_warps=2)


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(
        rows_ptr, tokens_ptr,  # [R] int32
        last_token_ptr, position_ptr,  # [N] int32
        num_rows, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = r < num_rows
    row = tl.load(rows_ptr + r, mask=is_row, other=0).to(tl.int64)
    position = tl.load(position_ptr + row, mask=is_row, other=-1)
    is_live = position >= 0
    tl.store(last_token_ptr + row, tl.load(tokens_ptr + r, mask=is_live, other=0), mask=is_live)
    tl.store(position_ptr + row, position + 1, mask=is_live)
