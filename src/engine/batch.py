"""The two shapes of work that a model is called with. A batch's type is its phase; there is no global context.

Shape letters: T tokens of all requests laid end to end, R requests (rows), B blocks a request. Index tensors are int32.
A slot is block id x block_size + offset; kernels widen it to int64 before they multiply.
"""

from dataclasses import dataclass

import torch

PADDING_SLOT = -1  # the KV store skips it
PADDING_CONTEXT_LEN = 0  # attention over no token gives zeros


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt tokens of R requests, each the tokens after its cached prefix.

    `block_tables_RB` is set when some request attends to a cached prefix: keys and values are then read from the KV
    cache (max_seqlen_k counts the prefix). Without it keys are the batch's own and cu_seqlens_k equals cu_seqlens_q.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    cu_seqlens_q: torch.Tensor  # [R + 1]
    cu_seqlens_k: torch.Tensor  # [R + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    last_token_indices_R: torch.Tensor  # int64: the row of T whose logits each request needs
    block_tables_RB: torch.Tensor | None = None


@dataclass(frozen=True)
class DecodeBatch:
    """One token for each of R requests, some of which may be padding.

    `context_lens_R` counts the new token. `max_context_len` bounds context_lens_R without a look at the device: the
    longest live context in eager mode, the table's width in tokens where a graph must serve any length.
    """

    input_ids_R: torch.Tensor
    positions_R: torch.Tensor
    slot_mapping_R: torch.Tensor
    block_tables_RB: torch.Tensor
    context_lens_R: torch.Tensor
    max_context_len: int


Batch = PrefillBatch | DecodeBatch
