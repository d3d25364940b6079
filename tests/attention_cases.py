"""Inputs of attention with all their hazards, and the textbook formula in float64.

The cache is block-major as in the engine, [N, layers, 2, S, K, D]; every slot that no request wrote is NaN, the tables'
unused entries point out of the cache, and so do the tables of padding rows. Queries, keys and values are slices of one
fused projection, so none is contiguous.
"""

from dataclasses import dataclass

import torch

from engine.batch import DecodeBatch, PrefillBatch
from engine.kernels.attention import LayerCache

GARBAGE = 2**30  # a block that no cache has


@dataclass
class Pages:
    """A poisoned cache and the requests' contexts in it: `keys[r]` is [context, K, D] in float64."""

    cache: LayerCache
    tables_RB: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    whole: torch.Tensor


def fill_pages(context_lens, num_kv_heads, head_dim, block_size, dtype, device, num_columns=None) -> Pages:
    """Random contexts of the given lengths, in blocks at random places of the middle one of three layers."""
    num_blocks = [-(-n // block_size) for n in context_lens]
    num_columns = num_columns or max(num_blocks) + 1
    whole = torch.full((sum(num_blocks) + 1, 3, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    order = torch.randperm(len(whole)).tolist()
    tables_RB = torch.full((len(context_lens), num_columns), GARBAGE, dtype=torch.int32)
    contexts = {0: [], 1: []}
    for r, context_len in enumerate(context_lens):
        blocks = [order.pop() for _ in range(num_blocks[r])]
        tables_RB[r, :len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for side, kept in contexts.items():
            tokens = torch.randn(context_len, num_kv_heads, head_dim).to(dtype)
            for i, block in enumerate(blocks):
                part = tokens[i * block_size:(i + 1) * block_size]
                whole[block, 1, side, :len(part)] = part
            kept.append(tokens.double())
    whole = whole.to(device)
    return Pages(LayerCache(whole[:, 1, 0], whole[:, 1, 1]), tables_RB.to(device), contexts[0], contexts[1], whole)


def textbook(q_THD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v, head by head and query by query; the last query sees every key."""
    q_THD, out = q_THD.double().cpu(), torch.zeros(q_THD.shape, dtype=torch.float64)
    group = q_THD.shape[1] // k_CKD.shape[1]
    for t in range(len(q_THD)):
        seen = len(k_CKD) - len(q_THD) + t + 1
        for h in range(q_THD.shape[1]):
            weights = torch.softmax(k_CKD[:seen, h // group] @ q_THD[t, h] / q_THD.shape[2] ** 0.5, 0)
            out[t, h] = weights @ v_CKD[:seen, h // group]
    return out


def decode_batch(pages: Pages, context_lens, max_context_len=None) -> DecodeBatch:
    lens_R = torch.tensor(context_lens, dtype=torch.int32, device=pages.whole.device)
    return DecodeBatch(lens_R, lens_R - 1, lens_R, pages.tables_RB, lens_R, max_context_len or max(context_lens))


@dataclass
class PrefillCase:
    """Prompts whose first `prefixes[r]` tokens are cached already; all their tokens are in the cache."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    pages: Pages
    batch: PrefillBatch

    def expected(self) -> torch.Tensor:
        """What the textbook says, [T, H, D] in float64."""
        starts = self.batch.cu_seqlens_q.tolist()
        return torch.cat([textbook(self.q_THD[starts[r]:starts[r + 1]], self.pages.keys[r], self.pages.values[r])
                          for r in range(len(starts) - 1)])


def prefill_case(new_lens, prefixes, num_heads, num_kv_heads, head_dim, block_size, dtype, device) -> PrefillCase:
    """Requests of `new_lens` tokens after cached prefixes; block tables only where some prefix is there."""
    context_lens = [new + prefix for new, prefix in zip(new_lens, prefixes, strict=True)]
    pages = fill_pages(context_lens, num_kv_heads, head_dim, block_size, dtype, device)
    fused = torch.randn(sum(new_lens), num_heads + 2 * num_kv_heads, head_dim).to(dtype).to(device)
    q_THD, k_TKD, v_TKD = fused.split([num_heads, num_kv_heads, num_kv_heads], 1)
    k_TKD.copy_(torch.cat([k[p:] for k, p in zip(pages.keys, prefixes, strict=True)]))
    v_TKD.copy_(torch.cat([v[p:] for v, p in zip(pages.values, prefixes, strict=True)]))
    index = torch.zeros(sum(new_lens), dtype=torch.int32, device=device)
    starts_q, starts_k = (torch.tensor([0, *lens], device=device).cumsum(0).int() for lens in (new_lens, context_lens))
    batch = PrefillBatch(index, index, index, starts_q, starts_k, max(new_lens), max(context_lens), index,
                         pages.tables_RB if any(prefixes) else None)
    return PrefillCase(q_THD, k_TKD, v_TKD, pages, batch)
