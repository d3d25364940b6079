"""One run from configuration to files, with the engine replaced by what it would have recorded."""

import subprocess
import sys
from pkgutil import resolve_name

import pytest

from engine.config import ModelConfig
from experiments import launch_overhead
from experiments.app import run_one
from experiments.config import MEASURES, Config, RunConfig, TrackerConfig, WorkloadConfig
from experiments.messages import INTERRUPTED, Failed
from experiments.result import read_result
from run_records import make_config, make_finished, make_measured


def config_in(directory, **sections) -> Config:
    return make_config(run=RunConfig(output_root=str(directory)), **sections)


def with_outcome(monkeypatch, outcome):
    monkeypatch.setattr("experiments.runner.execute", lambda config, show, on_start, target: outcome)


def test_a_finished_run_leaves_every_file(tmp_path, monkeypatch, capsys):
    with_outcome(monkeypatch, make_finished())
    config = config_in(tmp_path)
    result = run_one(config, tmp_path / "run", overrides=["graph.mode=full"], command=["run.py"])
    assert result.is_finished and read_result(tmp_path / "run") == result
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml", "environment.json", "startup.json", "steps.parquet", "requests.jsonl", "outputs.jsonl",
        "decode_batches.json", "tables", "result.json", "plots"}
    assert "output tokens a second" in capsys.readouterr().out


def test_a_measurement_without_requests_leaves_its_tables_and_notes(tmp_path, monkeypatch, capsys):
    finished, targets = make_measured(), []
    monkeypatch.setattr("experiments.runner.execute",
                        lambda config, show, on_start, target: targets.append(target) or finished)
    monkeypatch.setattr("experiments.workload.draw_workload", lambda config: pytest.fail("no workload is sent"))
    result = run_one(config_in(tmp_path, measure="launch_overhead"), tmp_path / "run")
    assert targets == [launch_overhead.measure]
    assert result.tables["launch_cost"] == finished.tables["launch_cost"]
    assert result.notes == ["Launching is dear."]
    assert (tmp_path / "run" / "tables" / "launch_cost.csv").is_file()
    assert read_result(tmp_path / "run") == result
    printed = capsys.readouterr().out
    assert "Launching is dear." in printed and "launch cost" in printed
    assert "Throughput" not in printed and "Latency" not in printed


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_names_a_function(measure):
    assert callable(resolve_name(MEASURES[measure]))


def test_a_failed_run_is_a_result_and_says_so_on_standard_error(tmp_path, monkeypatch, capsys):
    with_outcome(monkeypatch, Failed("KeyError: 'x'", "Traceback ..."))
    config = config_in(tmp_path)
    result = run_one(config, tmp_path / "run")
    assert (result.status, result.reason) == ("failed", "KeyError: 'x'")
    assert read_result(tmp_path / "run") == result
    captured = capsys.readouterr()
    assert "KeyError: 'x'" in captured.err and not captured.out


def test_an_interrupted_run_is_written_down_before_the_interrupt_goes_on(tmp_path, monkeypatch):
    with_outcome(monkeypatch, Failed(INTERRUPTED))
    config = config_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_one(config, tmp_path / "run")
    assert read_result(tmp_path / "run").reason == INTERRUPTED


def test_tracking_that_cannot_be_had_fails_the_run_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.runner.execute", lambda *args: pytest.fail("the run was started"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    config = config_in(tmp_path, tracker=TrackerConfig(mode="online"))
    result = run_one(config, tmp_path / "run")
    assert result.reason is not None and result.reason.startswith("tracker.mode=online: no key was found")


def test_a_missing_prompt_file_is_refused_in_one_line_before_anything_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.runner.execute", lambda *args: pytest.fail("the run was started"))
    config = config_in(tmp_path, model=ModelConfig(path="somewhere"),
                       workload=WorkloadConfig(kind="text", path="nowhere.jsonl"))
    result = run_one(config, tmp_path / "run")
    assert result.reason == "workload.path=nowhere.jsonl is not a file"
    assert "Traceback" not in capsys.readouterr().err


def test_importing_the_application_imports_nothing_heavy():
    """`--help` and every child process pay for it."""
    script = ("import sys, experiments.app, experiments.worker, experiments.runner; "
              "print({'torch', 'wandb', 'pandas', 'matplotlib', 'numpy'} & sys.modules.keys() or 'nothing')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(sys.path)})
    assert done.stdout.strip() == "nothing"
