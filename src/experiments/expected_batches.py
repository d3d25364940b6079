"""The batches that a workload will form, found without a model: the engine's own scheduler over requests on paper.

Scheduling counts tokens and never reads them, so made-up ones lead to the same batches; only the end of a request by
what it says (end-of-sequence, a stop string) cannot be foreseen, and every request runs to its `max_tokens`.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.block_allocator import BlockAllocator
from engine.request import Request
from engine.scheduler import make_scheduler
from engine.scheduler.base import Scheduler
from engine.scheduler.plan import StepPlan
from experiments.config import Config
from experiments.workload import WorkItem, phases

if TYPE_CHECKING:
    from experiments.memory_plan import MemoryPlan

MAX_TOKENS = 1_000_000  # of output; requests beyond are left out, so that a plan takes seconds
MADE_UP_TOKEN = 0


@dataclass(frozen=True)
class ExpectedBatches:
    """What `num_requests` of the workload's requests come to."""

    num_requests: int
    num_left_out: int
    num_steps: Mapping[int, int]  # decode batch size -> decode steps
    num_prefill_steps: int
    num_preemptions: int
    rejections: tuple[str, ...]  # why, one for each request that is never served
    is_exact: bool  # no request can end before its max_tokens


def expected_batches(config: Config, items: Sequence[WorkItem], memory: "MemoryPlan",
                     max_running: int) -> ExpectedBatches:
    """The batches of these requests in the KV cache of `memory`, which at most `max_running` share at once."""
    num_tokens = accumulate(item.params.max_tokens for item in items)
    chosen = [item for item, total in zip(items, num_tokens, strict=True) if total <= MAX_TOKENS] or items[:1]
    allocator = BlockAllocator(memory.num_blocks, memory.geometry.block_size, config.kv.prefix_cache)
    scheduler = make_scheduler(config.scheduler, allocator, config.model.max_model_len, max_running)
    plans: list[StepPlan] = []
    rejections: list[str] = []
    for phase in phases(chosen):
        for number, item in enumerate(phase):
            request = _request(number, item, config.model.max_model_len)
            if (reason := scheduler.rejection_reason(request)) is not None:
                rejections.append(reason)
            else:
                scheduler.add(request)
        plans += _steps(scheduler, lag=int(config.scheduler.overlaps_on(memory.device_type)))
    return ExpectedBatches(
        num_requests=len(chosen),
        num_left_out=len(items) - len(chosen),
        num_steps=Counter(len(plan.decode) for plan in plans if plan.decode),
        num_prefill_steps=sum(bool(plan.prefill) for plan in plans),
        num_preemptions=sum(len(plan.preempted) for plan in plans),
        rejections=tuple(rejections),
        is_exact=all(item.params.ignore_eos and not item.params.stop for item in chosen))


def _request(number: int, item: WorkItem, max_model_len: int) -> Request:
    max_total_tokens = min(len(item.prompt) + item.params.max_tokens, max_model_len)
    return Request(number, list(item.prompt), item.params, seed=0, max_total_tokens=max_total_tokens)


def _steps(scheduler: Scheduler, lag: int) -> list[StepPlan]:
    """Every step until nothing is left, each committed `lag` steps late, as `Engine.step` does."""
    plans = []
    pending: deque[StepPlan] = deque()
    while scheduler.has_unfinished or pending:
        plan = scheduler.schedule()
        assert pending or not plan.is_empty, "requests are waiting and the scheduler planned nothing"
        if not plan.is_empty:
            plans.append(plan)
            pending.append(plan)
        while len(pending) > (0 if plan.is_empty else lag):
            due = pending.popleft()
            scheduler.commit(due, [MADE_UP_TOKEN] * len(due.requests), lambda request: None)
    return plans
