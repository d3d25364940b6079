"""A run's files can be read back, hold what every reported number is made from, and are never half written."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from engine.config import GraphConfig, ModelConfig
from experiments.config import RunConfig, WorkloadConfig
from experiments.messages import Failed
from experiments.metrics import METRICS, compute_metrics
from experiments.naming import MAX_NAME_CHARS, run_name
from experiments.result import from_json, read_result, to_json, write_json, write_result
from experiments.run_files import read_requests, read_steps, write_config, write_failure, write_finished
from run_records import make_config, make_finished, make_measured, make_result, make_startup


@pytest.mark.parametrize("result", [make_result(make_finished()), make_result(make_measured()),
                                    make_result(reason="KeyError: 'x'", sweep="s")])
def test_a_result_reads_back_as_it_was_written(tmp_path, result):
    write_result(tmp_path, result)
    assert read_result(tmp_path) == result


def test_metrics_carry_unit_and_definition_into_the_file():
    written = to_json(make_result(make_finished()))
    assert written["schema_version"] == 2
    for name, entry in written["metrics"].items():
        assert (entry["unit"], entry["definition"]) == (METRICS[name].unit, METRICS[name].definition)


@pytest.mark.parametrize(("change", "problem"), [
    ({"schema_version": 1}, "schema_version must be 2; got 1"),
    ({"status": "done"}, "status must be finished or failed; got 'done'"),
    ({"reason": "why"}, "a finished one has none"),
    ({"extra": 1}, "keys missing or unknown: extra"),
    ({"metrics": {"throughput/duration_s": {"value": "1"}}}, "metrics.throughput/duration_s.value must be a number"),
    ({"config": None}, "config must be an object"),
    ({"tables": []}, "tables must be an object"),
])
def test_a_file_of_another_shape_is_refused_by_name(tmp_path, change, problem):
    write_json(tmp_path / "result.json", {**to_json(make_result(make_finished())), **change})
    with pytest.raises(ValueError, match=r"result\.json: ") as caught:
        read_result(tmp_path)
    assert problem in str(caught.value)


def test_a_missing_key_is_named():
    data = to_json(make_result(make_finished()))
    del data["seconds"]
    with pytest.raises(ValueError, match="missing or unknown: seconds"):
        from_json(data)


def test_a_value_that_json_does_not_have_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"value": 1})
    with pytest.raises(ValueError):
        write_json(path, {"value": float("nan")})
    assert json.loads(path.read_text()) == {"value": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("num_steps", [1, 7])
def test_every_metric_can_be_recomputed_from_the_files(tmp_path, num_steps):
    finished = make_finished(num_steps)
    write_finished(tmp_path, finished, {})
    steps, requests = read_steps(tmp_path), read_requests(tmp_path)
    assert (steps, requests) == (finished.records.steps, finished.records.requests)
    assert compute_metrics(steps, requests, finished.startup, finished.memory) == make_result(finished).metrics


def test_a_run_without_a_step_has_its_files_all_the_same(tmp_path):
    finished = make_finished()
    finished.records.steps.clear()
    write_finished(tmp_path, finished, {})
    assert read_steps(tmp_path) == []


def test_tables_are_files_with_the_columns_of_their_rows(tmp_path):
    finished = make_measured()
    write_finished(tmp_path, finished, {**finished.tables, "empty": []})
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["launch_cost.csv"]
    assert (tmp_path / "tables" / "launch_cost.csv").read_text().splitlines() == [
        "empty_kernel,launch_us", "torch,4.25", "triton,"]


def test_a_relative_path_is_saved_as_what_it_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "prompts", "run"):
        (tmp_path / name).mkdir()
    config = make_config(model=ModelConfig(path="model"), workload=WorkloadConfig(kind="text", path="prompts"),
                         graph=GraphConfig(histogram="run"))
    write_config(tmp_path, config)
    written = OmegaConf.load(tmp_path / "config.yaml")
    assert (written.model.path, written.workload.path, written.graph.histogram) == tuple(
        str(tmp_path / name) for name in ("model", "prompts", "run"))


def test_outputs_hold_prompt_text_tokens_and_how_each_ended(tmp_path):
    write_finished(tmp_path, make_finished(num_requests=2), {})
    lines = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    assert lines[1] == {"prompt": "prompt [1]", "text": "answer 1\nsecond line", "finish_reason": "length",
                        "error": None, "token_ids": [1, 2, 3]}


def test_the_written_config_is_the_run_whole_and_names_the_schema(tmp_path):
    config = make_config(graph=GraphConfig(buckets=[1, 2, 4]), run=RunConfig(name="yes"))
    write_config(tmp_path, config)
    written = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert written.pop("defaults") == ["schema", "encore", "_self_"]
    assert written == asdict(config)


def test_a_traceback_is_kept_and_its_absence_leaves_no_file(tmp_path):
    assert write_failure(tmp_path, Failed("gone")) is None
    path = write_failure(tmp_path, Failed("KeyError: 'x'", "Traceback ..."))
    assert path is not None and path.read_text() == "Traceback ..."


def test_records_without_a_bucket_table_survive_the_startup_file(tmp_path):
    write_finished(tmp_path, replace(make_finished(), startup=make_startup(buckets=())), {})
    assert json.loads((tmp_path / "startup.json").read_text())["total_s"] == 2.0


@given(st.lists(st.from_regex(r"[a-z]{1,9}\.[a-z]{1,30}=[0-9a-z\[\],]{0,300}", fullmatch=True), max_size=8))
def test_a_name_never_grows_too_long(overrides):
    assert len(run_name(make_config(), overrides)) <= MAX_NAME_CHARS


def test_a_name_says_model_workload_and_what_was_overridden():
    many = "graph.buckets=[" + ",".join(map(str, range(1, 91))) + "]"
    overrides = ["model=tiny", "workload=fixed", "run.isolate=false", "tracker.mode=offline", "+graph.max_bucket=8",
                 many]
    assert run_name(make_config(), overrides) == "tiny fixed max_bucket=8 buckets=[90 values]"
    assert run_name(make_config(run=RunConfig(name="mine")), overrides) == "mine"


def test_names_that_were_cut_still_differ():
    overrides = [f"a.long_key_{number}=value" for number in range(20)]
    assert run_name(make_config(), overrides) != run_name(make_config(), [*overrides[:-1], "a.long_key_19=other"])
