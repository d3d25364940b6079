"""A sweep's figures and its tables by batch size show each point once, under a label of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.launch_model import MODEL_COLUMNS, PREFILL_COLUMNS, partial_row
from experiments.launch_plots import launch_plots
from experiments.sweep import Point, batch_tables, decode_step_ms, labels, write_summary
from experiments.sweep_plots import batch_size_lines, metric_bars
from run_records import make_finished, make_result

PNG_SIGNATURE = b"\x89PNG"
LADDER = {"workload": {"kind": "ladder", "batch_sizes": [1, 8]}}


def decode_row(batch_size: int, step_ms: float, num_steps: int = 100, path: str = "graph") -> dict:
    return {"batch_size": batch_size, "path": path, "reason": "captured", "bucket": batch_size,
            "num_steps": num_steps, "num_padded_rows": 0, "step_ms_p50": step_ms}


def ladder_result(scope: str, *rows: dict):
    return make_result(make_finished(), overrides=["workload=ladder", f"graph.scope={scope}"], config=LADDER,
                       tables={"decode_batches": list(rows)})


@given(st.lists(st.sampled_from(["a.b=1", "a.b=2", "c=3"]), max_size=3).flatmap(
    lambda overrides: st.lists(st.just(overrides), min_size=1, max_size=3)))
def test_no_two_points_share_a_label(overrides):
    results = [make_result(overrides=each) for each in overrides]
    assert len(set(labels(results))) == len(results)


def test_a_label_says_what_differs_and_stays_short():
    results = [make_result(overrides=[f"graph.buckets={value}", "x=1"]) for value in ("pow2", [*range(90)])]
    short, long = labels(results)
    assert short == "buckets=pow2" and len(long) == 60 and long.endswith("…")


def test_the_decode_step_of_a_batch_size_is_that_of_most_of_its_steps():
    result = ladder_result("body", decode_row(1, 9.0, num_steps=1, path="eager"), decode_row(1, 2.0),
                           decode_row(5, 3.0), decode_row(8, 4.0))
    assert decode_step_ms(result) == {1: 2.0, 8: 4.0}, "5 is no batch size of the ladder"
    assert decode_step_ms(make_result(make_finished())) == {}


def test_a_ladder_has_a_table_with_a_column_for_each_batch_size(tmp_path):
    points = [Point(tmp_path / "0", ladder_result("body", decode_row(1, 2.0), decode_row(8, 4.0))),
              Point(tmp_path / "1", ladder_result("step", decode_row(1, 1.5))),
              Point(tmp_path / "2", make_result(overrides=["graph.scope=logits"]))]
    [table] = batch_tables(points)
    assert [column.header for column in table.columns] == ["decode step, ms, by batch size", "1", "8"]
    assert [list(column.cells) for column in table.columns[1:]] == [["2.00", "1.50", "-"], ["4.00", "-", "-"]]
    assert batch_tables(points[2:]) == [] == batch_tables([])


def test_a_summary_leaves_its_plots(tmp_path):
    points = [Point(tmp_path / "0", ladder_result("body", decode_row(1, 2.0))), Point(tmp_path / "1", make_result())]
    write_summary(tmp_path, points)
    plots = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert plots.keys() == {"summary.png", "decode.png"}
    assert all(data.startswith(PNG_SIGNATURE) for data in plots.values())


def test_bars_stand_beside_their_point_and_nothing_stands_where_there_is_no_value():
    figure = metric_bars(["a", "b"], {"peak": ("bytes", [None, 2 << 20]), "padding": ("share", [0.5, 0.25])})
    peak, padding, hidden = figure.axes
    assert [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in peak.patches] == [(pytest.approx(1), 2)]
    assert [bar.get_width() for bar in padding.patches] == [50, 25]
    assert not hidden.get_visible()
    assert [label.get_text() for label in peak.get_yticklabels()] == ["a", "b"]


def test_lines_by_batch_size_have_one_line_a_point():
    [axes] = batch_size_lines("ms", {"body": {1: 2.0, 8: 4.0}, "step": {1: 1.0}}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[2.0, 4.0], [1.0]]


def test_the_launch_model_is_drawn_with_what_there_is(tmp_path):
    cpu = {"launch_model": [partial_row(MODEL_COLUMNS, batch_size=1, eager_ms=2.0, graph_ms=1.0)],
           "prefill_launches": [partial_row(PREFILL_COLUMNS, num_tokens=16, total_ms=2.0)]}
    figures = launch_plots(cpu)
    assert figures.keys() == cpu.keys()
    assert [list(line.get_ydata()) for line in figures["launch_model"].axes[0].lines] == [[2.0], [1.0]]
    figures["prefill_launches"].savefig(tmp_path / "figure.png")
    assert launch_plots({}) == {}
