"""Whatever arrives, every request gets the tokens that it would get alone, and no KV slot is read that is not its own.

The fake device below is the witness: its KV cache stores in each slot the whole token prefix that the slot stands for,
and each step compares every slot that a request attends to, before and after the step's writes.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.block_allocator import BlockAllocator
from engine.config import SCHEDULER_POLICIES, SchedulerConfig
from engine.request import Request, RequestState, SamplingParams
from engine.scheduler import SCHEDULERS, make_scheduler
from engine.scheduler.base import Scheduler
from engine.scheduler.plan import StepPlan

EOS = 3
policies = pytest.mark.parametrize("policy", sorted(SCHEDULERS))


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 8


def output_alone(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.max_total_tokens:
        tokens.append(next_token(tokens))
        if stop_at_eos(request, tokens[-1]):
            break
    return tokens[request.num_prompt_tokens:]


def stop_at_eos(request: Request, token_id: int) -> str | None:
    return "stop" if token_id == EOS and not request.params.ignore_eos else None


@dataclass
class FakeDevice:
    """Runs plans in order. `kv` maps a slot to the tokens up to and including the one it holds."""

    block_size: int
    kv: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tokens: dict[Request, list[int]] = field(default_factory=dict)  # of live requests, the newest token included

    def run(self, plan: StepPlan) -> list[int]:
        first_computed = {item.request: item.num_cached_tokens for item in plan.prefill}
        for item in plan.prefill:
            self.tokens[item.request] = list(item.request.token_ids)
            assert len(item.request.token_ids) == item.num_tokens > item.num_cached_tokens
        for item in plan.decode:
            first_computed[item.request] = item.position
            assert len(self.tokens[item.request]) == item.position + 1
        assert len(first_computed) == len(plan.requests), "a request is planned twice"
        for request, start in first_computed.items():
            self.read(request, start)
        for request, start in first_computed.items():
            for position in range(start, len(self.tokens[request])):
                self.kv[self.slot(request, position)] = tuple(self.tokens[request][:position + 1])
        for request in first_computed:
            self.read(request, len(self.tokens[request]))
            self.tokens[request].append(next_token(self.tokens[request]))
        return [self.tokens[request][-1] for request in first_computed]

    def read(self, request: Request, num_tokens: int) -> None:
        for position in range(num_tokens):
            assert self.kv.get(self.slot(request, position)) == tuple(self.tokens[request][:position + 1])

    def slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size


@dataclass
class Server:
    """The engine's loop around a scheduler; `lag` is how many steps are in flight when the next one is scheduled."""

    scheduler: Scheduler
    lag: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.scheduler.allocator.block_size)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        assert not plan.is_empty or not plan.preempted, "preempted for nobody"
        assert not plan.is_empty or self.in_flight or not self.scheduler.has_unfinished, "idle with work at hand"
        if not plan.is_empty:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        while len(self.in_flight) > (0 if plan.is_empty else self.lag):
            self.commit()

    def commit(self) -> None:
        plan, token_ids = self.in_flight.popleft()
        before = {request: request.num_output_tokens for request in plan.requests}
        unfinished = [request for request in plan.requests if not request.is_finished]
        kept = self.scheduler.commit(plan, token_ids, lambda request: stop_at_eos(request, request.token_ids[-1]))
        assert kept == unfinished
        assert all(request.num_output_tokens == before[request] + (request in kept) for request in before)
        self.scheduler.check()

    def finish(self) -> None:
        while self.scheduler.has_unfinished or self.in_flight:
            self.step()

    @property
    def preempted(self) -> list[Request]:
        return [request for plan in self.plans for request in plan.preempted]


