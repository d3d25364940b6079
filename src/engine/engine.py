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
from engine.records import EngineRecords, RequestRecord, StepRecord
from engine.request import Request, RequestOutput, RequestState, SamplingParams, TokenEvent
from engine.runner import LaunchedStep, ModelRunner
from engine.scheduler import make_scheduler
from engine.scheduler.plan import StepPlan
from engine.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[int]
SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that different request numbers give different seeds
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
        assembly = assemble(config, on_stage)
        self.startup, parts = assembly.record, assembly.parts
        self.tokenizer = Tokenizer.load(parts.source.directory) if parts.source.directory else None
        self.vocab_size = parts.source.architecture.vocab_size
        self._eos_token_ids = parts.source.eos_token_ids
        self._gauge = parts.gauge
        self._allocator = BlockAllocator(parts.kv_cache.num_blocks, parts.kv_cache.block_size, config.kv.prefix_cache)
        self._scheduler = make_scheduler(config.scheduler, self._allocator, config.model.max_model_len)
        self._runner = ModelRunner(parts.decoder, parts.kv_cache.layers(), parts.rows, parts.static, parts.sampler,
                                   parts.buckets, parts.graphs, parts.device)
        self._texts: dict[int, TextStream] = {}
        self._new_text: dict[int, str] = {}
        self._requests: dict[int, Request] = {}  # unfinished
        self._ended_on_arrival: list[Request] = []
        self._pending: deque[tuple[LaunchedStep, StepRecord]] = deque()  # launched, not committed
        self._num_requests = 0
        self._num_steps = 0
        if parts.buckets is not None and (gap := parts.buckets.uncovered(config.scheduler.max_num_seqs)):
            self._warn_once(gap)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the device's memory back. The engine is of no use afterwards."""
        self._pending.clear()
        self._runner.graphs = None
        self.__dict__.pop("_runner", None)
        self._gauge.trim()

    @property
    def has_unfinished(self) -> bool:
        """Whether a further step would produce something."""
        return bool(self._requests or self._pending)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
                 ) -> list[RequestOutput]:
        """Outputs in the order of `prompts` (texts or lists of token ids); `params` is one for all, or one for each.

        A prompt that can never be served comes back with finish reason `rejected` and the reason in `error`.
        """
        events: dict[int, list[TokenEvent]] = {}
        requests = self._add_all(prompts, params)
        for event in self._run_to_end(requests):
            events.setdefault(event.request_id, []).append(event)
        return [_output(request, events[request.request_id]) for request in requests]

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None,
               ) -> Iterator[TokenEvent]:
        """Tokens as they are produced, for all prompts interleaved; request ids ascend in the order of `prompts`.

        Requests that are unfinished when the consumer stops iterating are aborted.
        """
        return self._run_to_end(self._add_all(prompts, params))

    def _add_all(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
        if self._requests:
            raise ValueError(f"{len(self._requests)} earlier requests are unfinished: step() until they end, or abort() them")
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts; got one string")
        each = [params or self.default_params()] * len(prompts) if params is None or isinstance(params, SamplingParams) \
            else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one for all prompts or one for each: got {len(each)} for {len(prompts)} prompts")
        tokenized = [self._tokenize(prompt) for prompt in prompts]
        for one in each:
            self._check(one)
        return [self._add(ids, one, time.perf_counter()) for ids, one in zip(tokenized, each, strict=True)]

    def _run_to_end(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        try:
            while self.has_unfinished:
                yield from self.step()
        finally:
            for request in requests:
                self.abort(request.request_id)

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the configuration's sampler section states."""
        sampler = self.config.sampler
        return SamplingParams(temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p, min_p=sampler.min_p)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, arrival_s: float | None = None) -> int:
        """Queue a prompt for the following steps; returns its request id. `arrival_s` is on time.perf_counter's clock."""
        arrival_s = time.perf_counter() if arrival_s is None else arrival_s
        params = params or self.default_params()
        self._check(params)
        return self._add(self._tokenize(prompt), params, arrival_s).request_id

    def _check(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise ValueError(f"SamplingParams.stop={params.stop} needs a tokenizer and this model has none")

    def _tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ValueError for text without a tokenizer and for ids outside the vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer and this model has none; give token ids")
            return self.tokenizer.encode(prompt)
        ids = list(prompt)
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
                raise ValueError(f"prompt token ids must be integers in [0, {self.vocab_size - 1}]; got {token_id!r}")
        return ids

    def _add(self, prompt_token_ids: list[int], params: SamplingParams, arrival_s: float) -> Request:
        request_id = self._num_requests
        self._num_requests += 1
        derived_seed = (self.config.sampler.seed + (request_id + 1) * SEED_STRIDE) % 2**63
        request = Request(
            request_id, prompt_token_ids, params, arrival_s=arrival_s,
            seed=derived_seed if params.seed is None else params.seed,
            max_total_tokens=min(len(prompt_token_ids) + params.max_tokens, self.config.model.max_model_len))
        if self.tokenizer is not None:
            self._texts[request_id] = TextStream(self.tokenizer, params.stop)
        self._requests[request_id] = request
        request.error = self._scheduler.rejection_reason(request)
        if request.error is not None:
            self._end_on_arrival(request, "rejected")
        elif request.max_total_tokens == len(prompt_token_ids):
            self._end_on_arrival(request, "length")
        else:
            self._scheduler.add(request)
        return request

    def _end_on_arrival(self, request: Request, reason: str) -> None:
        """End a request that can produce no token; the next step says so."""
        request.state, request.finish_reason = RequestState.FINISHED, reason
        self._ended_on_arrival.append(request)

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
            lag = int(self.config.scheduler.overlap)
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
        if route.reason == "above_largest_bucket":
            self._warn_once(f"a batch of {num_decode} requests is above the largest bucket and ran eager; "
                            f"such steps are counted under the reason {route.reason}")
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
        """Take in a request's newest token: its text becomes part of the stream. Returns the finish reason, if it ends."""
        text, token_id = self._texts.get(request.request_id), request.token_ids[-1]
        is_eos = token_id in self._eos_token_ids and not request.params.ignore_eos
        if text is not None and not is_eos:
            self._new_text[request.request_id] = text.push(token_id)
            if text.stopped:
                return "stop"
        return "stop" if is_eos else None

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

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, so that what follows is computed as if for the first time."""
        self._allocator.reset_prefix_cache()

    def memory_snapshot(self) -> dict[str, int]:
        """Bytes in use now and at the peak, as the device reports them."""
        return self._gauge.snapshot()


def _output(request: Request, events: Sequence[TokenEvent]) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(request.request_id, request.prompt_token_ids, request.output_token_ids,
                         "".join(event.text for event in events), request.finish_reason, request.error)
