"""From what a caller asks to requests: tokenizes, checks, numbers and seeds. Nothing wrong gets past here."""

import time
from collections.abc import Sequence

from engine.config import SamplerConfig
from engine.request import Request, SamplingParams
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that different request numbers give different seeds


class Intake:
    """Makes requests, numbered in the order in which they come. `defaults` serves those that state no parameters."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int,
                 sampler: SamplerConfig) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._seed = sampler.seed
        self.defaults = SamplingParams(temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p,
                                       min_p=sampler.min_p)
        self._num_requests = 0

    def requests(self, prompts: Sequence[Prompt], params: Params) -> list[Request]:
        """A request for each prompt, with one set of parameters for all or one for each. ValueError makes none."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts must be a list of prompts; got {prompts!r}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.defaults] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params must be one for all prompts or one for each; got {len(params)} for "
                             f"{len(prompts)} prompts")
        checked = [(self._token_ids(prompt), self._checked(one)) for prompt, one in zip(prompts, params, strict=True)]
        return [self._request(token_ids, one, time.perf_counter()) for token_ids, one in checked]

    def request(self, prompt: Prompt, params: SamplingParams | None, arrival_s: float | None) -> Request:
        """One request; `arrival_s` is on time.perf_counter's clock, now when None."""
        params = self._checked(params or self.defaults)
        return self._request(self._token_ids(prompt), params, time.perf_counter() if arrival_s is None else arrival_s)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer and this model has none; give token ids")
            return self._tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise ValueError(f"a prompt must be text or a list of token ids; got {prompt!r}")
        token_ids = [*prompt]
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise ValueError(f"prompt token ids must be integers in [0, {self._vocab_size - 1}]; got {token_id!r}")
        return token_ids

    def _checked(self, params: SamplingParams) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams; got {params!r}")
        if params.stop and self._tokenizer is None:
            raise ValueError(f"SamplingParams.stop={params.stop} needs a tokenizer and this model has none")
        return params

    def _request(self, prompt_token_ids: list[int], params: SamplingParams, arrival_s: float) -> Request:
        request_id = self._num_requests
        self._num_requests += 1
        derived_seed = (self._seed + (request_id + 1) * SEED_STRIDE) % 2**63
        return Request(request_id, prompt_token_ids, params, seed=derived_seed if params.seed is None else params.seed,
                       max_total_tokens=min(len(prompt_token_ids) + params.max_tokens, self._max_model_len),
                       arrival_s=arrival_s)
