"""What is printed and summarised says what the results hold, for runs that finished and runs that failed."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from engine.records import BucketRecord, ParityRecord
from experiments.memory_report import memory_table
from experiments.messages import Answer, Failed
from experiments.report import (
    MAX_ANSWERS,
    MAX_ROWS,
    first_line,
    format_value,
    order_text,
    parity_text,
    print_run,
    rows_table,
)
from experiments.result import write_result
from experiments.sweep import collect, differing_overrides, failures, shown_metrics, summary_table, write_summary
from run_records import make_finished, make_ledger, make_result, make_startup


def printed(*parts):
    console = Console(file=io.StringIO(), width=200)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def report(result, outcome, directory):
    console = Console(file=io.StringIO(), width=200)
    print_run(console, result, outcome, directory)
    return console.file.getvalue()


def make_sweep(directory):
    """Two points that finished and one that failed, in this order of time, and one that left no result."""
    finished = make_finished()
    at = "2026-01-01T00:00:0{}+00:00".format
    results = [make_result(finished, overrides=["model=tiny", "graph.buckets=pow2"], started_at=at(1)),
               make_result(finished, overrides=["model=tiny", "graph.buckets=[1,2]"], started_at=at(2)),
               make_result(overrides=["model=tiny"], reason="out of memory", started_at=at(3))]
    for name, result in zip("201", results, strict=True):
        (directory / name).mkdir(parents=True)
        (directory / name / "config.yaml").touch()
        write_result(directory / name, result)
    (directory / "3").mkdir()
    (directory / "3" / "config.yaml").touch()
    return directory


@pytest.mark.parametrize(("value", "unit", "text"), [
    (1536, "bytes", "0.0 MiB"), (5 << 20, "bytes", "5.0 MiB"), (3 << 30, "bytes", "3.00 GiB"),
    (0.125, "share", "12.5%"), (1234567, "tokens", "1,234,567"), (12.345, "ms", "12.35 ms"),
    (23456.7, "tokens/s", "23,457 tokens/s"), (None, "ms", "-"),
])
def test_numbers_are_written_for_a_person(value, unit, text):
    assert format_value(value, unit) == text


@pytest.mark.parametrize(("text", "line"), [
    ("  Paris.\n", "Paris."), ("\n\nParis.\nIt lies", "Paris.…"), ("a" * 12, "aaaaaaaaa…"), ("", ""),
])
def test_an_answers_first_line_shows_that_it_goes_on(text, line):
    assert first_line(text, 10) == line


def test_a_finished_run_shows_answers_tables_warnings_and_places(tmp_path):
    finished = make_finished(warnings=("a batch ran eager",))
    tracker = {"mode": "offline", "why": "no key was found", "location": "outputs/wandb/offline-run-1"}
    text = report(make_result(finished, tracker=tracker), finished, tmp_path)
    for expected in ("prompt [0]", "answer 0…", "output tokens a second", "TTFT", "kv cache", "weights",
                     "warning: a batch ran eager", str(tmp_path), "offline-run-1 (offline: no key was found)",
                     "no GPU was found"):
        assert expected in text


def test_the_graphs_of_a_run_are_told_with_cost_order_parity_and_use(tmp_path):
    startup = make_startup(
        buckets=(BucketRecord(1, 0.1, 0.2, 1 << 20, 3 << 20, num_nodes=310, num_kernels=300, replay_ms=1.5),
                 BucketRecord(4, 0, 0, 0, 0, num_nodes=9, num_kernels=8, replay_ms=2.0)),
        parity=(ParityRecord(1, 1, 0.0, 0, True), ParityRecord(4, 3, 0.25, 1, False)), disabled_buckets=(4,))
    finished = replace(make_finished(), startup=startup)
    lines = report(make_result(finished), finished, tmp_path).splitlines()
    for label, said in {"buckets": "2: 1 to 4", "what they record": "body, replay emulated",
                        "captured": "largest first", "warm-up and capture": "0.30 s",
                        "bytes inside the pool": "1.0 MiB",
                        "bytes outside torch's allocator": "3.0 MiB",
                        "kernels in a replay": "300 of the smallest, 8 of the largest",
                        "parity with eager": "2 batches compared, 1 failed, largest difference 0.25", "disabled": "4",
                        "steps, graph: captured": "4", "steps, eager: prefill": "1"}.items():
        assert any(line.strip().startswith(label) and said in line for line in lines), label


@pytest.mark.parametrize(("sizes", "text"), [
    ((4, 2, 1), "largest first"), ((1, 2, 4), "smallest first"), ((2, 4, 1), "2, 4, 1"),
    ((2, 1, *range(3, 20)), "2, 1, 3, 4, 5, 6, 7, 8, …"),
])
def test_a_capture_order_has_a_name_where_there_is_one(sizes, text):
    assert order_text(sizes) == text


@pytest.mark.parametrize(("differences", "text"), [
    ([0.0, 0.0], "2 batches compared, 0 failed, equal bit for bit"),
    ([0.5, None], "2 batches compared, 2 failed, largest difference 0.5, 1 not finite"),
])
def test_parity_is_told_with_its_worst(differences, text):
    assert parity_text([ParityRecord(4, 3, value, 0, value == 0) for value in differences]) == text


def test_decode_steps_by_batch_size_are_shown_where_they_are_what_was_measured(tmp_path):
    finished = make_finished()
    ladder = {"workload": {"kind": "ladder"}}
    assert "decode batches" in report(make_result(finished, config=ladder), finished, tmp_path)
    assert "decode batches" not in report(make_result(finished), finished, tmp_path)


def test_a_long_table_is_cut_and_says_where_the_rest_is():
    rows = [{"size": number, "pool_bytes": None if number else 1 << 20, "ms": 0.12345, "name": "[x]"}
            for number in range(MAX_ROWS + 3)]
    text = printed(rows_table("some_costs", rows))
    assert "and 3 more in tables/some_costs.csv" in text
    assert "some costs" in text and "1.0 MiB" in text and "0.1235" in text and "[x]" in text


def test_a_rejected_request_shows_why_instead_of_an_answer(tmp_path):
    finished = make_finished()
    rejected = Answer("long", (), "", "rejected", "needs 9 KV blocks but the cache has 4")
    finished = replace(finished, answers=(*finished.answers, rejected))
    assert "needs 9 KV blocks but the cache has 4" in report(make_result(finished), finished, tmp_path)


def test_many_answers_are_cut_and_their_number_is_said(tmp_path):
    finished = make_finished(num_requests=MAX_ANSWERS + 5)
    text = report(make_result(finished), finished, tmp_path)
    assert f"prompt [{MAX_ANSWERS - 1}]" in text and f"prompt [{MAX_ANSWERS}]" not in text
    assert "and 5 more" in text


def test_a_failed_run_shows_its_reason_and_its_traceback_file(tmp_path):
    text = report(make_result(reason="KeyError: [7]"), Failed("KeyError: [7]", "Traceback ..."), tmp_path)
    assert "tiny fixed failed: KeyError: [7]" in text
    assert str(tmp_path / "error.txt") in text


def test_what_the_user_got_wrong_is_shown_without_its_traceback(tmp_path):
    failed = Failed("kv.bytes must be at least 1; got 0", "Traceback ...")
    text = report(make_result(reason=failed.reason), failed, tmp_path)
    assert failed.reason in text and "Traceback" not in text


def test_points_are_collected_in_the_order_in_which_they_ran(tmp_path):
    points, without_result = collect(make_sweep(tmp_path))
    assert [point.directory.name for point in points] == ["2", "0", "1"]
    assert [run.name for run in without_result] == ["3"]


def test_only_what_differs_between_points_is_shown():
    results = [make_result(overrides=overrides) for overrides in (["a.b=1", "c=2"], ["a.b=3", "c=2"], ["c=2"])]
    assert differing_overrides(results) == [{"a.b": "1"}, {"a.b": "3"}, {"a.b": "default"}]
    assert differing_overrides(results[:1]) == [{}]
    assert differing_overrides([]) == []


def test_a_summary_has_a_row_for_every_point_also_for_one_that_failed(tmp_path):
    points, _ = collect(make_sweep(tmp_path))
    write_summary(tmp_path, points)
    summary = json.loads((tmp_path / "summary.json").read_text())
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["graph.buckets"] for row in rows] == ["pow2", "[1,2]", "default"]
    assert [row["reason"] for row in rows] == ["", "", "out of memory"]
    for row, point in zip(rows, summary["points"], strict=True):
        assert row["status"] == point["status"]
        assert {name: float(row[name]) for name in point["metrics"]} == point["metrics"]
    assert summary["units"]["throughput/output_throughput"] == "tokens/s"


def test_the_sweeps_table_shows_each_point_and_why_one_failed(tmp_path):
    points, _ = collect(make_sweep(tmp_path))
    text = printed(summary_table(tmp_path, points), *failures(points))
    assert "3 runs, 1 failed" in text
    assert "pow2" in text and "[1,2]" in text and "out of memory" in text


def test_a_sweep_without_a_finished_point_still_has_its_summary(tmp_path):
    assert "0 runs" in printed(summary_table(tmp_path, []))
    write_summary(tmp_path, [])
    assert json.loads((tmp_path / "summary.json").read_text())["points"] == []


def test_the_memory_table_sets_the_parts_against_the_driver_the_limit_and_the_plan():
    text = printed(memory_table({}, make_startup(kv_sized_by="limit")))
    rows = {" ".join(cells[:-3]): cells[-3:] for line in text.splitlines()
            if len(cells := re.split(r"\s{2,}", line.strip())) > 3}
    assert rows["activations"] == ["7.0 MiB", "0.0 MiB", "8.0 MiB"], "planned, after start-up, at the peak"
    sums = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    for row in (["sum of the parts", "19.0 MiB", "27.0 MiB"], ["this process, by its driver", "19.0 MiB", "28.0 MiB"],
                ["unexplained", "0.0 MiB", "1.0 MiB"], ["other processes", "3.0 MiB", "4.0 MiB"],
                ["overrun", "2.0 MiB"], ["unused", "1.0 MiB"], ["KV tokens", "1,024"],
                ["size of the KV cache", "all that the limit leaves"]):
        assert row in sums, text


def test_a_device_that_is_emulated_and_a_driver_without_figures_are_named():
    for source, words in (("emulated", "a CPU stands in"), ("none", "the driver reports no figure")):
        assert words in printed(memory_table({}, make_startup(ledger=replace(make_ledger(), source=source))))


def test_a_sweep_over_the_kv_cache_shows_memory_and_others_do_not():
    finished = make_finished()
    for key, shows in (("kv.policy", True), ("graph.buckets", False)):
        results = [make_result(finished, overrides=[f"{key}={value}"]) for value in ("a", "b")]
        assert ("unused" in shown_metrics(results)) is shows
