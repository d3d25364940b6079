"""Figures are drawn from records, also from few and from none, and saved as files."""

import pytest

from engine.records import BucketRecord
from experiments import tables
from experiments.memory_plots import memory_waterfall
from experiments.plots import MIB, buckets, latency_histograms, save_plots, steps_over_time
from experiments.tables import run_tables
from run_records import make_finished, make_ledger, make_measured, make_request, make_startup, make_step

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


def test_the_waterfall_goes_from_nothing_to_what_is_in_use_part_by_part():
    whole, small = memory_waterfall(make_ledger()).axes
    names = [label.get_text() for label in whole.get_yticklabels()]
    assert names == ["context", "weights", "kv cache", "activations", "unexplained", "other processes", "device in use"]
    assert [bar.get_x() for bar in whole.patches] == [0, 5, 15, 19, 27, 28, 0]
    assert [bar.get_width() for bar in whole.patches] == [5, 10, 4, 8, 1, 4, 32]
    assert list(whole.lines[0].get_xdata()) == [30, 30], "the limit"
    measured, planned = small.containers
    assert [bar.get_width() for bar in measured] == [5, 8], "context and activations, beside the two large ones"
    assert [bar.get_width() for bar in planned] == [5, 7]


def test_buckets_show_bytes_seconds_and_replays_of_each():
    startup = make_startup(buckets=(BucketRecord(1, 0.1, 0.2, 2 * MIB, MIB), BucketRecord(4, 0.1, 0.3, MIB, None)))
    rows = tables.buckets([make_step(0), make_step(1)], startup)
    memory, seconds, replays = buckets(rows).axes
    heights = [[bar.get_height() for bar in container] for container in memory.containers]
    assert heights == [[2, 1], [1, 0]], "inside the pool, and outside"
    assert [[bar.get_y() for bar in container] for container in memory.containers] == [[0, 0], [2, 1]], "stacked"
    assert [bar.get_height() for bar in seconds.containers[1]] == [200, 300]
    assert [bar.get_height() for bar in replays.containers[0]] == [0, 2]


def test_hundreds_of_buckets_keep_readable_labels():
    startup = make_startup(buckets=tuple(BucketRecord(size, 0.1, 0.2, None, None) for size in range(1, 501)))
    *_, replays = buckets(tables.buckets([], startup)).axes
    assert len(replays.get_xticks()) <= 50


@pytest.mark.parametrize(("finished", "names"), [
    (make_finished(), {"memory", "steps", "latency", "buckets"}),
    (make_measured(), {"memory", "buckets"}),
    (make_measured(startup=make_startup(buckets=())), {"memory"}),
])
def test_every_figure_that_has_something_to_show_is_saved(tmp_path, finished, names):
    paths = save_plots(tmp_path / "plots", finished, run_tables(finished.records, finished.startup))
    assert {path.stem for path in paths} == names
    assert all(path.read_bytes().startswith(PNG_SIGNATURE) for path in paths)
