"""What a caller of the engine sees: texts, streams, stops, seeds, limits and refusals, on a tiny model."""

import gc
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from decode_cases import check_tiny_context
from engine import (
    Engine,
    EngineConfig,
    GraphConfig,
    KVConfig,
    ModelConfig,
    SamplerConfig,
    SamplingParams,
    SchedulerConfig,
)
from tiny_models import make_checkpoint, make_tokenizer

MAX_MODEL_LEN = 64
PROMPTS = ["the quick brown fox", "naïve café", "jumps over the lazy dog stop here", "日本語"]
SAMPLED = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.01, seed=11, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "qwen3", vocab_size=320)
    make_tokenizer(directory)
    return directory


@pytest.fixture
def config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=str(checkpoint), max_model_len=MAX_MODEL_LEN), device="cpu",
                        scheduler=SchedulerConfig(max_num_seqs=4), kv=KVConfig(tokens=1024, block_size=16))


def test_a_stream_is_the_generated_text_in_pieces(config):
    params = SamplingParams(max_tokens=20)
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, params)
        texts, tokens, endings = defaultdict(str), defaultdict(list), {}
        for event in engine.stream(PROMPTS, params):
            texts[event.request_id] += event.text
            tokens[event.request_id].append(event.token_id)
            if event.finish_reason:
                endings[event.request_id] = event.finish_reason
        decoded = [engine.tokenizer.decode(output.token_ids) for output in outputs]
    assert [texts[key] for key in sorted(texts)] == [output.text for output in outputs] == decoded
    assert [tokens[key] for key in sorted(tokens)] == [output.token_ids for output in outputs]
    assert [endings[key] for key in sorted(endings)] == [output.finish_reason for output in outputs]


def test_a_request_ends_at_the_first_stop_string_and_without_it(config):
    with Engine(config) as engine:
        whole = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=30, ignore_eos=True))[0].text
        stop = whole[8:11]
        output = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))[0]
    assert output.finish_reason == "stop"
    assert output.text == whole[:whole.index(stop)]


def test_a_request_ends_at_an_end_of_sequence_token_unless_told_otherwise(config, checkpoint, tmp_path):
    with Engine(config) as engine:
        tokens = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    copy = tmp_path / "model"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "generation_config.json").write_text(f'{{"eos_token_id": [1, {tokens[5]}]}}')
    with Engine(replace(config, model=replace(config.model, path=str(copy)))) as engine:
        stopped = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=12))[0]
        ignoring = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert stopped.token_ids == tokens[:tokens.index(tokens[5]) + 1] and stopped.finish_reason == "stop"
    assert ignoring.token_ids == tokens and ignoring.finish_reason == "length"


@pytest.mark.parametrize("changes", [
    {}, {"graph": GraphConfig(mode="eager")}, {"graph": GraphConfig(buckets=[2, 3])},
    {"scheduler": SchedulerConfig(max_num_seqs=4, overlap=True)}, {"kv": KVConfig(num_blocks=5, block_size=16)},
], ids=["graph", "eager", "few buckets", "overlap", "preemption"])
def test_sampled_tokens_do_not_depend_on_company_path_or_preemption(config, changes):
    with Engine(config) as engine:
        alone = engine.generate(PROMPTS[:1], SAMPLED)[0].token_ids
    with Engine(replace(config, **changes)) as engine:
        for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:2]):
            outputs = engine.generate(prompts, SAMPLED)
            assert outputs[prompts.index(PROMPTS[0])].token_ids == alone


