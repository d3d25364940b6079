"""Which requests a run sends.

A kind of workload is a function from the config to drafts, in a dict by name. Drafts exist before a model is loaded, so
that a wrong file or an impossible length is said at once; `bind_to_model` then turns their prompts into the model's
token ids.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from engine.request import SamplingParams
from experiments.config import Config, WorkloadConfig

DEFAULT_NUM_REQUESTS = 256  # of random workloads
RANDOM_TOKEN_IDS = 1 << 30  # `fixed` and `ladder` draw below this, far above any vocabulary; binding folds it in
NO_TOKENIZER = ("workload=text needs a tokenizer and this model has none: choose workload=fixed, or a model that comes "
                "with one (model.path=...)")


class ChatTokenizer(Protocol):
    """What a workload of text needs of the model's tokenizer."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ...


@dataclass(frozen=True)
class Conversation:
    """Messages with a role and a content each; the last is the one to answer."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Draft:
    """One request before its model is known. `prompt` is a conversation, or ids to be folded into a vocabulary.

    Requests of a phase arrive together, when all of the phase before have ended.
    """

    prompt: Conversation | tuple[int, ...]
    params: SamplingParams
    label: str
    phase: int = 0


@dataclass(frozen=True)
class WorkItem:
    """One request to send. `prompt` is in token ids; `label` is what a person reads."""

    prompt: tuple[int, ...]
    params: SamplingParams
    label: str
    phase: int = 0


def build_workload(config: Config, tokenizer: ChatTokenizer | None, vocab_size: int) -> list[WorkItem]:
    """The run's requests with prompts in token ids below `vocab_size`. ValueError for what the user can repair."""
    return bind_to_model(draw_workload(config), tokenizer, vocab_size)


def draw_workload(config: Config) -> list[Draft]:
    """The run's requests as they are before a model is known. ValueError for a bad file or an impossible length."""
    return WORKLOAD_KINDS[config.workload.kind](config)


def bind_to_model(drafts: Sequence[Draft], tokenizer: ChatTokenizer | None, vocab_size: int) -> list[WorkItem]:
    """The same requests in token ids: conversations through the chat template, ids folded into the vocabulary."""
    return [WorkItem(_token_ids(draft.prompt, tokenizer, vocab_size), draft.params, draft.label, draft.phase)
            for draft in drafts]


def phases(items: Iterable[WorkItem]) -> list[list[WorkItem]]:
    """The requests of each phase, in the order in which they are sent."""
    return [list(group) for _, group in groupby(items, key=attrgetter("phase"))]


def _token_ids(prompt: Conversation | tuple[int, ...], tokenizer: ChatTokenizer | None,
               vocab_size: int) -> tuple[int, ...]:
    if not isinstance(prompt, Conversation):
        return tuple(token_id % vocab_size for token_id in prompt)
    if tokenizer is None:
        raise ValueError(NO_TOKENIZER)
    return tuple(tokenizer.encode_chat(prompt.messages))


def _text(config: Config) -> list[Draft]:
    """Conversations from a .jsonl file, answered until the model stops."""
    if config.model.path is None:
        raise ValueError(NO_TOKENIZER)
    path = config.workload.path
    source = Path(path).expanduser() if path else files("experiments") / "data" / "prompts.jsonl"
    prompts = list(read_prompts(source))[:config.workload.num_requests]
    if not prompts:
        raise ValueError(f"workload.path={source} holds no prompt: each line must be {PROMPT_LINE}")
    drafts = []
    for number, (conversation, max_tokens) in enumerate(prompts):
        params = _sampling(config, number, max_tokens=max_tokens or config.workload.max_tokens)
        drafts.append(Draft(conversation, params, label=conversation.messages[-1]["content"]))
    return drafts