def server(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, lag=0,
           prefix_cache=True, policy="prefill_first") -> Server:
    config = SchedulerConfig(policy=policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return Server(make_scheduler(config, BlockAllocator(num_blocks, block_size, prefix_cache), max_model_len), lag)


def requests(*prompts: list[int], max_tokens=8, max_model_len=256, ignore_eos=True) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return [Request(number, prompt, params, seed=0, max_total_tokens=min(len(prompt) + max_tokens, max_model_len))
            for number, prompt in enumerate(prompts)]


@dataclass
class Arrival:
    """A request, the step before which it arrives, and that before which it is aborted, if ever."""

    request: Request
    step: int
    abort_step: int | None


@st.composite
def arrivals(draw) -> list[Arrival]:
    """Up to eight requests, whose prompts share beginnings."""
    stems = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=2))
    drawn = []
    for number in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(st.integers(0, 4), max_size=3))
        [request] = requests(prompt, max_tokens=draw(st.integers(1, 14)), max_model_len=20,
                             ignore_eos=draw(st.booleans()))
        request.request_id = number
        drawn.append(Arrival(request, draw(st.integers(0, 6)), draw(st.none() | st.none() | st.integers(0, 20))))
    return drawn


def replay(case: Server, pending: list[Arrival]) -> None:
    step = 0
    while case.scheduler.has_unfinished or case.in_flight or any(arrival.step >= step for arrival in pending):
        for arrival in pending:
            if arrival.step == step:
                case.scheduler.add(arrival.request)
            if arrival.abort_step is not None and arrival.abort_step == step >= arrival.step:
                case.scheduler.abort(arrival.request)
                case.scheduler.check()
        case.step()
        step += 1


@policies
@settings(max_examples=400, deadline=None)
@given(data=st.data(), lag=st.integers(0, 1), block_size=st.integers(1, 4), spare_blocks=st.integers(0, 4),
       max_num_seqs=st.integers(1, 6), prefix_cache=st.booleans())
