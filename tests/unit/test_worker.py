"""The measured phase is apart: warmed up, counted from the arrival of its requests, free of what ran before."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from engine.records import EngineRecords, StartupRecord
from engine.request import SamplingParams, TokenEvent
from experiments.messages import Progress
from experiments.worker import _answers, _counted_from, timed_region, warm_up
from experiments.workload import WorkItem
from run_records import make_request, make_startup, make_step


@dataclass
class FakeEngine:
    """Every step gives each unfinished request one token, its number; the last one ends it."""

    startup: StartupRecord
    records: EngineRecords = field(default_factory=EngineRecords)
    live: dict[int, SamplingParams] = field(default_factory=dict)
    added: list[tuple[Sequence[int], SamplingParams, float | None]] = field(default_factory=list)
    num_measurements: int = 0
    ids: count = field(default_factory=count)
    produced: dict[int, int] = field(default_factory=dict)

    def add_request(self, prompt: Sequence[int], params: SamplingParams, arrival_s: float | None = None) -> int:
        request_id = next(self.ids)
        self.live[request_id] = params
        self.added.append((prompt, params, arrival_s))
        return request_id

    @property
    def has_unfinished(self) -> bool:
        return bool(self.live)

    def step(self) -> list[TokenEvent]:
        self.records.steps.append(make_step(len(self.records.steps), num_requests=len(self.live)))
        events = []
        for request_id, params in list(self.live.items()):
            self.produced[request_id] = self.produced.get(request_id, 0) + 1
            is_last = self.produced[request_id] == params.max_tokens
            events.append(TokenEvent(request_id, request_id, f"<{request_id}>", "length" if is_last else None))
            if is_last:
                del self.live[request_id]
                self.records.requests.append(make_request(request_id))
        return events

    def start_measurement(self) -> None:
        self.num_measurements += 1
        self.records.clear()


def work(num_items: int) -> list[WorkItem]:
    return [WorkItem((1,) * (num_items - number), SamplingParams(max_tokens=number + 1, stop=("x",)),
                     label=f"prompt {number}") for number in range(num_items)]


@pytest.mark.parametrize(("device", "num_requests"), [("cuda", 4), ("cpu", 1)])
def test_a_gpu_is_warmed_at_the_measured_concurrency_and_a_cpu_by_one_short_request(device, num_requests):
    engine = FakeEngine(make_startup(device=device))
    facts = warm_up(engine, work(6), max_num_seqs=4)
    first, again = engine.added[:num_requests], engine.added[num_requests:]
    assert facts["num_requests"] == len(first) == num_requests
    assert all(params.ignore_eos and params.stop == () and params.max_tokens == facts["max_tokens"]
               for _, params, _ in first)
    if device == "cpu":
        assert len(first[0][0]) == 1, "the shortest prompt"
        assert not again
    else:
        assert [len(prompt) for prompt, _, _ in again] == [6], "the longest prompt, its prefix now cached"


def test_nothing_of_the_warm_up_is_left_in_cache_or_records():
    engine = FakeEngine(make_startup())
    warm_up(engine, work(2), max_num_seqs=4)
    assert engine.num_measurements == 1
    assert engine.records == EngineRecords()


def test_all_requests_arrive_at_once_when_the_measurement_starts():
    engine = FakeEngine(make_startup())
    _, start_s, serve_s = timed_region(engine, work(3), lambda progress: None)
    assert [arrival_s for _, _, arrival_s in engine.added] == [start_s] * 3
    assert serve_s > 0


def test_the_requests_of_a_phase_arrive_when_the_phase_before_has_ended():
    engine = FakeEngine(make_startup())
    items = [replace(item, phase=number // 2) for number, item in enumerate(work(6))]
    events, start_s, _ = timed_region(engine, items, lambda progress: None)
    first, second, third = (arrival_s for _, _, arrival_s in engine.added[::2])
    assert [arrival_s for _, _, arrival_s in engine.added] == [first] * 2 + [second] * 2 + [third] * 2
    assert first == start_s < second < third
    served = [[event.request_id for event in events].index(number) for number in range(6)]
    assert served == sorted(served) and len(_answers(items, events)) == 6
    assert [step.num_requests for step in engine.records.steps] == [2, 1, 2, 2, 2, 1, 2, 2, 2, 2, 2, 1]


def test_a_gpu_is_warmed_by_the_largest_phase():
    engine = FakeEngine(make_startup(device="cuda"))
    items = [replace(item, phase=0 if number < 1 else 1) for number, item in enumerate(work(6))]
    assert warm_up(engine, items, max_num_seqs=8)["num_requests"] == 5


def test_answers_belong_to_their_prompts_whatever_ran_before():
    engine = FakeEngine(make_startup())
    items = work(3)
    warm_up(engine, items, max_num_seqs=4)
    events, _, _ = timed_region(engine, items, lambda progress: None)
    answers = _answers(items, events)
    assert [(answer.label, answer.token_ids, answer.text) for answer in answers] == [
        ("prompt 0", (1,), "<1>"), ("prompt 1", (2, 2), "<2><2>"), ("prompt 2", (3, 3, 3), "<3><3><3>")]


def test_a_rejected_request_is_an_answer_with_its_reason():
    rejected = TokenEvent(0, None, "", "rejected", "needs 9 blocks, the cache has 4")
    [answer] = _answers(work(1), [rejected])
    assert (answer.token_ids, answer.finish_reason, answer.error) == ((), "rejected", "needs 9 blocks, the cache has 4")


def test_progress_is_told_with_counts_and_not_at_every_step():
    told: list[Progress] = []
    engine = FakeEngine(make_startup())
    timed_region(engine, [WorkItem((1,), SamplingParams(max_tokens=1000), "")], told.append)
    assert told[0] == Progress("serve", 0, 1, 1, 1)
    assert len(told) < len(engine.records.steps) / 2


def test_times_count_from_the_arrival_of_the_requests():
    records = EngineRecords([make_step(0, start_s=7.0, end_s=7.5)],
                            [make_request(1, (8.0,), arrival_s=5.0, first_scheduled_s=7.0),
                             make_request(0, (), arrival_s=5.0, first_scheduled_s=None)], ["said once"])
    counted = _counted_from(5.0, records)
    assert (counted.steps[0].start_s, counted.steps[0].end_s) == (2.0, 2.5)
    first, second = counted.requests
    assert (first.request_id, first.first_scheduled_s) == (0, None)
    assert (second.arrival_s, second.first_scheduled_s, second.token_times_s) == (0.0, 2.0, (3.0,))
    assert counted.warnings == ["said once"]
