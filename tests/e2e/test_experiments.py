"""Every published comparison composes and checks all of its points, and runs whole in a small form on a CPU."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from experiments import app, cli, machine
from experiments.config import Config
from experiments.paths import repository_root

EXPERIMENTS = sorted(path.stem for path in (repository_root() / "conf" / "experiment").glob("*.yaml"))
POINTS = {"launch_overhead": 3, "eager_vs_graph": 2, "bucket_policies": 5, "graph_scope": 3, "sampler_impl": 6,
          "kv_policies": 12}
SMALL = ["model=tiny", "model.max_model_len=512", "device=cpu", "tracker=none", "workload.prompt_tokens=9",
         "workload.max_tokens=4", "workload.batch_sizes=[1,3]", "graph.buckets=[1,3]", "scheduler.max_num_seqs=3"]


@dataclass
class Jobs:
    """Stands where runs would be executed, and remembers what would have run."""

    status: str = "finished"
    configs: list[Config] = field(default_factory=list)

    def run_one(self, config: Config, *args: object, **kwargs: object) -> "Jobs":
        self.configs.append(config)
        return self


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """What `main` would run on a machine with a GPU."""
    jobs = Jobs()
    monkeypatch.setattr(app, "run_one", jobs.run_one)
    monkeypatch.setattr(app, "finish_sweep", lambda directory: None)
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    return jobs


def run(arguments: list[str], root: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(repository_root() / "run.py"), *arguments, f"run.output_root={root}"],
                          capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_point_of_an_experiment_composes_and_is_valid(experiment, jobs, tmp_path):
    assert cli.main([f"experiment={experiment}", f"run.output_root={tmp_path}"]) == 0
    assert len(jobs.configs) == POINTS[experiment]
    assert len(jobs.configs) > 1 and len(set(map(repr, jobs.configs))) == len(jobs.configs), "points differ"
    assert all(config.model.is_dummy for config in jobs.configs), "nothing has to be downloaded"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_says_first_how_it_is_run(experiment):
    lines = (repository_root() / "conf" / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[:2] == ["# @package _global_", f"# python run.py experiment={experiment}"]


def test_the_command_line_wins_over_an_experiments_sweep_and_its_values(jobs, tmp_path):
    overrides = ["experiment=graph_scope", "graph.scope=step", "model=llama-3.2-1b", "scheduler.overlap=false",
                 "scheduler.max_num_seqs=256,512", f"run.output_root={tmp_path}"]
    assert cli.main(overrides) == 0
    assert [config.scheduler.max_num_seqs for config in jobs.configs] == [256, 512]
    assert {(config.graph.scope, config.model.name, config.scheduler.overlap) for config in jobs.configs} \
        == {("step", "llama-3.2-1b", False)}


@pytest.mark.parametrize(("arguments", "said"), [
    (["experiment=graph_scope", "graph.scope=body,nothing"], "graph.scope"),
    (["experiment=none_such"], "graph_scope"),
    (["-m", "experiment=graph_scope,eager_vs_graph"], "one at a time"),
])
def test_a_mistake_in_an_experiment_is_one_line_before_anything_runs(arguments, said, jobs, tmp_path, capsys):
    assert cli.main([*arguments, f"run.output_root={tmp_path}"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert said in line and not jobs.configs


def test_eager_vs_graph_runs_on_a_cpu_and_leaves_its_table_and_plots(tmp_path):
    done = run(["experiment=eager_vs_graph", *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    [sweep] = tmp_path.rglob("summary.json")
    points = json.loads(sweep.read_text())["points"]
    assert [point["differs"] for point in points] == [{"graph.mode": "eager"}, {"graph.mode": "full"}]
    assert all(point["by_batch_size"]["decode"].keys() == {"1", "3"} for point in points)
    assert {path.name for path in (sweep.parent / "plots").iterdir()} == {"summary.png", "decode.png"}
    assert "decode step, ms, by batch size" in done.stdout


def test_the_launch_overhead_of_a_cpu_is_said_not_to_exist(tmp_path):
    done = run(["experiment=launch_overhead", *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.rglob("result.json")
    result = json.loads(path.read_text())
    rows = result["tables"]["launch_model"]
    assert [row["batch_size"] for row in rows] == [1, 3]
    assert all(row["eager_ms"] > 0 and row["graph_ms"] > 0 and row["eager_predicted_ms"] is None for row in rows)
    assert [row["num_tokens"] for row in result["tables"]["prefill_launches"]] == [16, 32, 64, 128, 256, 512]
    assert any("On a CPU nothing is launched" in note for note in result["notes"])