def test_every_request_gets_the_tokens_it_would_get_alone(policy, data, lag, block_size, spare_blocks, max_num_seqs,
                                                          prefix_cache):
    pending = data.draw(arrivals())
    num_blocks = -(-19 // block_size) + spare_blocks  # the longest request fits, and not much more
    case = server(num_blocks, block_size, max_num_seqs, data.draw(st.integers(20, 40)), 20, lag, prefix_cache, policy)
    replay(case, pending)
    event(f"preempted: {bool(case.preempted)}, prefix hits: {case.scheduler.allocator.num_hit_tokens > 0}, lag {lag}")
    for request in (arrival.request for arrival in pending):
        alone = output_alone(request)
        assert request.state is RequestState.FINISHED and request.num_inflight == 0
        if request.finish_reason == "aborted":
            assert request.output_token_ids == alone[:request.num_output_tokens]
        else:
            assert request.output_token_ids == alone
            assert request.finish_reason == (stop_at_eos(request, alone[-1]) or "length")
    assert case.scheduler.allocator.num_used == 0


@policies
@settings(max_examples=100, deadline=None)
@given(pending=arrivals(), lag=st.integers(0, 1), budget=st.integers(20, 30), max_num_seqs=st.integers(1, 6))
def test_a_step_stays_within_its_limits(policy, pending, lag, budget, max_num_seqs):
    case = server(60, 2, max_num_seqs, budget, 20, lag, policy=policy)
    replay(case, pending)
    for plan in case.plans:
        assert len(plan.requests) <= max_num_seqs
        assert sum(item.num_tokens - item.num_cached_tokens for item in plan.prefill) <= budget


@policies
@settings(max_examples=100, deadline=None)
@given(pending=arrivals(), lag=st.integers(0, 1), num_blocks=st.integers(10, 16))
def test_recomputed_tokens_are_those_whose_kv_the_request_held_before(policy, pending, lag, num_blocks):
    case = server(num_blocks, 2, 4, 40, 20, lag, policy=policy)
    replay(case, pending)
    held = {arrival.request: 0 for arrival in pending}  # positions [0, n) whose KV was computed or found
    recomputed = dict.fromkeys(held, 0)
    for plan in case.plans:
        for item in plan.prefill:
            recomputed[item.request] += max(0, held[item.request] - item.num_cached_tokens)
            held[item.request] = item.num_tokens
        for decode in plan.decode:
            held[decode.request] = decode.position + 1
    for request, count in recomputed.items():
        assert request.num_recomputed_tokens == count
        assert request.num_preemptions == case.preempted.count(request)


def test_every_configured_policy_has_a_scheduler():
    assert tuple(SCHEDULERS) == SCHEDULER_POLICIES


def test_a_prompt_that_fills_the_context_ends_with_length_and_no_token():
    case = server(max_model_len=16)  # nano-vllm issues 106, 190: seventeen block table columns in a buffer of sixteen
    [full] = requests([0] * 16, max_model_len=16)
    case.scheduler.add(full)
    assert (full.state, full.finish_reason, full.output_token_ids) == (RequestState.FINISHED, "length", [])
    assert not case.scheduler.has_unfinished


@pytest.mark.parametrize("lag", [0, 1])
def test_the_context_limit_ends_a_request_with_length(lag):
    case = server(block_size=1, max_model_len=16, lag=lag)
    [almost_full] = requests([0] * 15, max_tokens=2, max_model_len=16)
    case.scheduler.add(almost_full)
    case.finish()
    assert (almost_full.finish_reason, almost_full.num_output_tokens) == ("length", 1)
    assert len(case.plans) == 1


def test_a_request_larger_than_the_cache_is_refused_with_the_sum_and_others_finish():
    case = server(num_blocks=40, block_size=64, max_model_len=8192, max_num_batched_tokens=8192)  # nano-vllm issue 274
    [large] = requests([0] * 4000, max_tokens=801, max_model_len=8192)
    [small] = requests([1, 2, 3])
    assert case.scheduler.rejection_reason(large) == (
        "needs 75 KV blocks of 64 tokens (4,800 tokens: prompt 4,000 + output 801 - 1) but the cache has 40")
    with pytest.raises(ValueError, match="request 0: needs 75 KV blocks"):
        case.scheduler.add(large)
    case.scheduler.add(small)
    case.finish()
    assert small.output_token_ids == output_alone(small)


@pytest.mark.parametrize(("num_prompt_tokens", "reason"), [
    (0, "the prompt is empty: nothing to predict from"),
    (51, "the prompt has 51 tokens but model.max_model_len is 50"),
    (45, "may compute 49 tokens in one step (prompt 45 + output 5 - 1) but scheduler.max_num_batched_tokens is 48"),
    (44, None),
])
def test_a_request_that_can_never_be_served_is_refused_with_the_reason(num_prompt_tokens, reason):
    scheduler = server(max_model_len=50, max_num_batched_tokens=48).scheduler
    [request] = requests([0] * num_prompt_tokens, max_tokens=5)
    assert scheduler.rejection_reason(request) == reason


def test_no_more_requests_hold_kv_than_max_num_seqs():
    case = server(max_num_seqs=2)  # nano-vllm issue 265: ten held KV
    waiting = requests(*([number, 1, 2] for number in range(10)))
    for request in waiting:
        case.scheduler.add(request)
    while case.scheduler.has_unfinished:
        case.step()
        assert sum(bool(request.block_table) for request in waiting) == case.scheduler.num_running <= 2
    assert all(request.output_token_ids == output_alone(request) for request in waiting)


@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_with_a_shared_prefix_changes_no_token(lag):
    small, ample = server(num_blocks=9, block_size=2, lag=lag), server(num_blocks=64, block_size=2)
    outputs = []
    for case in (small, ample):  # nano-vllm issues 207, 233: an index error in the small pool
        batch = requests(*([7, 7, 7, 7, number] for number in range(4)), max_tokens=12)
        case.scheduler.add(batch[0])
        case.step()
        case.step()  # the first prompt is committed before the others look for it
        for request in batch[1:]:
            case.scheduler.add(request)
        case.finish()
        assert [request.num_cached_tokens for request in batch[1:]] == [4, 4, 4]
        outputs.append([request.output_token_ids for request in batch])
    assert small.preempted and not ample.preempted
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("lag", [0, 1])
def test_equal_prompts_of_one_prefill_share_nothing_until_it_is_committed(lag):
    case = server(block_size=2, max_num_seqs=3, lag=lag)  # nano-vllm issue 208: the second read blocks not yet computed
    first, second, later = requests(*[[1, 2, 3, 4, 5]] * 3, max_tokens=6)
    case.scheduler.add(first)
    case.scheduler.add(second)
    case.step()
    assert not set(first.block_table) & set(second.block_table)
    case.step()
    case.scheduler.add(later)
    case.finish()
    assert later.num_cached_tokens == 4
    assert first.output_token_ids == second.output_token_ids == later.output_token_ids == output_alone(first)


def test_a_prefill_ends_before_the_prompt_that_passes_the_token_budget():
    case = server(max_num_batched_tokens=25)
    for request in requests(*[[0] * 10] * 3, max_tokens=2):
        case.scheduler.add(request)
    case.finish()
    assert [len(plan.prefill) for plan in case.plans if plan.prefill] == [2, 1]


def test_the_newest_request_is_preempted_and_comes_back_before_those_that_wait():
    case = server(num_blocks=6, block_size=2, max_num_seqs=2)
    old, new, waiting = requests([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], max_tokens=5)
    for request in (old, new, waiting):
        case.scheduler.add(request)
    case.finish()
    admitted = [item.request.request_id for plan in case.plans for item in plan.prefill]
    assert case.preempted == [new]
    assert admitted == [0, 1, 1, 2]
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)


