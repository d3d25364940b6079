"""From a plan to tokens: builds the batches, runs the model eagerly or by graph, and samples.

`launch` returns as soon as the work is queued. The tokens it will produce are written to the requests' rows on the
device, so the next step can be launched before the host has read them; `LaunchedStep.token_ids` waits and reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import PrefillBatch
from engine.decode_state import RequestRows, is_greedy
from engine.decode_step import STAGES, DecodeStep, StepHints
from engine.device import on_stream, to_device
from engine.graph.buckets import BucketTable
from engine.graph.graphs import DecodeGraphs
from engine.records import (
    ABOVE_LARGEST_BUCKET,
    CAPTURED,
    EAGER,
    ENFORCE_EAGER,
    GRAPH,
    PARITY_FAILED,
    PREFILL,
    SAMPLED_OUTSIDE,
)
from engine.scheduler.plan import ScheduledDecode, ScheduledPrefill, StepPlan


@dataclass(frozen=True)
class Route:
    """Which way a decode batch went, and why. `bucket` is the captured batch size that was replayed."""

    path: str
    reason: str
    bucket: int | None = None


PREFILL_ROUTE = Route(EAGER, PREFILL)


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose work is queued on the device."""

    plan: StepPlan
    route: Route
    _tokens_R: torch.Tensor
    _ready: torch.cuda.Event | None

    def token_ids(self) -> list[int]:
        """The step's tokens in plan order; waits until the device has produced them."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._tokens_R.tolist()


@dataclass
class ModelRunner:
    """The model with everything a step needs. Shape letters: T tokens, R rows, H hidden size."""

    decode_step: DecodeStep
    buckets: BucketTable | None  # None: eager mode
    graphs: DecodeGraphs | None
    device: torch.device
    stream: torch.cuda.Stream | None

    @property
    def rows(self) -> RequestRows:
        return self.decode_step.rows

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue one step: forward and sampling of both batches, tokens into the rows."""
        route, tokens = PREFILL_ROUTE, []
        with on_stream(self.stream):
            if plan.prefill:
                tokens.append(self._prefill(plan.prefill))
            if plan.decode:
                hints = self._hints(plan.decode)
                route = self.route(len(plan.decode), hints)
                tokens.append(self._decode(plan.decode, route, hints))
            return self._read_later(plan, route, tokens[0] if len(tokens) == 1 else torch.cat(tokens))

    def _read_later(self, plan: StepPlan, route: Route, tokens_R: torch.Tensor) -> LaunchedStep:
        """Copy the tokens before the next step overwrites them."""
        if self.device.type != "cuda":
            return LaunchedStep(plan, route, tokens_R.clone(), None)
        host_R = torch.empty(tokens_R.shape, dtype=tokens_R.dtype, pin_memory=True)
        host_R.copy_(tokens_R, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return LaunchedStep(plan, route, host_R, ready)

    def route(self, batch_size: int, hints: StepHints) -> Route:
        """Which path a decode batch takes; never eager in silence: the reason is part of the step's record."""
        if self.buckets is None or self.graphs is None:
            return Route(EAGER, ENFORCE_EAGER if self.graphs is None else PARITY_FAILED)
        bucket = self.buckets.find(batch_size)
        if bucket is None:
            return Route(EAGER, ABOVE_LARGEST_BUCKET)
        return Route(GRAPH, SAMPLED_OUTSIDE if self.graphs.samples_outside(hints) else CAPTURED, bucket)

    def _hints(self, items: Sequence[ScheduledDecode]) -> StepHints:
        requests = [item.request for item in items]
        return StepHints(max(item.position for item in items) + 1, is_greedy(requests), self.rows.filters(requests))

    def _decode(self, items: Sequence[ScheduledDecode], route: Route, hints: StepHints) -> torch.Tensor:
        """Tokens of the live requests, in the static batch."""
        step, live = self.decode_step, len(items)
        step.static.write([item.request.row for item in items], self.rows.new_blocks(items), route.bucket or live)
        if route.bucket is None:
            step.run(STAGES, live, hints)
        else:
            assert self.graphs is not None
            self.graphs.run_step(route.bucket, live, hints)
        return step.static.tokens_R[:live]

    def _prefill(self, items: Sequence[ScheduledPrefill]) -> torch.Tensor:
        """Tokens that follow the prompts, also written to the requests' rows."""
        self.rows.admit(items)
        batch, rows_R = build_prefill_batch(items, self.rows, self.device)
        step = self.decode_step
        hidden_TH = step.decoder.forward(batch, step.caches)
        logits_RV = step.decoder.logits(hidden_TH[batch.last_token_indices_R])
        tokens_R = step.sampler(logits_RV, self.rows.sampling_batch([item.request for item in items], rows_R))
        self.rows.state.last_token_N[rows_R] = tokens_R
        return tokens_R


def build_prefill_batch(items: Sequence[ScheduledPrefill], rows: RequestRows,
                        device: torch.device) -> tuple[PrefillBatch, torch.Tensor]:
    """The batch of `items` and their rows, sent to the device in one copy."""
    row_ids = np.array([item.request.row for item in items], np.int32)
    spans = [np.arange(item.num_cached_tokens, item.num_tokens, dtype=np.int32) for item in items]
    lens_q = np.array([len(span) for span in spans], np.int32)
    lens_k = np.array([item.num_tokens for item in items], np.int32)
    cu_q, cu_k = _cumulative(lens_q), _cumulative(lens_k)
    has_prefix = any(item.num_cached_tokens for item in items)
    num_columns = max(len(item.request.block_table) for item in items) if has_prefix else 0
    parts = [
        np.concatenate([np.array(item.request.token_ids[item.num_cached_tokens:item.num_tokens], np.int32)
                        for item in items]),
        np.concatenate(spans),
        np.concatenate([rows.slots(row, span) for row, span in zip(row_ids, spans, strict=True)]).astype(np.int32),
        cu_q, cu_k, cu_q[1:] - 1, row_ids,
        rows.tables(row_ids)[:, :num_columns].ravel(),
    ]
    packed = to_device(torch.from_numpy(np.concatenate(parts)), device)
    ids, positions, slots, cu_q_device, cu_k_device, last, rows_R, tables = packed.split([len(part) for part in parts])
    batch = PrefillBatch(
        input_ids_T=ids, positions_T=positions, slot_mapping_T=slots,
        cu_seqlens_q=cu_q_device, cu_seqlens_k=cu_k_device,
        max_seqlen_q=int(lens_q.max()), max_seqlen_k=int(lens_k.max()), last_token_indices_R=last.long(),
        block_tables_RB=tables.view(len(items), num_columns) if has_prefix else None)
    return batch, rows_R


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
