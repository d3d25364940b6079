"""Rows of live requests: what a decode step needs to know of each request, kept on the device from step to step.

Each running request holds a row. The device has its last token, its position, its sampling parameters and its block
table, so a step is launched by saying which rows take part, before the host has read the tokens that they feed; a
stage of the step itself moves the rows on. The host keeps a copy of the block tables for prefill, and sends a row's new
block with the step that first needs it. One row beyond the last is scratch: padding reads it and leaves it as it is.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.device import to_device
from engine.kernels.rows import RowState
from engine.request import Request
from engine.sampler import SamplingBatch, SamplingFilters
from engine.scheduler.plan import ScheduledDecode, ScheduledPrefill

NO_BLOCK = -1


class RequestRows:
    """`num_rows` rows; block tables have `table_width` columns. Shape letters: R rows of one step, N all rows."""

    def __init__(self, num_rows: int, table_width: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.scratch_row = num_rows
        self._device = device
        size = num_rows + 1
        self.state = RowState(
            last_token_N=torch.zeros(size, dtype=torch.int32, device=device),
            position_N=torch.full((size,), -1, dtype=torch.int32, device=device),
            temperature_N=torch.zeros(size, dtype=torch.float32, device=device),
            seed_N=torch.zeros(size, dtype=torch.int64, device=device),
            block_tables_NB=torch.zeros(size, table_width, dtype=torch.int32, device=device))
        self._top_k_N = torch.zeros(size, dtype=torch.int32, device=device)
        self._top_p_N = torch.ones(size, dtype=torch.float32, device=device)
        self._min_p_N = torch.zeros(size, dtype=torch.float32, device=device)
        self._tables = np.zeros((size, table_width), dtype=np.int32)
        self._num_blocks = np.zeros(size, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """Device bytes of all columns."""
        columns = (*vars(self.state).values(), self._top_k_N, self._top_p_N, self._min_p_N)
        return sum(column.nbytes for column in columns)

    def admit(self, items: Sequence[ScheduledPrefill]) -> None:
        """Write the rows of requests that have just been given one; the token they will feed first stands behind
        the tokens of their prefill."""
        requests = [item.request for item in items]
        for request in requests:
            num_blocks = self._num_blocks[request.row] = len(request.block_table)
            self._tables[request.row, :num_blocks] = request.block_table
        row_ids = np.array([request.row for request in requests])
        rows_R = to_device(torch.from_numpy(row_ids), self._device)
        params = [request.params for request in requests]
        columns = {
            self.state.position_N: [item.num_tokens for item in items],
            self.state.temperature_N: [p.temperature for p in params],
            self.state.seed_N: [request.seed for request in requests],
            self._top_k_N: [p.top_k for p in params],
            self._top_p_N: [p.top_p for p in params],
            self._min_p_N: [p.min_p for p in params],
        }
        for column, values in columns.items():
            column[rows_R] = to_device(torch.tensor(values, dtype=column.dtype), self._device)
        self.state.block_tables_NB[rows_R] = to_device(torch.from_numpy(self._tables[row_ids]), self._device)

    def new_blocks(self, items: Sequence[ScheduledDecode]) -> list[int]:
        """The block that each request has gained since its row was last written, or -1; a step needs at most one."""
        counts, tables = self._num_blocks, self._tables
        new_blocks = []
        for item in items:
            row, table = item.request.row, item.request.block_table
            if len(table) == counts[row]:
                new_blocks.append(NO_BLOCK)
                continue
            assert len(table) == counts[row] + 1, f"{len(table)} blocks, {counts[row]} known"
            tables[row, counts[row]] = table[-1]
            counts[row] += 1
            new_blocks.append(table[-1])
        return new_blocks

    def tables(self, rows_R: np.ndarray) -> np.ndarray:
        """Block tables of `rows_R` as [R, B]; columns beyond a request's blocks hold whatever was there before."""
        return self._tables[rows_R]

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slot of each (row, position) pair."""
        return self._tables[rows, positions // self.block_size] * self.block_size + positions % self.block_size

    def filters(self, requests: Sequence[Request]) -> SamplingFilters | None:
        """Top-k, top-p and min-p of the requests; None if none that is drawn at random has any."""
        if not any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
                   for p in (request.params for request in requests)):
            return None
        rows_R = to_device(torch.tensor([request.row for request in requests]), self._device)
        return SamplingFilters(self._top_k_N[rows_R], self._top_p_N[rows_R], self._min_p_N[rows_R])

    def sampling_batch(self, requests: Sequence[Request], rows_R: torch.Tensor) -> SamplingBatch:
        """How the first tokens of `requests`, whose rows have just been admitted, are drawn."""
        state = self.state
        return SamplingBatch(state.temperature_N[rows_R], state.seed_N[rows_R], state.position_N[rows_R],
                             is_greedy(requests), self.filters(requests))


def is_greedy(requests: Sequence[Request]) -> bool:
    """Whether no request draws at random."""
    return not any(request.params.temperature > 0 for request in requests)
