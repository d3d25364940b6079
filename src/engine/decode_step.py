"""One decode step as five stages over the static batch. Eager steps run them; a graph records some of them.

    inputs -> body -> logits -> sample -> advance

`graph.scope` says which stages a graph holds. Those before and after it run eagerly, by the same functions, so that all
scopes compute the same. No stage looks at the device, so each can be recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.decode_state import RequestRows
from engine.graph.static_batch import StaticBatch
from engine.kernels import rows as reference_rows
from engine.kernels.attention import LayerCache
from engine.kernels.rows import RowState, StepBuffers
from engine.model.decoder import Decoder
from engine.sampler import Sampler, SamplingBatch, SamplingFilters

STAGES = ("inputs", "body", "logits", "sample", "advance")
SCOPE_STAGES = {"body": ("body",), "logits": ("body", "logits"), "step": STAGES}


@dataclass(frozen=True)
class StepHints:
    """What the host knows of a step, and a graph must not. The first two may save work, and change no token."""

    max_context_len: int | None = None  # None: any length
    all_greedy: bool = False
    filters: SamplingFilters | None = None


NO_HINTS = StepHints()


class RowKernels(Protocol):
    """`engine.kernels.rows` specifies them."""

    def read_rows(self, state: RowState, step: StepBuffers, block_size: int) -> None: ...

    def advance_rows(self, state: RowState, rows_R: torch.Tensor, tokens_R: torch.Tensor) -> None: ...


def row_kernels(device: torch.device) -> RowKernels:
    """The two kernels that gather and advance rows: one launch each on a GPU, plain torch on a CPU."""
    if device.type == "cpu":
        return reference_rows
    from engine.kernels import rows_triton  # needs Triton, which a CPU machine may lack
    return rows_triton


@dataclass(frozen=True)
class DecodeStep:
    """The model, the rows and the buffers that a step works on."""

    decoder: Decoder
    caches: Sequence[LayerCache]
    rows: RequestRows
    static: StaticBatch
    sampler: Sampler
    kernels: RowKernels

    @torch.inference_mode()
    def run(self, stages: Sequence[str], size: int, hints: StepHints = NO_HINTS) -> None:
        """Queue `stages` on the first `size` rows of the static batch."""
        for stage in stages:
            getattr(self, stage)(size, hints)

    def inputs(self, size: int, hints: StepHints) -> None:
        """Gather from each row what the model and the sampler read."""
        self.kernels.read_rows(self.rows.state, self.static.step(size), self.rows.block_size)

    def body(self, size: int, hints: StepHints) -> None:
        """Embedding to last norm; hidden states go to `static.hidden_RH`."""
        batch = self.static.batch(size, hints.max_context_len)
        self.static.hidden_RH[:size].copy_(self.decoder.forward(batch, self.caches))

    def logits(self, size: int, hints: StepHints) -> None:
        """Next-token logits into `static.logits_RV`."""
        self.decoder.logits(self.static.hidden_RH[:size], out_RV=self.static.logits_RV[:size])

    def sample(self, size: int, hints: StepHints) -> None:
        """Draw each row's next token into `static.tokens_R`."""
        step = self.static.step(size)
        batch = SamplingBatch(step.temperature_R, step.seed_R, step.context_lens_R, hints.all_greedy, hints.filters)
        self.static.tokens_R[:size].copy_(self.sampler(self.static.logits_RV[:size], batch))

    def advance(self, size: int, hints: StepHints) -> None:
        """Give each row its token, and move it on by one position."""
        self.kernels.advance_rows(self.rows.state, self.static.step(size).rows_R, self.static.tokens_R[:size])

    def resample(self, live: int, hints: StepHints) -> None:
        """Draw again, with filters, from the logits of a step that has already advanced its rows."""
        self.sample(live, hints)
        self.rows.state.last_token_N[self.static.step(live).rows_R] = self.static.tokens_R[:live]
