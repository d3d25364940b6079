"""Rows of live requests, on the device and on the host.

Each running request holds a row. On the device a row keeps its last token and its sampling parameters, so a decode step
can be launched before the host has read the token that it feeds. On the host a row keeps its block table, brought up to
date by differences. One row beyond the last is scratch for padding.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.request import Request
from engine.sampler import SamplingBatch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`, without waiting: a copy from pinned memory does not stall the launches before it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class RequestRows:
    """`num_rows` rows; block tables have `table_width` columns. Shape letters: R rows of one step, B blocks."""

    def __init__(self, num_rows: int, table_width: int, block_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        self.scratch_row = num_rows
        self._device = device
        size = num_rows + 1
        self.last_token = torch.zeros(size, dtype=torch.int32, device=device)
        self._temperature = torch.zeros(size, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(size, dtype=torch.int32, device=device)
        self._top_p = torch.ones(size, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self._seed = torch.zeros(size, dtype=torch.int64, device=device)
        self._tables = np.zeros((size, table_width), dtype=np.int32)
        self._num_blocks = np.zeros(size, dtype=np.int64)

    def admit(self, requests: Sequence[Request]) -> None:
        """Write the sampling parameters and whole block tables of requests that have just been given a row."""
        rows = torch.tensor([request.row for request in requests])
        params = [request.params for request in requests]
        self._write(self._temperature, rows, [p.temperature for p in params])
        self._write(self._top_k, rows, [p.top_k for p in params])
        self._write(self._top_p, rows, [p.top_p for p in params])
        self._write(self._min_p, rows, [p.min_p for p in params])
        self._write(self._seed, rows, [request.seed for request in requests])
        for request in requests:
            self._num_blocks[request.row] = 0
        self.update_tables(requests)

    def _write(self, column: torch.Tensor, rows: torch.Tensor, values: list[float] | list[int]) -> None:
        column[to_device(rows, self._device)] = to_device(torch.tensor(values, dtype=column.dtype), self._device)

    def update_tables(self, requests: Sequence[Request]) -> None:
        """Append the blocks that requests have gained since their rows were last written."""
        counts = self._num_blocks
        for request in requests:
            row, known = request.row, counts[request.row]
            if len(request.block_table) != known:
                self._tables[row, known:len(request.block_table)] = request.block_table[known:]
                counts[row] = len(request.block_table)

    def tables(self, rows_R: np.ndarray) -> np.ndarray:
        """Block tables of `rows_R` as [R, B]; columns beyond a request's blocks hold whatever was there before."""
        return self._tables[rows_R]

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slot of each (row, position) pair."""
        return self._tables[rows, positions // self.block_size] * self.block_size + positions % self.block_size

    def sampling_batch(self, requests: Sequence[Request], rows_R: torch.Tensor,
                       positions_R: torch.Tensor) -> SamplingBatch:
        """Sampling parameters of `requests`; `positions_R` are those of the tokens to be drawn."""
        drawn = [request.params for request in requests if request.params.temperature > 0]
        return SamplingBatch(
            temperature_R=self._temperature[rows_R],
            top_k_R=self._top_k[rows_R],
            top_p_R=self._top_p[rows_R],
            min_p_R=self._min_p[rows_R],
            seed_R=self._seed[rows_R],
            position_R=positions_R,
            all_greedy=not drawn,
            needs_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in drawn),
        )
