"""The step that needs the most memory: the largest prefill that the scheduler can form, the most logits, the widest
decode.

KV memory policies that measure before they allocate run it once; what it takes at its peak has to stay free.
"""

from dataclasses import replace
from functools import partial

import torch

from engine.batch import PADDING_SLOT, PrefillBatch
from engine.decode_step import STAGES, DecodeStep
from engine.sampler import SamplingBatch, SamplingFilters


def run_worst_case(step: DecodeStep, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Launch the largest prefill, then logits and filtered sampling of as many rows as a step may have, then an eager
    decode of as many at full width. On padding: nothing is stored."""
    num_rows, device = step.static.capacity, step.static.tokens_R.device
    batch = largest_prefill(min(max_num_batched_tokens, num_rows * max_model_len), max_model_len, device)
    hidden_TH = step.decoder.forward(batch, step.caches)
    rows_R = torch.arange(num_rows, device=device)
    logits_RV = step.decoder.logits(hidden_TH[rows_R % len(hidden_TH)])
    ones_R = torch.ones(num_rows, device=device)
    step.sampler(logits_RV, SamplingBatch(ones_R, seed_R=rows_R, position_R=rows_R.int(),
                                          filters=SamplingFilters(ones_R.int(), ones_R / 2, ones_R / 2)))
    del batch, hidden_TH, logits_RV
    step.static.write([], [], num_rows)
    step.run(STAGES, num_rows)


def load_kernels(step: DecodeStep, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Launch prefills of growing size, new and behind a cached prefix: libraries choose kernels by size, and a kernel
    takes memory of the device when it is first launched."""
    device = step.static.tokens_R.device
    for doubling in range(max_num_batched_tokens.bit_length()):
        batch = largest_prefill(1 << doubling, max_model_len, device)
        shape = len(batch.last_token_indices_R), step.rows.state.block_tables_NB.shape[1]
        tables_RB = torch.zeros(shape, dtype=torch.int32, device=device)
        for prefill in (batch, replace(batch, block_tables_RB=tables_RB)) if doubling else (batch,):
            step.decoder.logits(step.decoder.forward(prefill, step.caches)[prefill.last_token_indices_R])


def largest_prefill(num_tokens: int, max_model_len: int, device: torch.device) -> PrefillBatch:
    """Prompts of `max_model_len` tokens, the last as long as what remains."""
    lengths = [min(max_model_len, num_tokens - start) for start in range(0, num_tokens, max_model_len)]
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    cu_seqlens = int32([0, *lengths]).cumsum(0, dtype=torch.int32)
    return PrefillBatch(
        input_ids_T=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions_T=int32([position for length in lengths for position in range(length)]),
        slot_mapping_T=torch.full((num_tokens,), PADDING_SLOT, dtype=torch.int32, device=device),
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths),
        last_token_indices_R=(cu_seqlens[1:] - 1).long())
