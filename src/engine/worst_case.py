"""The step that needs the most memory: the largest prefill that the scheduler can form, and the most logits.

KV memory policies that measure before they allocate run it once; what it takes at its peak has to stay free.
"""

from functools import partial

import torch

from engine.batch import PADDING_SLOT, PrefillBatch
from engine.kernels.attention import LayerCache
from engine.model.decoder import Decoder
from engine.sampler import Sampler, SamplingBatch, SamplingFilters


def run_worst_case(decoder: Decoder, sampler: Sampler, caches: tuple[LayerCache, ...], max_num_seqs: int,
                   max_num_batched_tokens: int, max_model_len: int, device: torch.device) -> None:
    """Launch the largest prefill, then logits and filtered sampling of `max_num_seqs` rows; nothing is stored."""
    batch = largest_prefill(min(max_num_batched_tokens, max_num_seqs * max_model_len), max_model_len, device)
    hidden_TH = decoder.forward(batch, caches)
    rows_R = torch.arange(max_num_seqs, device=device)
    logits_RV = decoder.logits(hidden_TH[rows_R % len(hidden_TH)])
    ones_R = torch.ones(max_num_seqs, device=device)
    sampler(logits_RV, SamplingBatch(ones_R, seed_R=rows_R, position_R=rows_R.int(),
                                     filters=SamplingFilters(ones_R.int(), ones_R / 2, ones_R / 2)))


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