def test_requests_without_a_seed_differ_and_runs_repeat(config):
    free = replace(SAMPLED, seed=None)
    runs = []
    for seed in (0, 0, 1):
        with Engine(replace(config, sampler=SamplerConfig(seed=seed))) as engine:
            runs.append([output.token_ids for output in engine.generate(PROMPTS[:1] * 3, free)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_temperature_zero_is_greedy(config):
    """nano-vllm issue 249: a temperature of 0 was refused."""
    with Engine(config) as engine:
        greedy, again = (engine.generate(PROMPTS, SamplingParams(temperature=0.0, seed=seed)) for seed in (1, 2))
    assert [output.token_ids for output in greedy] == [output.token_ids for output in again]


@pytest.mark.parametrize(("num_prompt", "max_tokens", "num_output"), [
    (MAX_MODEL_LEN, 5, 0), (MAX_MODEL_LEN - 1, 2, 1), (MAX_MODEL_LEN - 3, 100, 3), (10, 5, 5)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_stops_at_the_context_limit(config, num_prompt, max_tokens, num_output, overlap):
    """nano-vllm issues 106 and 190: a prompt of max_model_len overran the block table."""
    with Engine(replace(config, scheduler=SchedulerConfig(max_num_seqs=4, overlap=overlap))) as engine:
        output = engine.generate([[5] * num_prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]
    assert len(output.token_ids) == num_output
    assert output.finish_reason == "length"


def test_a_request_that_can_never_fit_is_refused_with_the_sum_and_others_finish(config):
    """nano-vllm issue 274: one request larger than the cache ended everything."""
    with Engine(replace(config, kv=KVConfig(num_blocks=2, block_size=16))) as engine:
        small, large, empty, long = engine.generate([[1] * 10, [1] * 40, [], [1] * 100],
                                                    SamplingParams(max_tokens=8, ignore_eos=True))
    assert small.finish_reason == "length" and len(small.token_ids) == 8
    assert large.finish_reason == empty.finish_reason == long.finish_reason == "rejected"
    assert large.error == ("needs 3 KV blocks of 16 tokens (47 tokens: prompt 40 + output 8 - 1) but the cache has 2")
    assert "empty" in empty.error and "model.max_model_len is 64" in long.error


def test_max_num_seqs_bounds_the_requests_that_hold_memory(config):
    """nano-vllm issue 265: ten prompts with max_num_seqs 2 held KV all at once."""
    with Engine(replace(config, scheduler=SchedulerConfig(max_num_seqs=2))) as engine:
        outputs = engine.generate([[number + 3] * 9 for number in range(10)], SamplingParams(max_tokens=4))
        assert max(step.num_running for step in engine.records.steps) == 2
    assert all(output.token_ids for output in outputs)


def test_an_abandoned_stream_leaves_the_engine_as_it_was(config):
    with Engine(config) as engine:
        expected = engine.generate(PROMPTS, SAMPLED)
        for event in engine.stream(PROMPTS, SAMPLED):
            assert event.finish_reason is None
            break
        assert not engine.has_unfinished
        again = engine.generate(PROMPTS, SAMPLED)
        reasons = [record.finish_reason for record in engine.records.requests]
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]
    assert reasons.count("aborted") == len(PROMPTS)


@pytest.mark.parametrize(("prompts", "params", "message"), [
    ("one text", None, "must be a list"),
    (None, None, "must be a list"),
    ([1, 2, 3], None, "a prompt must be text or a list of token ids; got 1"),
    ([[1]], [{"max_tokens": 3}], "params must be SamplingParams"),
    ([[1, 320]], None, r"in \[0, 319\]; got 320"),
    ([[1, -1]], None, "got -1"),
    ([[1]], [SamplingParams()] * 2, "got 2 for 1 prompts"),
])
def test_what_a_caller_gets_wrong_is_refused_before_anything_runs(config, prompts, params, message):
    with Engine(config) as engine:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, params)
        assert not engine.has_unfinished


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": -1}, "top_k"),
    ({"top_k": 2**31}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"), ({"stop": "text"}, "stop"), ({"stop": ("",)}, "stop"), ({"seed": -1}, "seed")])
def test_sampling_parameters_out_of_range_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


def test_replay_uses_the_captured_buffers_and_nothing_of_the_caller(config):
    """A graph knows addresses: what the step was assembled from may change once it has been written."""
    with Engine(config) as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8))]
        replay = engine._runner.graphs.replay

        def replay_after_overwriting(size):
            for host in engine._runner.decode_step.static._host:
                host.fill_(-7)
            return replay(size)

        engine._runner.graphs.replay = replay_after_overwriting
        again = [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8))]
    assert again == expected


@pytest.mark.parametrize("mode", ["full", "eager"])
def test_a_closed_engine_gives_its_model_back_and_takes_no_requests(config, mode):
    gc.collect()
    gc.disable()  # what is freed without the collector is freed when close returns
    try:
        engine = Engine(replace(config, graph=GraphConfig(mode=mode)))
        engine.generate(PROMPTS, SAMPLED)
        decoder = weakref.ref(engine._runner.decode_step.decoder)
        engine.close()
        engine.close()
        assert decoder() is None
    finally:
        gc.enable()
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match="closed"):
            call(PROMPTS)


def test_a_stream_that_is_never_read_holds_nothing(config):
    with Engine(config) as engine:
        engine.stream(PROMPTS, SAMPLED)
        assert not engine.has_unfinished
        assert all(output.token_ids for output in engine.generate(PROMPTS, SAMPLED))


def test_a_compiled_sampler_repeats_with_its_seed(config):
    free = replace(SAMPLED, seed=None, max_tokens=4)
    runs = []
    for seed in (3, 3, 4):
        with Engine(replace(config, sampler=SamplerConfig(impl="compiled", seed=seed))) as engine:
            runs.append([output.token_ids for output in engine.generate(PROMPTS, free)])
    assert runs[0] == runs[1] != runs[2]


def test_a_large_bucket_serves_a_tiny_context(config):
    """vLLM issue 53658: a tiny max_model_len with a large capture size overran the block table."""
    check_tiny_context(config, [[number + 3, 7] for number in range(40)], bucket=64)
