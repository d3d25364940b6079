"""Figures are drawn from records, also from few and from none, and saved as files."""

import pytest

from engine.records import EngineRecords
from experiments.plots import latency_histograms, memory_ledger, save_plots, steps_over_time
from run_records import make_finished, make_request, make_startup, make_step

PNG_SIGNATURE = b"\x89PNG"


def test_steps_over_time_show_batch_size_kv_use_and_path():
    figure = steps_over_time([make_step(0, "prefill"), make_step(1), make_step(2)], make_startup())
    batch, kv, path, _ = figure.axes
    assert list(batch.lines[0].get_ydata()) == [3, 3, 3]
    assert list(kv.lines[0].get_ydata()) == [3 / 16 * 100] * 3
    assert "replayed" in path.get_ylabel()


def test_latency_histograms_count_every_value():
    figure = latency_histograms([make_request(0, (0.1, 0.2, 0.4)), make_request(1, (0.3,))])
    num_ttft, num_itl = (sum(bar.get_height() for bar in axes.patches) for axes in figure.axes)
    assert (num_ttft, num_itl) == (2, 2)


def test_the_ledger_has_a_bar_for_what_was_measured_and_one_for_what_was_planned():
    measured, planned = memory_ledger(make_startup().ledger).axes[0].containers
    assert [bar.get_width() for bar in measured] == [10, 4]
    assert [bar.get_width() for bar in planned] == [4], "the weights were not planned"


@pytest.mark.parametrize("records", [make_finished().records, EngineRecords()])
def test_every_figure_is_saved_whatever_was_recorded(tmp_path, records):
    paths = save_plots(tmp_path / "plots", records, make_startup())
    assert len(paths) == 3
    assert all(path.read_bytes().startswith(PNG_SIGNATURE) for path in paths)
