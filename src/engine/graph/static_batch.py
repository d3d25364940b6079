"""The decode step at fixed addresses: what graphs are captured against, and where every step reads and writes.

The host sends two numbers a row: which row of the live requests takes part, and the KV block it has gained, if any.
They are assembled in pinned host memory and reach the device in one copy. Two host buffers take turns, so that a step
can be assembled while the copy of the step before is still queued. Padding is the scratch row.
"""

from collections.abc import Sequence

import torch

from engine.batch import DecodeBatch
from engine.decode_state import NO_BLOCK, RequestRows
from engine.kernels.rows import StepBuffers

ROW, NEW_BLOCK = range(2)
NUM_HOST_BUFFERS = 2  # one more than the steps whose copies may be pending


class StaticBatch:
    """Buffers for up to `capacity` rows. Shape letters: R rows, B blocks a request, H hidden size, V vocabulary."""

    def __init__(self, capacity: int, rows: RequestRows, hidden_size: int, vocab_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self._scratch_row = rows.scratch_row
        table_width = rows.state.block_tables_NB.shape[1]
        self.capacity = capacity
        self.max_context_len = table_width * rows.block_size
        self._host = [torch.zeros(2, capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
                      for _ in range(NUM_HOST_BUFFERS)]
        self._turn = 0
        self._sent_2R = torch.zeros(2, capacity, dtype=torch.int32, device=device)
        self._all = StepBuffers(
            rows_R=self._sent_2R[ROW],
            new_blocks_R=self._sent_2R[NEW_BLOCK],
            **{name: torch.zeros(capacity, dtype=torch.int32, device=device)
               for name in ("input_ids_R", "positions_R", "slot_mapping_R", "context_lens_R")},
            temperature_R=torch.zeros(capacity, dtype=torch.float32, device=device),
            seed_R=torch.zeros(capacity, dtype=torch.int64, device=device),
            block_tables_RB=torch.zeros(capacity, table_width, dtype=torch.int32, device=device))
        self.hidden_RH = torch.empty(capacity, hidden_size, dtype=dtype, device=device)
        self.logits_RV = torch.empty(capacity, vocab_size, dtype=dtype, device=device)
        self.tokens_R = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.write([], [], capacity)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the buffers, which on a CPU those of the host are as well."""
        step = {name: tensor for name, tensor in vars(self._all).items() if name not in ("rows_R", "new_blocks_R")}
        host = self._host if self.hidden_RH.device.type == "cpu" else ()
        return sum(tensor.nbytes for tensor in (*host, self._sent_2R, *step.values(), self.hidden_RH, self.logits_RV,
                                                self.tokens_R))

    def write(self, rows: Sequence[int], new_blocks: Sequence[int], size: int) -> None:
        """Send a step's live rows with the block that each has gained (-1: none), padded to `size` rows."""
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        live, host_2R = len(rows), host.numpy()
        host_2R[ROW, :live], host_2R[NEW_BLOCK, :live] = rows, new_blocks
        host_2R[ROW, live:size], host_2R[NEW_BLOCK, live:size] = self._scratch_row, NO_BLOCK
        self._sent_2R.copy_(host, non_blocking=True)

    def step(self, size: int) -> StepBuffers:
        """Views of the first `size` rows."""
        return StepBuffers(**{name: tensor[:size] for name, tensor in vars(self._all).items()})

    def batch(self, size: int, max_context_len: int | None = None) -> DecodeBatch:
        """The first `size` rows as the model takes them, for any context length or up to `max_context_len`."""
        step = self._all
        return DecodeBatch(
            input_ids_R=step.input_ids_R[:size],
            positions_R=step.positions_R[:size],
            slot_mapping_R=step.slot_mapping_R[:size],
            block_tables_RB=step.block_tables_RB[:size],
            context_lens_R=step.context_lens_R[:size],
            max_context_len=max_context_len or self.max_context_len,
        )
