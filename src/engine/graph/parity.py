"""Does a replay give what eager execution gives? The same stages, on the same padded batch, compared on its live rows.

The same kernels run on the same shapes both ways, so the answer has to be equal bit for bit. Each bucket is tried full
and with the fewest rows that it serves. Before the replay everything that the step writes is poisoned, the new tokens'
keys and values included: a graph that leaves a stage out fails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import PADDING_SLOT
from engine.decode_step import SCOPE_STAGES
from engine.device import on_stream
from engine.probe import DecodeProbe
from engine.records import ParityRecord

CONTEXT_TOKENS = 1024  # at most: beyond the splits of decode attention, and filled in a moment
POISON_TOKEN = -7
SAMPLED_BUCKETS = 4


def buckets_to_check(mode: str, sizes: Sequence[int]) -> list[int]:
    """Those of the ascending `sizes` that `graph.parity_check` names; `sampled`: the ends, and some between."""
    if mode == "none":
        return []
    if mode == "all" or len(sizes) <= SAMPLED_BUCKETS:
        return list(sizes)
    last = len(sizes) - 1
    return [sizes[round(index * last / (SAMPLED_BUCKETS - 1))] for index in range(SAMPLED_BUCKETS)]


def check_parity(probe: DecodeProbe, sizes: Sequence[int], temperature: float) -> tuple[ParityRecord, ...]:
    """A record for each of `sizes` full, and for each padded to the utmost; the KV cache is overwritten.

    A size above what the KV cache has blocks for is filled as far as it goes. `temperature` is that of every other row;
    0 for a sampler that never draws the same twice.
    """
    context_len = min(CONTEXT_TOKENS, probe.max_model_len)
    records = []
    for size in sizes:
        below = max((other for other in probe.sizes if other < size), default=0)
        for num_live in sorted({min(size, probe.max_num_live), min(below + 1, probe.max_num_live)}):
            probe.fill(num_live, size, context_len, seed=size, is_mixed=True, temperature=temperature)
            with on_stream(probe.stream):
                records.append(_compare(probe, size, num_live))
    return tuple(records)


def failures(records: Sequence[ParityRecord]) -> str:
    """The failed comparisons as one sentence; empty if there is none."""
    failed = [f"bucket {record.batch_size} with {record.num_live} live rows (largest difference "
              f"{record.max_difference}, {record.num_differing_tokens} tokens)"
              for record in records if not record.passed]
    return f"replay and eager execution differ: {'; '.join(failed)}" if failed else ""


@dataclass(frozen=True)
class _Results:
    """What a step leaves behind in its live rows."""

    hidden_RH: torch.Tensor
    logits_RV: torch.Tensor
    tokens_R: torch.Tensor
    last_token_N: torch.Tensor
    position_N: torch.Tensor


@torch.inference_mode()
def _compare(probe: DecodeProbe, size: int, num_live: int) -> ParityRecord:
    assert probe.graphs is not None, "nothing was captured"
    state = probe.step.rows.state
    before = state.last_token_N.clone(), state.position_N.clone()
    probe.eager()
    expected = _results(probe, num_live)
    state.last_token_N.copy_(before[0])
    state.position_N.copy_(before[1])
    _poison(probe, size, num_live)
    probe.replay()
    replayed = _results(probe, num_live)
    compared = expected.logits_RV, replayed.logits_RV
    if "logits" not in SCOPE_STAGES[probe.graphs.scope]:
        compared = expected.hidden_RH, replayed.hidden_RH
    difference = _max_difference(*compared)
    return ParityRecord(
        size, num_live,
        max_difference=difference if math.isfinite(difference) else None,
        num_differing_tokens=int((expected.tokens_R != replayed.tokens_R).sum()),
        passed=all(torch.equal(ours, theirs)
                   for ours, theirs in zip(vars(expected).values(), vars(replayed).values(), strict=True)))


def _max_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """NaN where either is; row by row, since the KV cache may have left no room for further copies of all logits."""
    if torch.equal(ours, theirs):
        return 0.0
    rows = zip(ours, theirs, strict=True)
    return float(torch.stack([(our.float() - their.float()).abs().max() for our, their in rows]).max())


def _poison(probe: DecodeProbe, size: int, num_live: int) -> None:
    """Overwrite what the eager step has left: results, the gathered rows, and what it stored in the KV cache."""
    static = probe.step.static
    step = static.step(size)
    block_size = probe.step.rows.block_size
    slots_R = step.slot_mapping_R[:num_live].long()
    for cache in probe.step.caches:
        for cached in (cache.keys_NSKD, cache.values_NSKD):
            cached[slots_R // block_size, slots_R % block_size] = float("nan")
    for results in (static.hidden_RH, static.logits_RV):
        results.fill_(float("nan"))
    static.tokens_R.fill_(POISON_TOKEN)
    for gathered in (step.input_ids_R, step.positions_R, step.context_lens_R, step.seed_R, step.temperature_R):
        gathered.fill_(0)
    step.slot_mapping_R.fill_(PADDING_SLOT)


def _results(probe: DecodeProbe, num_live: int) -> _Results:
    static, state = probe.step.static, probe.step.rows.state
    return _Results(static.hidden_RH[:num_live].clone(), static.logits_RV[:num_live].clone(),
                    static.tokens_R[:num_live].clone(), state.last_token_N.clone(), state.position_N.clone())
