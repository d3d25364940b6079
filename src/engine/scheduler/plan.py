"""What a scheduler hands over: which requests compute which tokens in one step."""

from dataclasses import dataclass

from engine.request import Request


@dataclass(frozen=True)
class ScheduledPrefill:
    """Compute the tokens [num_cached_tokens, num_tokens) of a request; those before lie in its cached blocks."""

    request: Request
    num_cached_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class ScheduledDecode:
    """Feed a request's newest token, which stands at `position`, and produce the next one."""

    request: Request
    position: int


@dataclass(frozen=True)
class StepPlan:
    """At most one prefill batch and one decode batch. Every request of them yields exactly one token, in this order."""

    prefill: tuple[ScheduledPrefill, ...] = ()
    decode: tuple[ScheduledDecode, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def requests(self) -> tuple[Request, ...]:
        return (*(item.request for item in self.prefill), *(item.request for item in self.decode))

    @property
    def is_empty(self) -> bool:
        return not (self.prefill or self.decode)