def _nano_vllm_bench(config: Config) -> list[Draft]:
    """nano-vllm's published benchmark: prompts and outputs of 100 to 1024 tokens, end-of-sequence ignored.

    The calls and their order are those of its bench.py (256 requests, seed 0), so that the very same requests are sent.
    """
    rng = random.Random(config.workload.seed)
    num_requests = config.workload.num_requests or DEFAULT_NUM_REQUESTS
    prompts = [tuple(rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))) for _ in range(num_requests)]
    output_tokens = [rng.randint(100, 1024) for _ in range(num_requests)]
    longest = max(len(prompt) + num_output for prompt, num_output in zip(prompts, output_tokens, strict=True))
    if longest > config.model.max_model_len:
        raise ValueError(f"workload.kind=nano_vllm_bench has a request of {longest} tokens of prompt and output; "
                         f"model.max_model_len must be at least that, got {config.model.max_model_len}")
    return [_random_draft(config, number, prompt, num_output)
            for number, (prompt, num_output) in enumerate(zip(prompts, output_tokens, strict=True))]


def _fixed(config: Config) -> list[Draft]:
    """Requests of one size: `prompt_tokens` random ids in, `max_tokens` out, end-of-sequence ignored."""
    workload = config.workload
    prompts = _random_prompts(workload, workload.num_requests or DEFAULT_NUM_REQUESTS)
    return [_random_draft(config, number, prompt, workload.max_tokens) for number, prompt in enumerate(prompts)]


def _ladder(config: Config) -> list[Draft]:
    """A phase of so many equal requests for each of `batch_sizes`: one process measures the decode step at each."""
    workload = config.workload
    phase_of = [phase for phase, size in enumerate(workload.batch_sizes) for _ in range(size)]
    prompts = _random_prompts(workload, len(phase_of))
    return [replace(_random_draft(config, number, prompt, workload.max_tokens), phase=phase)
            for number, (prompt, phase) in enumerate(zip(prompts, phase_of, strict=True))]


def _random_prompts(workload: WorkloadConfig, num_requests: int) -> list[tuple[int, ...]]:
    rng = random.Random(workload.seed)
    return [tuple(rng.randrange(RANDOM_TOKEN_IDS) for _ in range(workload.prompt_tokens)) for _ in range(num_requests)]


WORKLOAD_KINDS: dict[str, Callable[[Config], list[Draft]]] = {
    "text": _text,
    "nano_vllm_bench": _nano_vllm_bench,
    "fixed": _fixed,
    "ladder": _ladder,
}


def _random_draft(config: Config, number: int, prompt: tuple[int, ...], num_output_tokens: int) -> Draft:
    params = _sampling(config, number, max_tokens=num_output_tokens, ignore_eos=True)
    return Draft(prompt, params, label=f"{len(prompt)} random tokens")


def _sampling(config: Config, number: int, **limits: Any) -> SamplingParams:
    """Sampling parameters of request `number`.

    The seed is stated, because the engine would derive it from its own count of requests, which a warm-up shifts.
    """
    sampler = config.sampler
    seed = random.Random(f"{sampler.seed}/{number}").getrandbits(63)
    return SamplingParams(temperature=sampler.temperature, top_k=sampler.top_k, top_p=sampler.top_p,
                          min_p=sampler.min_p, seed=seed, **limits)


PROMPT_LINE = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, optionally with "max_tokens"'


def read_prompts(source: Path | Traversable) -> Iterator[tuple[Conversation, int | None]]:
    """Conversation and output limit of each line that is not blank; errors name file and line."""
    if not source.is_file():
        raise ValueError(f"workload.path={source} is not a file")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"workload.path={source} is not text in UTF-8 (byte {error.start})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield _parse_prompt(line)
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}; a line must be {PROMPT_LINE}") from error


def _parse_prompt(line: str) -> tuple[Conversation, int | None]:
    """Conversation and output limit of one line."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"not a JSON object but {type(entry).__name__}")
    if unknown := entry.keys() - {"prompt", "messages", "max_tokens"}:
        raise ValueError(f"unknown key {min(unknown)!r}")
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("exactly one of prompt and messages must be there")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise ValueError(f"max_tokens must be a whole number of at least 1, got {max_tokens!r}")
    messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError("prompt must be text, messages a list of objects with the texts role and content")
    return Conversation(tuple(messages)), max_tokens


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.keys() == {"role", "content"} \
        and all(isinstance(text, str) and text for text in message.values())
