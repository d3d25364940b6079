"""A request: what was asked, how far it has come, and what is handed back.

A request's tokens are known in two stages. `token_ids` holds the tokens whose values the host has read (prompt first);
`num_inflight` counts tokens that a launched step will still deliver. Scheduling needs only the *number* of tokens, so
it never waits for values, and reading them may lag one step behind.
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.checks import check_range, check_sampling


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn and when it stops.

    `seed=None` derives a seed from the engine's `sampler.seed` and the request's number. `top_k=0` sets no limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_sampling("SamplingParams.", vars(self))
        check_range("SamplingParams.max_tokens", self.max_tokens, 1)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"SamplingParams.stop must be a tuple of non-empty strings; got {self.stop!r}")


class RequestState(Enum):
    """Where a request stands. Only RUNNING requests hold KV blocks and a row."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request's mutable state; owned by the scheduler, compared by identity."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output together: min(prompt + max_tokens, max_model_len)
    arrival_s: float = 0.0

    token_ids: list[int] = field(default_factory=list)  # prompt, then committed output
    num_inflight: int = 0  # tokens launched and not yet committed
    block_table: list[int] = field(default_factory=list)
    row: int = -1  # index into the device-resident rows while RUNNING
    state: RequestState = RequestState.WAITING
    finish_reason: str | None = None  # stop | length | rejected | aborted
    error: str | None = None  # why it was rejected
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    first_scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)  # host time at which each output token was read

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens committed and in flight."""
        return len(self.token_ids) + self.num_inflight

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids):]

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED


@dataclass(frozen=True)
class TokenEvent:
    """One item of a stream: a new token of a request, and the text that became final with it.

    A request that produces no token (rejected, or a prompt that fills the context) yields one event without a token.
    """

    request_id: int
    token_id: int | None
    text: str
    finish_reason: str | None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What `Engine.generate` returns for a prompt. `text` is empty for a model without a tokenizer."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None = None
