"""The engine: takes requests, and turns them into tokens one step at a time.

    schedule -> launch -> commit

`step` is where that can be read. With `scheduler.overlap` the commit lags one step: step n+1 is scheduled and launched
before the tokens of step n are read, which works because scheduling needs only the number of tokens.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.assembly import assemble
from engine.block_allocator import BlockAllocator
from engine.config import EngineConfig
from engine.graph.static_batch import NUM_HOST_BUFFERS
from engine.intake import Intake, Params, Prompt
from engine.memory.ledger import MemoryLedger
from engine.probe import DecodeProbe
from engine.records import ABOVE_LARGEST_BUCKET, EngineRecords, RequestRecord, StepRecord
from engine.request import Request, RequestOutput, RequestState, SamplingParams, TokenEvent
from engine.runner import LaunchedStep, ModelRunner
from engine.scheduler import make_scheduler
from engine.scheduler.plan import StepPlan
from engine.tokenizer import TextStream

log = logging.getLogger("engine")


class Engine:
    """Generates tokens for many requests at once. Use it as a context manager, or call `close`.

    `startup` records what start-up decided; `records` collects steps and requests as they happen.
    """

    def __init__(self, config: EngineConfig, on_stage: Callable[[str], None] = log.info) -> None:
        """Load, size the KV cache and capture, calling `on_stage` with the name of each part as it begins.

        Raises ValueError for what the configuration or the model directory got wrong.
        """
        self.config = config
        self.records = EngineRecords()
        self._is_closed = False
        assembly = assemble(config, on_stage)
        self.startup, parts = assembly.record, assembly.parts
        buckets = parts.graph_builder.buckets
        self.tokenizer = assembly.tokenizer
        self.vocab_size = parts.source.architecture.vocab_size
        self._eos_token_ids = parts.source.eos_token_ids
        self._parts = parts
        self._intake = Intake(self.tokenizer, self.vocab_size, config.model.max_model_len, config.sampler)
        self._allocator = BlockAllocator(parts.kv_cache.num_blocks, parts.kv_cache.block_size, config.kv.prefix_cache)
        self._scheduler = make_scheduler(config.scheduler, self._allocator, config.model.max_model_len,
                                         config.scheduler.max_running(buckets))
        self._runner = ModelRunner(parts.decode_step, buckets, parts.graph_builder.graphs, parts.device, parts.stream)
        self._requests: dict[int, Request] = {}  # unfinished
        self._texts: dict[int, TextStream] = {}
        self._new_text: dict[int, str] = {}
        self._ended_on_arrival: list[Request] = []
        self._pending: deque[tuple[LaunchedStep, StepRecord]] = deque()  # launched, not committed
        self._lag = int(config.scheduler.overlaps_on(parts.device.type))
        assert self._lag < NUM_HOST_BUFFERS, f"a lag of {self._lag} steps overwrites host buffers that are in flight"
        self._num_steps = 0
        for warning in parts.graph_builder.warnings:
            self._warn_once(warning)
        if buckets is not None and (gap := buckets.uncovered(config.scheduler.max_num_seqs)):
            self._warn_once(config.scheduler.cap_sentence(buckets) or gap)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the device's memory back; closing twice does nothing. A closed engine takes no requests."""
        if not self._is_closed:
            self._is_closed = True
            self._pending.clear()
            self._requests.clear()
            del self._runner
            self._parts.release()

    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Outputs in the order of `prompts` (texts or lists of token ids); `params` is one for all, or one for each.

        A prompt that can never be served comes back with finish reason `rejected` and the reason in `error`.
        """
        requests = self._new_requests(prompts, params)
        texts = {request.request_id: "" for request in requests}
        for event in self._serve(requests):
            texts[event.request_id] += event.text
        return [_output(request, texts[request.request_id]) for request in requests]

    def stream(self, prompts: Sequence[Prompt], params: Params = None) -> Iterator[TokenEvent]:
        """Tokens as they are produced, for all prompts interleaved; request ids ascend in the order of `prompts`.

        Requests that are unfinished when the consumer stops iterating are aborted.
        """
        return self._serve(self._new_requests(prompts, params))

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, arrival_s: float | None = None) -> int:
        """Queue a prompt for the following steps; returns its request id. `arrival_s` is perf_counter's.

        Without `params`, those of the configuration's sampler section hold.
        """
        self._check_open()
        request = self._intake.request(prompt, params, arrival_s)
        self._add(request)
        return request.request_id

    @property
    def has_unfinished(self) -> bool:
        """Whether a further step would do something."""
        return bool(self._requests or self._pending)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed and takes no requests")

    def _new_requests(self, prompts: Sequence[Prompt], params: Params) -> list[Request]:
        self._check_open()
        return self._intake.requests(prompts, params)

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        if self.tokenizer is not None:
            self._texts[request.request_id] = TextStream(self.tokenizer, request.params.stop)
        request.error = self._scheduler.rejection_reason(request)
        if request.error is not None:
            request.state, request.finish_reason = RequestState.FINISHED, "rejected"
        else:
            self._scheduler.add(request)
        if request.is_finished:  # it can produce no token; the next step says so
            self._ended_on_arrival.append(request)

    def _serve(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Add the requests when the first token is asked for, and step until they have ended."""
        if self._requests:
            raise ValueError(f"{len(self._requests)} earlier requests are unfinished: step() to their end, or abort()")
        try:
            for request in requests:
                self._add(request)
            while self.has_unfinished:
                yield from self.step()
        finally:
            for request in requests:
                self.abort(request.request_id)

    def abort(self, request_id: int) -> None:
        """End a request now; one that has ended already stays as it is."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if not request.is_finished:
            self._scheduler.abort(request)
        self._ended_on_arrival = [other for other in self._ended_on_arrival if other is not request]
        self._retire(request)

    def step(self) -> list[TokenEvent]:
        """Schedule and launch one step, and commit what is due; returns the tokens that became known."""
        events = [self._event(request, None) for request in self._ended_on_arrival]
        self._ended_on_arrival.clear()
        start_s = time.perf_counter()
        plan = self._scheduler.schedule()
        lag = 0
        if not plan.is_empty:
            self._pending.append(self._launch(plan, start_s))
            lag = self._lag
        assert self._pending or events or not self._requests, "requests are waiting and the scheduler planned nothing"
        while len(self._pending) > lag:
            events += self._commit(*self._pending.popleft())
        return events

    def _launch(self, plan: StepPlan, start_s: float) -> tuple[LaunchedStep, StepRecord]:
        for item in plan.prefill:
            if item.request.first_scheduled_s is None:
                item.request.first_scheduled_s = start_s
        launched = self._runner.launch(plan)
        route, num_decode = launched.route, len(plan.decode)
        if route.reason == ABOVE_LARGEST_BUCKET:
            self._warn_once("batches above the largest bucket ran eager; their steps are counted under the reason "
                            "above_largest_bucket")
        record = StepRecord(
            step=self._num_steps, start_s=start_s, end_s=start_s, phase="decode" if plan.decode else "prefill",
            path=route.path, reason=route.reason, num_requests=len(plan.requests),
            num_tokens=num_decode + sum(item.num_tokens - item.num_cached_tokens for item in plan.prefill),
            bucket=route.bucket, num_padded_rows=route.bucket - num_decode if route.bucket else 0,
            num_waiting=self._scheduler.num_waiting, num_running=self._scheduler.num_running,
            num_used_blocks=self._allocator.num_used, num_cached_blocks=self._allocator.num_cached,
            num_preempted=len(plan.preempted))
        self._num_steps += 1
        return launched, record

    def _commit(self, launched: LaunchedStep, record: StepRecord) -> list[TokenEvent]:
        token_ids = launched.token_ids()
        now_s = time.perf_counter()
        kept = self._scheduler.commit(launched.plan, token_ids, self._read_token)
        self.records.steps.append(replace(record, end_s=now_s))
        for request in kept:
            request.token_times_s.append(now_s)
        return [self._event(request, request.token_ids[-1]) for request in kept]

    def _read_token(self, request: Request) -> str | None:
        """Take in a request's newest token, text included; returns the finish reason if the request ends with it."""
        text, token_id = self._texts.get(request.request_id), request.token_ids[-1]
        if token_id in self._eos_token_ids and not request.params.ignore_eos:
            return "stop"
        if text is not None:
            self._new_text[request.request_id] = text.push(token_id)
            if text.stopped:
                return "stop"
        return None

    def _event(self, request: Request, token_id: int | None) -> TokenEvent:
        new_text = self._new_text.pop(request.request_id, "")
        if request.is_finished:
            if request.request_id in self._texts:
                new_text += self._texts[request.request_id].flush()
            self._retire(request)
        return TokenEvent(request.request_id, token_id, new_text, request.finish_reason, request.error)

    def _retire(self, request: Request) -> None:
        """Record a request that has ended and forget it."""
        assert request.finish_reason is not None
        del self._requests[request.request_id]
        self._texts.pop(request.request_id, None)
        self._new_text.pop(request.request_id, None)
        self.records.requests.append(RequestRecord(
            request.request_id, request.arrival_s, request.first_scheduled_s, tuple(request.token_times_s),
            request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens, request.num_preemptions,
            request.num_recomputed_tokens, request.finish_reason, request.error))

    def _warn_once(self, message: str) -> None:
        if message not in self.records.warnings:
            self.records.warnings.append(message)
            log.warning(message)

    def probe(self) -> DecodeProbe:
        """Synthetic decode steps on this engine. Raises ValueError while requests are unfinished.

        A probe overwrites the KV cache, so cached prefixes are forgotten; it may be used until a request is added.
        """
        self._check_open()
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests are unfinished, and a probe would overwrite their KV")
        self.reset_prefix_cache()
        return self._parts.make_probe()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, so that what follows is computed as if for the first time."""
        self._allocator.reset_prefix_cache()

    def start_measurement(self) -> None:
        """Forget records, cached prefixes and the memory peak: what follows is measured as if it came first."""
        self.reset_prefix_cache()
        self.records.clear()
        self._parts.book.close_warm_up()

    def memory_snapshot(self) -> dict[str, int]:
        """Bytes in use now and at the peak, as the device reports them."""
        return self._parts.gauge.snapshot()

    def memory_ledger(self) -> MemoryLedger:
        """Device memory by part: each phase of start-up, and where the device tells it the peak since then, or since
        `start_measurement`."""
        return self._parts.ledger()


def _output(request: Request, text: str) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(request.request_id, request.prompt_token_ids, request.output_token_ids, text,
                         request.finish_reason, request.error)