def test_a_token_that_arrives_after_the_stop_is_dropped():
    case = server(lag=1)
    stopping = next(request for request in requests(*([number] for number in range(50)), ignore_eos=False)
                    if 1 < len(output_alone(request)) < 8)
    case.scheduler.add(stopping)
    case.finish()
    assert stopping.finish_reason == "stop"
    assert stopping.output_token_ids == output_alone(stopping)
    assert len(case.plans) == stopping.num_output_tokens + 1  # the last plan's token was dropped


def preempt_in_flight(max_tokens: int) -> tuple[Server, Request]:
    """A server that scheduled a decode on top of the prefill in flight, and preempted the newer request for it."""
    case = server(num_blocks=4, block_size=2)
    [old] = requests([0, 1, 2, 3], max_tokens=5)
    [new] = requests([4, 5, 6, 7], max_tokens=max_tokens)
    case.scheduler.add(old)
    case.scheduler.add(new)
    prefill = case.scheduler.schedule()
    case.in_flight.append((prefill, case.device.run(prefill)))
    assert case.scheduler.schedule().preempted == (new,)
    case.scheduler.abort(old)  # so that from now on there is room for the other
    return case, new


def test_a_request_preempted_in_flight_is_admitted_only_when_its_token_is_known():
    case, new = preempt_in_flight(max_tokens=5)
    assert new.num_inflight == 1
    assert case.scheduler.schedule().is_empty
    case.commit()
    assert [(item.request, item.num_tokens) for item in case.scheduler.schedule().prefill] == [(new, 5)]


def test_a_request_preempted_with_its_last_token_in_flight_finishes_with_it():
    case, new = preempt_in_flight(max_tokens=1)
    case.commit()
    assert (new.state, new.finish_reason, new.num_output_tokens) == (RequestState.FINISHED, "length", 1)
    assert not case.scheduler.has_unfinished


def test_nobody_is_preempted_for_blocks_that_the_step_in_flight_gives_back():
    case = server(num_blocks=4, block_size=2, lag=1)
    [old] = requests([0, 1, 2, 3], max_tokens=1)
    [new] = requests([4, 5, 6, 7], max_tokens=5)
    case.scheduler.add(old)
    case.scheduler.add(new)
    case.finish()
    assert not case.preempted
    assert new.output_token_ids == output_alone(new)
