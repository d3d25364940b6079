"""Checks of decode steps that run on any device."""

from dataclasses import replace
from itertools import groupby

import torch

from engine import Engine, EngineConfig, GraphConfig, SamplingParams

GARBAGE_BLOCK = 2**30


def check_padding_is_inert(engine: Engine, num_live: int, size: int, context_len: int) -> None:
    """NaN in every slot that no live row owns, garbage in the block tables of padding rows: nothing changes."""
    probe = engine.probe()
    probe.fill(num_live, size, context_len, is_mixed=True)
    step, caches = probe.step, probe.step.caches
    state, static = step.rows.state, step.static
    saved = [column.clone() for column in vars(state).values()]
    probe.eager()
    synchronize(state.position_N)
    expected = static.logits_RV[:num_live].clone(), static.tokens_R[:num_live].clone()
    for column, before in zip(vars(state).values(), saved, strict=True):
        column.copy_(before)
    live_slots = poison_other_slots(caches, state, num_live)
    static.step(size).block_tables_RB[num_live:] = GARBAGE_BLOCK
    synchronize(state.position_N)
    probe.replay()
    synchronize(state.position_N)
    assert torch.isfinite(expected[0]).all()
    assert torch.equal(static.logits_RV[:num_live], expected[0])
    assert torch.equal(static.tokens_R[:num_live], expected[1])
    assert state.position_N[step.rows.scratch_row] == -1, "the scratch row stays where it is"
    for cache in caches:
        for cached in (cache.keys_NSKD, cache.values_NSKD):
            is_finite = cached.isfinite().all(-1).all(-1).flatten()
            assert torch.equal(is_finite.nonzero().flatten(), live_slots), "padding wrote a slot"


def poison_other_slots(caches, state, num_live):
    """Fill every slot beyond the live contexts with NaN; returns the slots that are left, in ascending order."""
    block_size = caches[0].keys_NSKD.shape[1]
    positions, tables = state.position_N.tolist(), state.block_tables_NB.tolist()
    slots = torch.tensor(sorted(tables[row][position // block_size] * block_size + position % block_size
                                for row in range(num_live) for position in range(positions[row] + 1)))
    assert len(slots) == len(slots.unique())
    for cache in caches:
        for cached in (cache.keys_NSKD, cache.values_NSKD):
            is_live = torch.zeros(cached.shape[0] * block_size, dtype=torch.bool)
            is_live[slots] = True
            cached[~is_live.view(cached.shape[:2]).to(cached.device)] = float("nan")
    return slots.to(caches[0].keys_NSKD.device)


def check_growing_batch(config: EngineConfig, prompts: list[list[int]], ends: tuple[int, ...]) -> None:
    """Four requests, a fifth that comes later and ends earlier: buckets 4, 8, 4, and each answer as if it were alone.

    `ends` are the numbers of output tokens; answers are compared with eager execution.
    """
    params = [SamplingParams(max_tokens=end, ignore_eos=True) for end in ends]
    with Engine(replace(config, graph=replace(config.graph, mode="eager"))) as engine:
        expected = [engine.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    with Engine(config) as engine:
        tokens: dict[int, list[int]] = {}
        ids = [engine.add_request(prompt, p) for prompt, p in zip(prompts[:4], params[:4], strict=True)]
        for number in range(2 * max(ends)):
            if number == 5:
                ids.append(engine.add_request(prompts[4], params[4]))
            for event in engine.step() if engine.has_unfinished else ():
                tokens.setdefault(event.request_id, []).append(event.token_id)
        buckets = [step.bucket for step in engine.records.steps if step.phase == "decode"]
    assert [tokens[request_id] for request_id in ids] == expected
    assert [bucket for bucket, _ in groupby(buckets)] == [4, 8, 4]


def check_tiny_context(config: EngineConfig, prompts: list[list[int]], bucket: int) -> None:
    """Prompts of two tokens in contexts of five, all in one `bucket`: three tokens each, those of eager execution."""
    tiny = replace(config, model=replace(config.model, max_model_len=5),
                   scheduler=replace(config.scheduler, max_num_seqs=bucket))
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with Engine(replace(tiny, graph=GraphConfig(mode="eager"))) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    with Engine(replace(tiny, graph=replace(config.graph, buckets=[bucket]))) as engine:
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected
        assert {step.bucket for step in engine.records.steps if step.phase == "decode"} == {bucket}
    assert all(len(tokens) == 3 for tokens in expected)


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the device of `tensor`: a probe launches on the engine's own stream."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
