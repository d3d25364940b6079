"""The ledger: every byte of the driver's figure belongs to one part, or is stated as unexplained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.book import LedgerBook
from engine.memory.ledger import LEDGER_PARTS, READY, RUN_PEAK, START, LedgerPhase, MemoryLedger
from memory_fakes import FakeGauge

LIMIT = 5000


def start_up(gauge):
    """An engine of known sizes: 200 of libraries, 40 of kernels, 1000 of weights, 2000 of KV, graphs of 70 and 30."""
    book = LedgerBook(gauge)
    with book.outside("libraries"):
        gauge.outside += 200
    with book.inside("workspaces"):
        gauge.allocated += 32
    book.close_phase("prepare")
    gauge.allocated += 1000
    book.state(weights=1000)
    book.close_phase("load")
    with book.outside("kernels"):
        gauge.outside += 40
    book.plan(kv_cache=2000, activations=500, allocator_cache=60)
    gauge.allocated += 2000
    book.state(kv_cache=2000)
    book.close_phase("allocate")
    gauge.pools += 70
    gauge.outside += 30
    book.state(graphs_outside_pool=30)
    book.close_phase("capture")
    book.close_start_up()
    return book


def test_the_parts_add_up_to_the_drivers_figure_in_every_phase():
    gauge = FakeGauge(context=300, others=100)
    ledger = start_up(gauge).ledger(LIMIT)
    assert ledger.phase_names == (START, "prepare", "load", "allocate", "capture", READY, RUN_PEAK)
    assert [phase.unexplained_bytes for phase in ledger.phases] == [0] * 7
    assert {phase.other_bytes for phase in ledger.phases} == {100}
    taken = {part: num_bytes for part, num_bytes in ledger.phase(READY).parts.items() if num_bytes}
    assert taken == {"context": 300, "libraries": 200, "kernels": 40, "weights": 1000, "workspaces": 32,
                     "kv_cache": 2000, "graph_pool": 70, "graphs_outside_pool": 30}
    assert ledger.phase(READY).process_bytes == gauge.process == 3672


def test_the_peak_of_a_run_is_told_by_part():
    gauge = FakeGauge(context=300, others=100)
    book = start_up(gauge)
    gauge.peak = (gauge.allocated + gauge.pools + 450, gauge.reserved_bytes() + 520)
    peak = book.ledger(LIMIT).phase(RUN_PEAK)
    assert peak.parts["activations"] == 450 and peak.parts["allocator_cache"] == 70
    assert peak.process_bytes == gauge.process + 520 and peak.unexplained_bytes == 0


def test_an_overrun_is_the_most_of_any_phase_and_unused_is_what_planned_activations_leave():
    gauge = FakeGauge(context=300, others=100)
    book = start_up(gauge)
    used = gauge.used_bytes()  # 3772, and 560 are planned for a step
    assert book.ledger(used + 560 + 7).unused_bytes == 7
    assert book.ledger(used + 560 - 7).unused_bytes == 0
    gauge.peak = (gauge.allocated + gauge.pools + 600, gauge.reserved_bytes() + 600)
    assert book.ledger(used + 560).overrun_bytes == 40
    assert book.ledger(None).overrun_bytes is book.ledger(None).unused_bytes is None


def test_kernels_of_a_warm_up_are_kernels_and_the_peak_counts_anew():
    gauge = FakeGauge()
    book = start_up(gauge)
    gauge.outside += 8
    gauge.peak = (10**6, 10**6)
    book.close_warm_up()
    peak = book.ledger(LIMIT).phase(RUN_PEAK)
    assert peak.parts["kernels"] == 48 and peak.parts["activations"] == 0 and peak.unexplained_bytes == 0


def test_what_an_earlier_engine_left_is_told_apart():
    gauge = FakeGauge(context=300)
    gauge.outside += 25
    gauge.allocated += 50
    ledger = start_up(gauge).ledger(LIMIT)
    assert ledger.phase(START).parts["before_start"] == 75
    assert ledger.unexplained_bytes == 0


def test_a_driver_that_tells_no_figure_explains_nothing():
    ledger = start_up(FakeGauge(context=0, source="none")).ledger(LIMIT)
    assert ledger.unexplained_bytes is None and {phase.process_bytes for phase in ledger.phases} == {None}


parts = st.fixed_dictionaries(dict.fromkeys(LEDGER_PARTS, st.integers(0, 1000)))
phases = st.builds(LedgerPhase, phase=st.just(READY), parts=parts, process_bytes=st.none() | st.integers(0, 12_000),
                   other_bytes=st.integers(0, 500))


@given(phase=phases, limit=st.integers(1, 20_000))
def test_an_overrun_and_an_unused_byte_never_go_together(phase, limit):
    ledger = MemoryLedger(20_000, limit, "nvml", {}, (phase,))
    assert ledger.overrun_bytes == 0 or ledger.unused_bytes == 0
    assert ledger.overrun_bytes - ledger.unused_bytes == phase.used_bytes - limit
    if phase.process_bytes is not None:
        assert phase.explained_bytes + phase.unexplained_bytes == phase.process_bytes


def test_the_phase_of_an_unknown_name_is_an_error():
    with pytest.raises(KeyError, match="run_peak"):
        MemoryLedger(1, 1, "nvml", {}, ()).phase(RUN_PEAK)
