"""The run itself: build the engine, warm it up, serve the workload, hand back what was recorded.

Executed in a process of its own, so that a run's memory, CUDA context and end are its own. The timed region holds
nothing but the engine, and a message to the parent at most every 0.1 s.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from engine.records import EngineRecords, RequestRecord
from engine.request import SamplingParams, TokenEvent
from experiments.config import Config
from experiments.messages import Answer, Finished, Progress
from experiments.workload import WorkItem, bind_to_model, draw_workload, phases

if TYPE_CHECKING:
    from engine.engine import Engine

REPORT_INTERVAL_S = 0.1
CUDA_WARMUP_TOKENS = 16  # enough decode steps for clocks and allocator to settle
CPU_WARMUP_TOKENS = 2  # one prefill and one decode step

Report = Callable[[Progress], None]


def serve(config: Config, report: Report) -> Finished:
    """Execute the run. Raises ValueError for what the configuration, a workload file or the model got wrong."""
    drafts = draw_workload(config)
    seconds: dict[str, float] = {}
    report(Progress("import torch"))
    start_s = time.perf_counter()
    from engine.engine import Engine

    with Engine(config, on_stage=lambda stage: report(Progress(stage))) as engine:
        seconds["build_engine"] = time.perf_counter() - start_s
        report(Progress("tokenize"))
        start_s = time.perf_counter()
        items = bind_to_model(drafts, engine.tokenizer, engine.vocab_size)
        seconds["bind_workload"] = time.perf_counter() - start_s
        report(Progress("warm up"))
        start_s = time.perf_counter()
        warmup = warm_up(engine, items, config.scheduler.max_num_seqs)
        seconds["warm_up"] = time.perf_counter() - start_s
        events, start_s, seconds["serve"] = timed_region(engine, items, report)
        report(Progress("collect"))
        answers = _answers(items, events)
        if all(answer.error for answer in answers):
            raise ValueError(f"none of the {len(answers)} requests could be served: {answers[0].error}")
        startup = replace(engine.startup, ledger=engine.memory_ledger())
        return Finished(startup, _counted_from(start_s, engine.records), answers,
                        engine.memory_snapshot(), warmup, seconds, process_facts())


def warm_up(engine: "Engine", items: Sequence[WorkItem], max_num_seqs: int) -> dict[str, Any]:
    """Serve a few tokens apart from the measurement, and forget them. Returns what ran.

    On a GPU at the concurrency that will be measured: lazy kernel loading, the allocator and clocks depend on it. On a
    CPU one short request is enough to pass every operator once, and full concurrency would cost as much as the run.
    """
    is_cuda = engine.startup.device == "cuda"
    chosen = max(phases(items), key=len)[:max_num_seqs] if is_cuda else [min(items, key=lambda item: len(item.prompt))]
    max_tokens = CUDA_WARMUP_TOKENS if is_cuda else CPU_WARMUP_TOKENS
    for item in chosen:
        engine.add_request(item.prompt, _warmup_params(item.params, max_tokens))
    _run_to_end(engine)
    if is_cuda:  # again with its prefix cached, which takes another kernel than a prompt that is new
        longest = max(chosen, key=lambda item: len(item.prompt))
        engine.add_request(longest.prompt, _warmup_params(longest.params, 1))
        _run_to_end(engine)
    engine.start_measurement()
    return {"num_requests": len(chosen), "max_tokens": max_tokens}


def _run_to_end(engine: "Engine") -> None:
    while engine.has_unfinished:
        engine.step()


def _warmup_params(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens, ignore_eos=True, stop=())


def timed_region(engine: "Engine", items: Sequence[WorkItem], report: Report) -> tuple[list[TokenEvent], float, float]:
    """Serve the phases one after the other; the requests of each arrive together, when the phase before has ended.

    Returns the tokens, the start on perf_counter, and the seconds.
    """
    events: list[TokenEvent] = []
    progress = _ServingProgress(len(items), report)
    starts_s: list[float] = []
    for batch in phases(items):
        starts_s.append(time.perf_counter())
        for item in batch:
            engine.add_request(item.prompt, item.params, arrival_s=starts_s[-1])
        while engine.has_unfinished:
            events += engine.step()
            if time.perf_counter() >= progress.due_s:
                progress.tell(events, engine.records)
    return events, starts_s[0], time.perf_counter() - starts_s[0]


class _ServingProgress:
    """Counts what has come since it was last told, so that a step costs only a look at the clock."""

    def __init__(self, num_requests: int, report: Report) -> None:
        self.due_s = 0.0
        self._report = report
        self._num_requests = num_requests
        self._num_seen = 0
        self._num_finished = 0

    def tell(self, events: Sequence[TokenEvent], records: EngineRecords) -> None:
        self._num_finished += sum(event.finish_reason is not None for event in islice(events, self._num_seen, None))
        self._num_seen = len(events)
        batch_size = records.steps[-1].num_requests if records.steps else 0
        self._report(Progress("serve", self._num_finished, self._num_requests, self._num_seen, batch_size))
        self.due_s = time.perf_counter() + REPORT_INTERVAL_S


def _answers(items: Sequence[WorkItem], events: Sequence[TokenEvent]) -> tuple[Answer, ...]:
    """The answer to each item; request ids ascend in the order in which the items were added."""
    of_request: dict[int, list[TokenEvent]] = {}
    for event in events:
        of_request.setdefault(event.request_id, []).append(event)
    assert len(of_request) == len(items), f"{len(of_request)} requests answered, {len(items)} sent"
    return tuple(_answer(item, of_request[number]) for item, number in zip(items, sorted(of_request), strict=True))


def _answer(item: WorkItem, events: Sequence[TokenEvent]) -> Answer:
    last = events[-1]
    assert last.finish_reason is not None, f"request {last.request_id} never finished"
    token_ids = tuple(event.token_id for event in events if event.token_id is not None)
    return Answer(item.label, token_ids, "".join(event.text for event in events), last.finish_reason, last.error)


def _counted_from(start_s: float, records: EngineRecords) -> EngineRecords:
    """The records with times counted from `start_s`; requests in the order of their ids."""
    steps = [replace(step, start_s=step.start_s - start_s, end_s=step.end_s - start_s) for step in records.steps]
    requests = [_request_from(start_s, request)
                for request in sorted(records.requests, key=lambda request: request.request_id)]
    return EngineRecords(steps, requests, list(records.warnings))


def _request_from(start_s: float, request: RequestRecord) -> RequestRecord:
    first_s = request.first_scheduled_s
    return replace(request, arrival_s=request.arrival_s - start_s,
                   first_scheduled_s=None if first_s is None else first_s - start_s,
                   token_times_s=tuple(time_s - start_s for time_s in request.token_times_s))


def process_facts() -> dict[str, Any]:
    """What only the process that executes a run knows of torch."""
    import torch

    return {"torch_num_threads": torch.get_num_threads(), "torch_cuda": torch.version.cuda}
