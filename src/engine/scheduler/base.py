"""What every scheduling policy shares: the queues, admission, block growth, preemption and commit.

Scheduling counts tokens and never reads them, so the plan of step n+1 can be made while step n still runs. A planned
request has one more token *in flight* until the step is committed; `Request.num_tokens` includes it. When a commit
lags, a request may stop (a token said so) with one more token in flight, which that step's commit then drops.

Preemption is by recomputation: the newest running request gives up its blocks, waits at the front of the queue, and
later prefills its prompt and output together. Since a request is accepted only if the empty cache could hold it to its
end, the oldest running request always advances, and everything finishes.

Releasing blocks under a step in flight is safe: steps run in order on the device, so whoever gets a block next writes
it after that step did.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from engine.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.request import Request, RequestState
from engine.scheduler.plan import ScheduledDecode, ScheduledPrefill, StepPlan


class Scheduler(ABC):
    """Decides who runs; owns requests from `add` until they are FINISHED. A policy implements `schedule`."""

    def __init__(self, config: SchedulerConfig, allocator: BlockAllocator, max_model_len: int,
                 max_running: int | None = None) -> None:
        self.config = config
        self.max_running = config.max_num_seqs if max_running is None else max_running
        self.allocator = allocator
        self.max_model_len = max_model_len
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, None] = {}  # an ordered set, oldest admission first
        self._free_rows = list(range(config.max_num_seqs))  # a heap: low rows are reused first

    @abstractmethod
    def schedule(self) -> StepPlan:
        """The next step: each request in it has one more token in flight until `commit`.

        Empty if nothing can be computed before a step in flight is committed, or if nothing is left to do.
        """

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def rejection_reason(self, request: Request) -> str | None:
        """Why this request could never be served, with the sum; None if it can always be brought to its end."""
        num_prompt = request.num_prompt_tokens
        num_stored = request.max_total_tokens - 1  # the last token is sampled and never fed
        terms = f"prompt {num_prompt:,} + output {request.max_total_tokens - num_prompt:,} - 1"
        if num_prompt == 0:
            return "the prompt is empty: nothing to predict from"
        if num_prompt > self.max_model_len:
            return f"the prompt has {num_prompt:,} tokens but model.max_model_len is {self.max_model_len:,}"
        # Not only the prompt: a preempted request recomputes its output with it, in one step.
        if num_stored > (budget := self.config.max_num_batched_tokens):
            return (f"may compute {num_stored:,} tokens in one step ({terms}) but scheduler.max_num_batched_tokens "
                    f"is {budget:,}")
        if (num_blocks := self.allocator.num_blocks_for(num_stored)) > self.allocator.num_blocks:
            return (f"needs {num_blocks:,} KV blocks of {self.allocator.block_size:,} tokens ({num_stored:,} tokens: "
                    f"{terms}) but the cache has {self.allocator.num_blocks:,}")
        return None

    def add(self, request: Request) -> None:
        """Queue a new request. One whose prompt leaves no room for a token is FINISHED (`length`) at once.

        Raises ValueError with `rejection_reason` if there is one.
        """
        if reason := self.rejection_reason(request):
            raise ValueError(f"request {request.request_id}: {reason}")
        self._waiting.append(request)
        if request.num_tokens >= request.max_total_tokens:
            self._finish(request, "length")

    def abort(self, request: Request) -> None:
        """End a request now; its tokens in flight will be dropped. Does nothing to a finished one."""
        if not request.is_finished:
            self._finish(request, "aborted")

    def commit(self, plan: StepPlan, token_ids: Sequence[int],
               finish_reason: Callable[[Request], str | None]) -> list[Request]:
        """Give each planned request its token; returns those that kept it, in plan order. Plans are committed in order.

        A request that finished while the step was in flight drops its token. `finish_reason` is asked after the token
        was appended; at `max_total_tokens` a request ends with `length` in any case.
        """
        kept = []
        for request, token_id in zip(plan.requests, token_ids, strict=True):
            request.num_inflight -= 1
            if request.is_finished:
                continue
            if request.state is RequestState.RUNNING:  # a preempted one no longer holds what the step computed
                # Every token known up to here has been computed: the newest of them was fed to produce this one.
                # Registering earlier would let others read blocks that no step has filled yet (nano-vllm issue 208).
                self.allocator.register(request.block_table, request.token_ids, len(request.token_ids))
            request.token_ids.append(token_id)
            kept.append(request)
            reason = finish_reason(request)
            if reason is None and len(request.token_ids) >= request.max_total_tokens:
                reason = "length"
            if reason is not None:
                self._finish(request, reason)
        return kept

    def check(self) -> None:
        """Assert that blocks, rows and states agree with the queues."""
        self.allocator.check(request.block_table for request in self._running)
        assert self.num_running <= self.max_running, f"{self.num_running} running"
        rows = sorted([*self._free_rows, *(request.row for request in self._running)])
        assert rows == list(range(self.config.max_num_seqs)), f"rows lost or shared: {rows}"
        for request in self._running:
            assert request.state is RequestState.RUNNING, f"{request.state} among the running"
            num_blocks = self.allocator.num_blocks_for(request.num_tokens - 1)  # the newest token is not stored yet
            assert len(request.block_table) == num_blocks, f"{len(request.block_table)} blocks, not {num_blocks}"
        for request in self._waiting:
            assert request.state is RequestState.WAITING, f"{request.state} among the waiting"
            assert not request.block_table and request.row == -1, f"request {request.request_id} waits and holds KV"

    def prefill_waiting(self) -> StepPlan | None:
        """Admit waiting requests in order of arrival until one does not fit; None if not even the first does."""
        prefill: list[ScheduledPrefill] = []
        budget = self.config.max_num_batched_tokens
        while self._waiting and self.num_running < self.max_running:
            item = self._admit(self._waiting[0], budget)
            if item is None:
                break
            budget -= item.num_tokens - item.num_cached_tokens
            prefill.append(item)
        return StepPlan(prefill=tuple(prefill)) if prefill else None

    def decode_running(self) -> StepPlan:
        """Decode every running request that still needs a token, oldest first, preempting where blocks run out.

        A request that needs a block sits the step out if an older one's last token is in flight: that one's blocks
        come back with the commit, and one step of patience is cheaper than a recomputation.
        """
        decode: list[ScheduledDecode] = []
        preempted: list[Request] = []
        is_room_coming = False
        block_size = self.allocator.block_size
        for request in tuple(self._running):
            if preempted and request.state is not RequestState.RUNNING:
                break  # preempted for an older one, as are all that follow
            position = request.num_tokens - 1
            if position + 1 >= request.max_total_tokens:
                is_room_coming = True
                continue
            if position >= len(request.block_table) * block_size:
                if is_room_coming and self.allocator.num_available == 0:
                    continue
                if not self._grow(request, preempted):
                    break
            request.num_inflight += 1
            decode.append(ScheduledDecode(request, position))
        return StepPlan(decode=tuple(decode), preempted=tuple(preempted))

    def _admit(self, request: Request, budget: int) -> ScheduledPrefill | None:
        """Move the first waiting request to the running ones, if blocks and the token budget allow."""
        if request.num_inflight > 0:
            return None  # preempted in flight: a token that it has to recompute is not known yet
        num_tokens = request.num_tokens
        matched = self.allocator.match_prefix(request.token_ids)
        num_cached = len(matched) * self.allocator.block_size
        num_new_blocks = self.allocator.num_blocks_for(num_tokens) - len(matched)
        if num_tokens - num_cached > budget or not self.allocator.can_hold(matched, num_new_blocks):
            return None
        self._waiting.popleft()
        self._running[request] = None
        self.allocator.acquire(matched, num_tokens)
        request.block_table = matched + self.allocator.allocate(num_new_blocks)
        request.row = heappop(self._free_rows)
        request.state = RequestState.RUNNING
        request.num_inflight = 1
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        else:
            request.num_recomputed_tokens += num_tokens - 1 - num_cached  # the newest token was never computed
        return ScheduledPrefill(request, num_cached, num_tokens)

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Give the request one more block, preempting the newest requests for it while none is available.

        False if it was itself the newest, and is now preempted.
        """
        while self.allocator.num_available == 0:
            victim = next(reversed(self._running))
            self._stop_running(victim)
            victim.state = RequestState.WAITING
            victim.num_preemptions += 1
            self._waiting.appendleft(victim)
            preempted.append(victim)
            if victim is request:
                return False
        request.block_table.extend(self.allocator.allocate(1))
        return True

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self._stop_running(request)
        else:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def _stop_running(self, request: Request) -> None:
        del self._running[request]
        self.allocator.release(request.block_table)
        request.block_table = []
        heappush(self._free_rows, request.row)
        request.row = -1
