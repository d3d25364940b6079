"""The decode batch at fixed addresses, which graphs are captured against and every decode step is written into.

A step is assembled in pinned host memory and reaches the device in two copies. Two host buffers take turns, so that a
step can be assembled while the copies of the step before are still queued. Padding is written on the host too: slot -1
stores nothing, context length 0 attends to nothing, the scratch row supplies a token and takes one.
"""

import numpy as np
import torch

from engine.batch import PADDING_CONTEXT_LEN, PADDING_SLOT, DecodeBatch
from engine.decode_state import RequestRows

ROW, POSITION, SLOT, CONTEXT_LEN = range(4)
NUM_HOST_BUFFERS = 2  # one more than the steps whose copies may be pending


class StaticBatch:
    """Buffers for up to `capacity` rows. Shape letters: R rows, B blocks a request."""

    def __init__(self, capacity: int, table_width: int, rows: RequestRows, device: torch.device) -> None:
        self._rows = rows
        self._padding = (rows.scratch_row, 0, PADDING_SLOT, PADDING_CONTEXT_LEN)
        self.capacity = capacity
        self.max_context_len = table_width * rows.block_size
        pin = device.type == "cuda"
        self._host = [(torch.zeros(4, capacity, dtype=torch.int32, pin_memory=pin),
                       torch.zeros(capacity, table_width, dtype=torch.int32, pin_memory=pin))
                      for _ in range(NUM_HOST_BUFFERS)]
        self._turn = 0
        self._fields_4R = torch.zeros(4, capacity, dtype=torch.int32, device=device)
        self._tables_RB = torch.zeros(capacity, table_width, dtype=torch.int32, device=device)
        self._input_ids_R = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.write_padding(capacity)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the buffers."""
        return self._fields_4R.nbytes + self._tables_RB.nbytes + self._input_ids_R.nbytes

    def write_padding(self, size: int) -> None:
        """Make the first `size` rows padding, as they are while a graph is captured."""
        self.write(np.zeros(0, np.int32), np.zeros(0, np.int32), size)

    def write(self, rows_R: np.ndarray, positions_R: np.ndarray, size: int) -> None:
        """Write one step: live rows first, padding up to `size`; each live row feeds its last token at its position."""
        live = len(rows_R)
        fields, tables = self._host[self._turn]
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        fields_np, tables_np = fields.numpy(), tables.numpy()
        fields_np[ROW, :live] = rows_R
        fields_np[POSITION, :live] = positions_R
        fields_np[SLOT, :live] = self._rows.slots(rows_R, positions_R)
        fields_np[CONTEXT_LEN, :live] = positions_R + 1
        for field, value in enumerate(self._padding):
            fields_np[field, live:size] = value
        tables_np[:live] = self._rows.tables(rows_R)
        self._fields_4R.copy_(fields, non_blocking=True)
        self._tables_RB[:size].copy_(tables[:size], non_blocking=True)
        torch.index_select(self._rows.last_token, 0, self._fields_4R[ROW, :size], out=self._input_ids_R[:size])

    def batch(self, size: int, max_context_len: int | None = None) -> DecodeBatch:
        """The first `size` rows, for any context length or up to `max_context_len`."""
        return DecodeBatch(
            input_ids_R=self._input_ids_R[:size],
            positions_R=self._fields_4R[POSITION, :size],
            slot_mapping_R=self._fields_4R[SLOT, :size],
            block_tables_RB=self._tables_RB[:size],
            context_lens_R=self._fields_4R[CONTEXT_LEN, :size],
            max_context_len=max_context_len or self.max_context_len,
        )

    def rows_R(self, size: int) -> torch.Tensor:
        """Device rows of the first `size` requests."""
        return self._fields_4R[ROW, :size]

    def context_lens_R(self, size: int) -> torch.Tensor:
        """Context lengths of the first `size` requests, which are the positions of the tokens they will produce."""
        return self._fields_4R[CONTEXT_LEN, :size]
