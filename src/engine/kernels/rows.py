"""Rows of live requests on the device, and the two operations that a decode step does on them. The specification.

A step names the rows that take part, in batch order; `read_rows` gathers what the model and the sampler need of them,
and `advance_rows` gives each its new token and moves it on. The scratch row, of position -1, is padding: it reads as a
row that stores nothing and attends to nothing, and stays as it is.

Shape letters: N rows, R rows of one step, B blocks a request.
"""

from dataclasses import dataclass

import torch

from engine.batch import PADDING_SLOT


@dataclass(frozen=True)
class RowState:
    """What is known of each row. The last row is scratch, with position -1 for ever."""

    last_token_N: torch.Tensor  # int32
    position_N: torch.Tensor  # int32: of the newest token, which the next decode step feeds
    temperature_N: torch.Tensor  # float32
    seed_N: torch.Tensor  # int64
    block_tables_NB: torch.Tensor  # int32


@dataclass(frozen=True)
class StepBuffers:
    """One decode step in batch order. The first two are read, the others written."""

    rows_R: torch.Tensor  # int32
    new_blocks_R: torch.Tensor  # int32: the block that a row has gained; -1: none
    input_ids_R: torch.Tensor  # int32
    positions_R: torch.Tensor  # int32
    slot_mapping_R: torch.Tensor  # int32
    context_lens_R: torch.Tensor  # int32
    temperature_R: torch.Tensor  # float32
    seed_R: torch.Tensor  # int64
    block_tables_RB: torch.Tensor  # int32


def read_rows(state: RowState, step: StepBuffers, block_size: int) -> None:
    """Write new blocks into the rows' tables, then gather the rows into the step. Padding keeps its table."""
    rows_R = step.rows_R.long()
    position_R = state.position_N[rows_R]
    is_live_R = position_R >= 0
    positions_R = position_R.clamp(min=0)
    column_R = positions_R.long() // block_size
    old_R = state.block_tables_NB[rows_R, column_R]
    block_R = torch.where(is_live_R & (step.new_blocks_R >= 0), step.new_blocks_R, old_R)
    state.block_tables_NB[rows_R, column_R] = block_R
    step.input_ids_R.copy_(torch.where(is_live_R, state.last_token_N[rows_R], 0))
    step.positions_R.copy_(positions_R)
    slots_R = block_R * block_size + positions_R % block_size
    step.slot_mapping_R.copy_(torch.where(is_live_R, slots_R, PADDING_SLOT))
    step.context_lens_R.copy_(position_R + 1)
    step.temperature_R.copy_(torch.where(is_live_R, state.temperature_N[rows_R], 0.0))
    step.seed_R.copy_(torch.where(is_live_R, state.seed_N[rows_R], 0))
    step.block_tables_RB.copy_(torch.where(is_live_R[:, None], state.block_tables_NB[rows_R], step.block_tables_RB))


def advance_rows(state: RowState, rows_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
    """Give each live row its token and the next position; padding stays as it is."""
    rows_R = rows_R.long()
    position_R = state.position_N[rows_R]
    is_live_R = position_R >= 0
    state.last_token_N[rows_R] = torch.where(is_live_R, tokens_R, state.last_token_N[rows_R])
    state.position_N[rows_R] = torch.where(is_live_R, position_R + 1, position_R)
