"""Workloads send what they say: the published benchmark to the token, prompts of a file, errors with file and line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ModelConfig, SamplerConfig
from experiments.config import WORKLOADS, WorkloadConfig
from experiments.workload import WORKLOAD_KINDS, build_workload, draw_workload, phases
from run_records import make_config


@dataclass
class WordTokenizer:
    """Each message becomes one token: its length."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [len(message["content"]) for message in messages]


def text_config(path=None, **workload):
    workload = WorkloadConfig(kind="text", path=None if path is None else str(path), **workload)
    return make_config(model=ModelConfig(path="somewhere"), workload=workload)


def write_lines(path, *entries):
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def test_every_kind_that_the_schema_names_can_be_built():
    assert set(WORKLOAD_KINDS) == set(WORKLOADS)


def test_nano_vllm_bench_is_the_published_draw():
    items = build_workload(make_config(workload=WorkloadConfig(kind="nano_vllm_bench")), None, vocab_size=151_936)
    assert len(items) == 256
    assert sum(item.params.max_tokens for item in items) == 133_966
    assert sum(len(item.prompt) for item in items) == 142_827
    assert all(item.params.ignore_eos for item in items)
    assert items[0].prompt[:3] == (6311, 6890, 663), "seed 0 draws a length first, then the ids"


def test_nano_vllm_bench_refuses_a_context_that_would_cut_it():
    config = make_config(workload=WorkloadConfig(kind="nano_vllm_bench"))
    short = replace(config, model=replace(config.model, max_model_len=1024))
    with pytest.raises(ValueError, match=r"2011 tokens.*max_model_len must be at least that, got 1024"):
        draw_workload(short)


@settings(max_examples=20)
@given(st.integers(1, 600), st.integers(0, 5), st.sampled_from(["fixed", "nano_vllm_bench"]))
def test_random_ids_lie_in_the_vocabulary_and_depend_on_the_seed_alone(vocab_size, seed, kind):
    config = make_config(workload=WorkloadConfig(kind=kind, seed=seed, num_requests=3, prompt_tokens=20))
    items = build_workload(config, None, vocab_size)
    assert all(0 <= token_id < vocab_size for item in items for token_id in item.prompt)
    assert items == build_workload(config, None, vocab_size)


def test_fixed_sends_requests_of_the_stated_size():
    config = make_config(workload=WorkloadConfig(kind="fixed", num_requests=5, prompt_tokens=7, max_tokens=3))
    items = build_workload(config, None, 1000)
    assert [(len(item.prompt), item.params.max_tokens, item.params.ignore_eos) for item in items] == [(7, 3, True)] * 5
    assert len({item.prompt for item in items}) == 5


def test_a_ladder_sends_a_phase_of_equal_requests_for_each_batch_size():
    workload = WorkloadConfig(kind="ladder", batch_sizes=[1, 3, 2], prompt_tokens=7, max_tokens=4)
    sent = phases(build_workload(make_config(workload=workload), None, 1000))
    assert [len(phase) for phase in sent] == [1, 3, 2]
    items = [item for phase in sent for item in phase]
    assert [(len(item.prompt), item.params.max_tokens, item.params.ignore_eos) for item in items] == [(7, 4, True)] * 6
    assert len({item.prompt for item in items}) == 6, "no phase finds the prefixes of another in the cache"


def test_a_workload_of_one_phase_arrives_at_once():
    assert [len(phase) for phase in phases(build_workload(text_config(), WordTokenizer(), 1000))] == [16]


def test_sampling_parameters_come_from_the_sampler_and_no_two_requests_share_a_seed():
    config = make_config(sampler=SamplerConfig(temperature=0.6, top_k=5, top_p=0.9, min_p=0.1))
    params = [item.params for item in build_workload(config, None, 1000)]
    assert {(each.temperature, each.top_k, each.top_p, each.min_p) for each in params} == {(0.6, 5, 0.9, 0.1)}
    assert len({each.seed for each in params}) == len(params)


def test_the_prompts_that_ship_are_sixteen_and_answered_until_the_model_stops():
    items = build_workload(text_config(max_tokens=9), WordTokenizer(), 1000)
    assert len(items) == 16
    assert {(item.params.max_tokens, item.params.ignore_eos) for item in items} == {(9, False)}


def test_lines_of_a_file_become_conversations_with_their_own_limits(tmp_path):
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "Hi", "max_tokens": 3}, "",
                       {"messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hello"}]})
    items = build_workload(text_config(path), WordTokenizer(), 1000)
    found = [(item.prompt, item.label, item.params.max_tokens) for item in items]
    assert found == [((2,), "Hi", 3), ((3, 5), "Hello", 64)]
    assert len(build_workload(text_config(path, num_requests=1), WordTokenizer(), 1000)) == 1


@pytest.mark.parametrize(("line", "problem"), [
    ("{", "not JSON"),
    ("[]", "not a JSON object but list"),
    ({"text": "Hi"}, "unknown key 'text'"),
    ({}, "exactly one of prompt and messages"),
    ({"prompt": "a", "messages": []}, "exactly one of prompt and messages"),
    ({"messages": []}, "list of objects"),
    ({"messages": [{"role": "user"}]}, "list of objects"),
    ({"prompt": 3}, "must be text"),
    ({"prompt": ""}, "must be text"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
    ({"prompt": "a", "max_tokens": True}, "got True"),
])
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, problem):
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ValueError) as caught:
        draw_workload(text_config(path))
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert problem in str(caught.value)


def test_a_missing_or_empty_file_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"workload.path=.*missing.jsonl is not a file"):
        draw_workload(text_config(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="holds no prompt"):
        draw_workload(text_config(write_lines(tmp_path / "empty.jsonl", "")))


def test_text_without_a_tokenizer_says_what_to_choose_instead():
    with pytest.raises(ValueError, match=r"workload=text needs a tokenizer.*workload=fixed.*model.path"):
        build_workload(text_config(), None, 1000)
    with pytest.raises(ValueError, match="workload=text needs a tokenizer"):
        draw_workload(make_config(workload=WorkloadConfig(kind="text")))
