"""How large the KV cache may be: limits with one meaning each, sums that can be checked, remedies that work."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.book import LedgerBook
from engine.memory.budget import HIGHEST_ADVISED, KVBudget
from engine.memory.config import DEFAULT_CPU_KV_BYTES, KVConfig
from engine.memory.geometry import KVGeometry
from engine.records import SIZED_BY_DEFAULT, SIZED_BY_LIMIT, SIZED_BY_REQUEST, SIZED_BY_USE
from memory_fakes import FakeGauge

GEOMETRY = KVGeometry(block_size=16, bytes_per_token=2, max_model_len=64, max_num_seqs=8)  # blocks of 32 bytes


NINE_TENTHS = KVConfig(memory_fraction=0.9)


def make_budget(kv=NINE_TENTHS, geometry=GEOMETRY, gauge=None, **taken):
    """`taken`: parts of the ledger, all of them in tensors."""
    gauge = gauge or FakeGauge()
    book = LedgerBook(gauge)
    gauge.allocated += sum(taken.values())
    book.state(**taken)
    return KVBudget(kv, kv.policy == "fixed", geometry, gauge, book)


def test_a_fraction_is_of_the_devices_total_whoever_holds_the_rest():
    budget = make_budget(gauge=FakeGauge(total_bytes=10_000, context=300, others=2000), weights=500)
    budget.activation_bytes = 100
    assert budget.limit_bytes == 9000
    assert budget.available_bytes() == 9000 - 300 - 2000 - 500 - 100


def test_what_torch_has_cached_is_given_back_before_it_is_counted():
    gauge = FakeGauge()
    gauge.cached = 5000
    assert make_budget(gauge=gauge).available_bytes() == 9000 - 300


@pytest.mark.parametrize(("num_bytes", "num_blocks", "sized_by"), [
    (4 * 32, 4, SIZED_BY_LIMIT), (5 * 32 - 1, 4, SIZED_BY_LIMIT), (31 * 32, 31, SIZED_BY_LIMIT),
    (32 * 32, 32, SIZED_BY_USE), (10**9, 32, SIZED_BY_USE)])
def test_whole_blocks_and_no_more_than_all_requests_at_full_length_need(num_bytes, num_blocks, sized_by):
    assert make_budget().num_blocks(num_bytes) == (num_blocks, sized_by)


@pytest.mark.parametrize(("kv", "num_blocks"), [
    (KVConfig(policy="fixed", tokens=100), 7), (KVConfig(policy="fixed", bytes=100), 3),
    (KVConfig(policy="fixed", num_blocks=100), 100)])
def test_a_stated_size_is_taken_as_stated_also_beyond_use(kv, num_blocks):
    budget = make_budget(kv)
    assert budget.limit_bytes is None
    stated = kv.stated_bytes(GEOMETRY.block_size, GEOMETRY.block_bytes)
    assert budget.num_blocks(stated) == (num_blocks, SIZED_BY_REQUEST)


def test_the_default_of_a_cpu_is_no_more_than_can_be_used_and_needs_no_whole_request():
    kv = KVConfig(policy="fixed")
    assert make_budget(kv).num_blocks(kv.stated_bytes(16, 32)) == (32, SIZED_BY_USE)
    long = KVGeometry(block_size=16, bytes_per_token=DEFAULT_CPU_KV_BYTES // 64, max_model_len=4096, max_num_seqs=2)
    budget = make_budget(kv, long, FakeGauge(total_bytes=1 << 40))
    assert budget.num_blocks(DEFAULT_CPU_KV_BYTES) == (4, SIZED_BY_DEFAULT)


def test_one_request_of_full_length_is_the_least_and_its_last_token_is_never_stored():
    # Of 65 tokens 64 are stored: 4 blocks, where 66 would need 5.
    for max_model_len, least in ((64, 4 * 32), (65, 4 * 32), (66, 5 * 32)):
        budget = make_budget(geometry=KVGeometry(16, 2, max_model_len, 8))
        assert budget.min_bytes == least
        assert budget.num_blocks(least)[0] * 32 == least
        with pytest.raises(ValueError, match=f"model.max_model_len={max_model_len} but"):
            budget.num_blocks(least - 1)


MIB = 1 << 20
LARGE = KVGeometry(block_size=16, bytes_per_token=MIB, max_model_len=64, max_num_seqs=8)  # blocks of 16 MiB


def test_a_shortage_states_the_sum_by_part():
    gauge = FakeGauge(total_bytes=1000 * MIB, context=300 * MIB, others=100 * MIB)
    budget = make_budget(geometry=LARGE, gauge=gauge, weights=400 * MIB, static_buffers=20 * MIB)
    budget.activation_bytes, budget.expected_graph_bytes = 60 * MIB, 10 * MIB
    with pytest.raises(ValueError) as caught:
        budget.num_blocks(budget.available_bytes() - budget.expected_graph_bytes)
    assert str(caught.value).startswith("KV cache needs 64.0 MiB for one request of model.max_model_len=64 but "
                                        "10.0 MiB is left: limit 900.0 MiB of 1000.0 MiB (kv.memory_fraction), ")
    parts = dict(re.findall(r"([a-z][a-z ]+) ([\d.]+) MiB", str(caught.value).split("fraction), ")[1].split(";")[0]))
    assert parts == {"weights": "400.0", "static buffers": "20.0", "activations": "60.0", "graphs expected": "10.0",
                     "other processes": "100.0"}


fits = st.builds(KVGeometry, block_size=st.sampled_from([16, 64, 256]), bytes_per_token=st.integers(1, 50),
                 max_model_len=st.integers(2, 4096), max_num_seqs=st.integers(1, 64))


@given(data=st.data(), geometry=fits, fraction=st.floats(0.05, 1.0), others=st.integers(0, 100_000),
       activations=st.integers(0, 100_000))
def test_each_remedy_that_is_named_makes_the_cache_fit(data, geometry, fraction, others, activations):
    total, context = 10_000_000, 1000
    left = data.draw(st.integers(-100_000, geometry.blocks_per_full_request * geometry.block_bytes - 1))
    taken = int(fraction * total) - context - others - activations - left

    def budget(geometry, fraction):
        gauge = FakeGauge(total, context, others)
        made = make_budget(KVConfig(memory_fraction=fraction), geometry, gauge, weights=taken)
        made.activation_bytes = activations
        return made

    first = budget(geometry, fraction)
    assert first.available_bytes() == left
    with pytest.raises(ValueError) as caught:
        first.num_blocks(first.available_bytes())
    if remedy := re.search(r"kv\.memory_fraction=([\d.]+)", str(caught.value)):
        assert float(remedy[1]) <= HIGHEST_ADVISED
        second = budget(geometry, float(remedy[1]))
        assert second.num_blocks(second.available_bytes())[0] >= geometry.blocks_per_full_request
    if remedy := re.search(r"or model\.max_model_len=(\d+)|fit: model\.max_model_len=(\d+)", str(caught.value)):
        shorter = KVGeometry(geometry.block_size, geometry.bytes_per_token, int(remedy[1] or remedy[2]),
                             geometry.max_num_seqs)
        second = budget(shorter, fraction)
        assert second.num_blocks(second.available_bytes())[0] >= 1


def test_what_cannot_fit_is_refused_before_it_is_loaded():
    budget = make_budget(geometry=LARGE, gauge=FakeGauge(total_bytes=1000 * MIB, context=300 * MIB))
    budget.check_before_load(weights=500 * MIB, static_buffers=36 * MIB)
    with pytest.raises(ValueError, match=r"but 63\.0 MiB is left: .*weights 500\.0 MiB, static buffers 37\.0 MiB"):
        budget.check_before_load(weights=500 * MIB, static_buffers=37 * MIB)


def test_a_stated_cache_that_does_not_fit_is_refused_before_loading_with_the_tokens_that_would():
    budget = make_budget(KVConfig(policy="fixed", tokens=10_000), LARGE,
                         FakeGauge(total_bytes=1000 * MIB, context=300 * MIB))
    with pytest.raises(ValueError, match=r"stated KV cache takes 9\.77 GiB but 200\.0 MiB is free: device 1000\.0 MiB, "
                                         r"weights 500\.0 MiB; kv\.tokens=192 would fit"):
        budget.check_before_load(weights=500 * MIB)
    make_budget(KVConfig(policy="fixed", tokens=192), LARGE,
                FakeGauge(total_bytes=1000 * MIB, context=300 * MIB)).check_before_load(weights=500 * MIB)


def test_no_remedy_is_named_where_none_would_do():
    budget = make_budget(geometry=LARGE, gauge=FakeGauge(total_bytes=1000 * MIB, context=300 * MIB, others=690 * MIB))
    with pytest.raises(ValueError, match=r"other processes 690\.0 MiB$"):
        budget.num_blocks(budget.available_bytes())
