"""Every KV memory policy from start to close, against an emulated device of a stated size."""

import gc
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import Engine, EngineConfig, GraphConfig, KVConfig, ModelConfig, SamplingParams, SchedulerConfig
from engine.config import Architecture
from engine.decode_step import DecodeStep
from engine.graph import builder
from engine.graph.recorder import EmulatedRecorder
from engine.memory import emulated
from engine.memory.address_range import EmulatedAddressRange
from engine.memory.emulated import EmulatedGauge, TensorMeter
from engine.memory.ledger import READY
from engine.units import GIB, MIB

ARCHITECTURE = Architecture(
    family="qwen3", vocab_size=331, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, qk_norm=True, tie_word_embeddings=True)
CONFIG = EngineConfig(
    model=ModelConfig(architecture=ARCHITECTURE, dtype="float32", max_model_len=256), device="cpu",
    scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1024), graph=GraphConfig(buckets="pow2"))
BLOCK_BYTES = 128 * 2 * 2 * 2 * 16 * 4  # 128 tokens, 2 layers, key and value, 2 heads of 16, float32
MEASURING = ["allocate_first", "profile_then_allocate", "capture_then_allocate"]
DEVICE_BYTES, USED_BEFORE = 200 * MIB, 40 * MIB


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device of 200 MiB of which 40 are in use."""
    memory = SimpleNamespace(total=DEVICE_BYTES, available=DEVICE_BYTES - USED_BEFORE)
    monkeypatch.setattr(emulated.psutil, "virtual_memory", lambda: memory)


def limited(policy, fraction=0.24, **changes):
    return replace(CONFIG, kv=KVConfig(policy=policy, memory_fraction=fraction, **changes))


def prompts(num, longest=200):
    rng = random.Random(num)
    return [[rng.randrange(ARCHITECTURE.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def answers(config):
    with Engine(config) as engine:
        outputs = engine.generate(prompts(40), SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True))
        return [output.token_ids for output in outputs], engine.startup


def test_every_policy_gives_the_same_tokens_and_a_cache_that_its_limit_decides():
    expected, startup = answers(replace(CONFIG, kv=KVConfig(tokens=100_000), graph=GraphConfig(mode="eager")))
    assert startup.kv_policy == "fixed"
    for policy in MEASURING:
        tokens, startup = answers(limited(policy))
        assert tokens == expected, policy
        assert startup.kv_policy == policy and startup.kv_sized_by == "limit"
        assert startup.ledger.limit_bytes == 48 * MIB


@pytest.mark.parametrize("policy", MEASURING)
def test_the_sums_are_exact_where_every_tensor_is_counted(policy):
    ledger = answers(limited(policy))[1].ledger
    ready = ledger.phase(READY)
    assert ledger.source == "emulated" and ledger.unexplained_bytes == 0
    assert ready.other_bytes == USED_BEFORE
    assert ready.used_bytes + ledger.planned["activations"] <= ledger.limit_bytes
    # A range of addresses is mapped by whole granules, of which the last is not full.
    left = EmulatedAddressRange.granularity + BLOCK_BYTES if policy == "capture_then_allocate" else BLOCK_BYTES
    assert 0 <= ledger.unused_bytes < left
    assert ready.parts["weights"] > 0 and ready.parts["static_buffers"] > 0 and ledger.planned["activations"] > MIB


def test_the_order_of_the_phases_is_that_of_the_policy():
    names = {policy: answers(limited(policy))[1].ledger.phase_names for policy in MEASURING}
    assert names["allocate_first"] == ("start", "prepare", "load", "profile_forward", "allocate", "capture", "ready")
    assert names["profile_then_allocate"][3:] == ("profile_forward", "rehearse_capture", "allocate", "capture", "ready")
    assert names["capture_then_allocate"][3:] == ("profile_forward", "reserve", "capture", "allocate", "ready")


def test_the_profiled_step_is_the_worst_that_the_scheduler_can_form():
    def activations(**scheduler):
        config = replace(limited("allocate_first", fraction=0.4), scheduler=SchedulerConfig(**scheduler))
        return answers(config)[1].ledger.planned["activations"]

    # The largest prefill counts, and so do the logits of as many rows as there may be requests.
    assert activations(max_num_seqs=8, max_num_batched_tokens=2048) > activations(max_num_seqs=8,
                                                                                 max_num_batched_tokens=512)
    rows = activations(max_num_seqs=2048, max_num_batched_tokens=256)
    assert rows > activations(max_num_seqs=8, max_num_batched_tokens=256)
    assert rows >= 2048 * ARCHITECTURE.vocab_size * 4, "logits of every row, in float32"


@pytest.mark.parametrize("policy", MEASURING)
def test_a_limit_that_leaves_too_little_is_refused_with_the_sum_before_weights_are_loaded(policy):
    stages = []
    with pytest.raises(ValueError, match=r"KV cache needs 128\.0 KiB|KV cache needs .* for one request of "
                                         r"model\.max_model_len=256 but -\d.* is left: limit 39\.\d MiB of 200\.0 MiB "
                                         r"\(kv\.memory_fraction\), weights .* other processes 40\.0 MiB; would fit: "
                                         r"kv\.memory_fraction=0\.\d+$"):
        Engine(limited(policy, fraction=0.199), on_stage=stages.append)
    assert "load" not in stages


def test_a_remedy_that_was_named_is_followed_and_works():
    with pytest.raises(ValueError) as caught:
        Engine(limited("capture_then_allocate", fraction=0.202))
    named = float(str(caught.value).split("would fit: kv.memory_fraction=")[1].split()[0])
    for _ in range(3):  # what is refused before anything is loaded knows of no activations yet
        try:
            Engine(limited("capture_then_allocate", fraction=named)).close()
            break
        except ValueError as error:
            larger = float(str(error).split("would fit: kv.memory_fraction=")[1].split()[0])
            assert larger > named
            named = larger
    else:
        pytest.fail("the second remedy, which knows all parts, did not work")


class NoMemoryAbove(EmulatedRecorder):
    """Has no memory for the graphs of the sizes in `lacking`."""

    lacking: frozenset[int] = frozenset()

    def record(self, work):
        recording = super().record(work)
        if work.__closure__ is not None and self.lacking & {cell.cell_contents for cell in work.__closure__
                                                            if isinstance(cell.cell_contents, int)}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return recording


@pytest.fixture
def lacking(monkeypatch):
    monkeypatch.setattr(builder, "make_recorder", lambda *args, **kwargs: NoMemoryAbove())

    def choose(*sizes):
        monkeypatch.setattr(NoMemoryAbove, "lacking", frozenset(sizes))
    return choose


@pytest.mark.parametrize("policy", MEASURING)
def test_memory_that_ends_during_capture_is_told_by_part(lacking, policy):
    lacking(8)
    with pytest.raises(ValueError, match=r"out of device memory during (capture|rehearse capture): limit 48\.0 MiB, "
                                         r"device 200\.0 MiB, weights .* MiB, .*other processes 40\.0 MiB$"):
        Engine(limited(policy))


def test_the_least_valuable_buckets_are_dropped_until_the_rest_fits_and_the_record_says_which(lacking):
    expected = answers(limited("allocate_first"))[0]
    lacking(4)
    tokens, startup = answers(limited("allocate_first", on_shortage="drop_buckets"))
    assert tokens == expected
    # 1 and 2 go first, whose batches lose one row and two; then 4, for which there is no memory.
    assert startup.dropped_buckets == (1, 2, 4)
    assert [record.batch_size for record in startup.buckets] == [8, 16, 32, 64]
    assert startup.capture_order == (64, 32, 16, 8)
    with Engine(limited("allocate_first", on_shortage="drop_buckets")) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert engine.records.warnings == ["kv.on_shortage=drop_buckets: no memory for the graphs of 1, 2, 4 rows; "
                                           "larger buckets stand in"]
        assert [step.bucket for step in engine.records.steps if step.phase == "decode"] == [8, 8]


def test_the_last_bucket_is_not_dropped(lacking):
    lacking(64)
    with pytest.raises(ValueError, match="out of device memory during capture"):
        Engine(limited("allocate_first", on_shortage="drop_buckets"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   RuntimeError("Triton Error [CUDA]: out of memory")])
@pytest.mark.parametrize("policy", MEASURING)
def test_a_start_that_fails_leaves_nothing(monkeypatch, policy, error):
    gauges, run = [], DecodeStep.run
    real = emulated.EmulatedGauge.__init__

    def remember(gauge):
        real(gauge)
        gauges.append(gauge)

    def fail(step, stages, *args):
        if step.caches[0].keys_NSKD.shape[0] > 1 and "body" in stages:  # not with the stand-in of the profile run
            raise error
        return run(step, stages, *args)

    monkeypatch.setattr(emulated.EmulatedGauge, "__init__", remember)
    monkeypatch.setattr(DecodeStep, "run", fail)
    with pytest.raises(ValueError, match=r"out of device memory during (capture|check parity)"):
        Engine(replace(limited(policy), graph=replace(CONFIG.graph, parity_check="all")))
    gc.collect()
    assert gauges[0].used_bytes() == USED_BEFORE, "no tensor of the failed start is alive"


@pytest.mark.parametrize("policy", [*MEASURING, "fixed"])
def test_closing_frees_all_that_was_counted(monkeypatch, policy):
    gauges = []
    monkeypatch.setattr("engine.startup.make_gauge", lambda device: gauges.append(EmulatedGauge()) or gauges[-1])
    kv = KVConfig(policy="fixed", tokens=1000) if policy == "fixed" else limited(policy).kv
    with Engine(replace(CONFIG, kv=kv)) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        assert gauges[0].used_bytes() > USED_BEFORE
    del engine
    gc.collect()
    assert gauges[0].used_bytes() == USED_BEFORE


def test_the_meter_counts_a_storage_once_until_it_is_freed():
    meter = TensorMeter()
    with meter:
        x = torch.zeros(256, dtype=torch.float32)
        views = x.view(16, 16)[3], x[:7]
        assert meter.num_bytes == 1024
        y = x + 1
        assert meter.num_bytes == 2048
        del y
        assert meter.num_bytes == 1024 and meter.peak_bytes == 2048
        del x
        assert meter.num_bytes == 1024, "a view holds the storage"
    uncounted = torch.zeros(999)
    assert meter.num_bytes == 1024
    del views, uncounted
    assert meter.num_bytes == 0


def test_an_emulated_range_counts_what_is_mapped_by_granules_and_has_an_end():
    gauge = EmulatedGauge()
    addresses = EmulatedAddressRange(1 * GIB, gauge)
    assert gauge.used_bytes() == USED_BEFORE
    addresses.map_up_to(3 * MIB)
    addresses.map_up_to(2 * MIB)
    assert addresses.mapped_bytes == 4 * MIB and gauge.used_bytes() == USED_BEFORE + 4 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="emulated device"):
        addresses.map_up_to(512 * MIB)
    assert addresses.mapped_bytes == 4 * MIB
    addresses.close()
    addresses.close()
    assert gauge.used_bytes() == USED_BEFORE
