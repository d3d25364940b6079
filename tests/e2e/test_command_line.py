"""`python run.py` as a user types it: from any directory, right and wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.paths import repository_root

RUN = [sys.executable, str(repository_root() / "run.py")]
SMALL = ["model=tiny", "workload=fixed", "workload.num_requests=3", "workload.prompt_tokens=9", "workload.max_tokens=4",
         "tracker=none"]


def run(arguments: list[str], cwd: Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*RUN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, **options)


def results(root: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(root.rglob("result.json"))]


@pytest.mark.parametrize("arguments", [["graph.buckets=pow2"], ["graph.buckets=[1,2,4,8,24]"], ["graph.mode=eager"]])
def test_a_run_leaves_its_files_from_any_directory(tmp_path, arguments):
    done = run([*SMALL, *arguments, f"run.output_root={tmp_path}/out"], tmp_path)
    assert done.returncode == 0, done.stderr
    [result] = results(tmp_path / "out")
    assert result["status"] == "finished"
    [directory] = (path.parent for path in (tmp_path / "out").rglob("result.json"))
    assert {"config.yaml", "environment.json", "startup.json", "steps.parquet", "requests.jsonl", "outputs.jsonl",
            "decode_batches.json", "plots", "tables"} <= {path.name for path in directory.iterdir()}
    assert str(directory) in done.stdout.replace("\n", "")


def test_a_ladder_measures_each_batch_size_and_leaves_what_a_list_is_tuned_for(tmp_path):
    ladder = ["model=tiny", "workload=ladder", "workload.batch_sizes=[1,3,2]", "workload.prompt_tokens=9",
              "workload.max_tokens=4", "scheduler.max_num_seqs=3", "tracker=none"]
    done = run([*ladder, f"run.output_root={tmp_path}/out"], tmp_path)
    assert done.returncode == 0, done.stderr
    [result] = results(tmp_path / "out")
    rows = result["tables"]["decode_batches"]
    assert [(row["batch_size"], row["num_steps"]) for row in rows] == [(1, 3), (2, 3), (3, 3)]
    assert "decode batches" in done.stdout
    [saved] = (tmp_path / "out").rglob("decode_batches.json")
    tuned = run([*ladder, "graph.buckets=tuned", "graph.max_graphs=2", f"graph.histogram={saved.parent}",
                 f"run.output_root={tmp_path}/tuned"], tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    [result] = results(tmp_path / "tuned")
    assert [bucket["batch_size"] for bucket in result["startup"]["buckets"]] in ([1, 3], [2, 3])


def test_a_sweep_over_kv_memory_policies_shows_what_each_left(tmp_path):
    done = run(["-m", *SMALL, "kv.policy=allocate_first,capture_then_allocate", "scheduler.max_num_seqs=8",
                f"run.output_root={tmp_path}/out"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a CPU stands in for a device" in done.stdout and "rehearsal" not in done.stdout
    first, second = results(tmp_path / "out")
    for result, policy in ((first, "allocate_first"), (second, "capture_then_allocate")):
        ledger = result["startup"]["ledger"]
        assert result["startup"]["kv_policy"] == policy and ledger["source"] == "emulated"
        assert ledger["phases"][-1]["phase"] == "ready" and ledger["phases"][-1]["parts"]["kv_cache"] > 0
        assert result["metrics"]["memory/overrun_bytes"]["value"] == 0
        assert result["metrics"]["kv/num_tokens"]["value"] == 8 * 512
    assert len(list((tmp_path / "out").rglob("memory.png"))) == 2


def test_a_plan_prints_and_leaves_nothing(tmp_path):
    for arguments in ([], ["-m", "scheduler.max_num_seqs=2,3"]):
        done = run([*arguments, *SMALL, "mode=plan", "graph.buckets=pow2", f"run.output_root={tmp_path}/out"], tmp_path)
        assert done.returncode == 0 and not done.stderr, done.stderr
        num_plans = 2 if arguments else 1
        assert done.stdout.count("tokens that fit") == num_plans * 2 and "Expected decode steps" in done.stdout
        assert not list(tmp_path.iterdir())


def test_a_saved_configuration_runs_again_through_the_same_schema(tmp_path):
    run([*SMALL, "graph.buckets=pow2", f"run.output_root={tmp_path}/out"], tmp_path)
    [saved] = (tmp_path / "out").rglob("config.yaml")
    again = run([f"--config-path={saved.parent}", "--config-name=config"], tmp_path)
    assert again.returncode == 0, again.stderr
    first, second = results(tmp_path / "out")
    assert first["config"] == second["config"]
    saved.write_text(saved.read_text().replace("max_num_seqs: 256", "max_num_seqs: 0"))
    refused = run([f"--config-path={saved.parent}", "--config-name=config"], tmp_path)
    assert refused.returncode == 2
    assert "scheduler.max_num_seqs must be a whole number in [1, 65535]; got 0" in refused.stderr


def test_a_sweep_runs_every_point_and_ends_non_zero_if_one_failed(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    done = run(["-m", *SMALL, "scheduler.max_num_seqs=2,4", f"model.path=null,{broken}", "model.load_format=auto",
                f"run.output_root={tmp_path}/out"], tmp_path)
    assert done.returncode == 1
    assert [result["status"] for result in results(tmp_path / "out")] == ["finished", "failed"] * 2
    assert "Traceback" not in done.stderr
    [summary] = (tmp_path / "out").rglob("summary.csv")
    assert len(summary.read_text().splitlines()) == 5


@pytest.mark.parametrize(("arguments", "said"), [
    (["graph.bucket=pow2"], ["graph.bucket=pow2", "Did you mean graph.buckets?"]),
    (["+graph.foo=1"], ["graph.foo", "mode, buckets, max_bucket"]),
    (["nonsense=1"], ["nonsense", "model, device, scheduler"]),
    (["graph=foo"], ["graph/foo", "eager, full"]),
    (["model=gpt5"], ["model/gpt5", "smollm2-135m"]),
    (["graph.buckets=pow3"], ["graph.buckets", "nano_vllm, vllm", "pow3"]),
    (["graph.buckets=[1,1]"], ["graph.buckets", "once", "[1, 1]"]),
    (["graph.buckets=[0]"], ["graph.buckets", "at least 1", "got 0"]),
    (["graph.buckets=[1,300]"], ["graph.buckets", "300", "scheduler.max_num_seqs=256"]),
    (["scheduler.max_num_seqs=abc"], ["scheduler.max_num_seqs=abc", "Integer"]),
    (["scheduler.max_num_seqs=0"], ["scheduler.max_num_seqs", "[1, 65535]", "got 0"]),
    (["kv.tokens=-5"], ["kv.tokens", "in [1, ", "got -5"]),
    (["kv.tokens=5", "kv.bytes=6"], ["kv.tokens=5", "kv.bytes=6", "at most one"]),
    (["kv.policy=fixed", "kv.memory_fraction=0.5"], ["kv.policy=fixed", "kv.memory_fraction"]),
    (["kv.memory_fraction=1.5"], ["kv.memory_fraction", "(0, 1]", "1.5"]),
    (["device=cpu", "kernels=triton"], ["kernels.attention=triton", "auto or reference"]),
    (["model.path=/nowhere"], ["model.path=/nowhere", "does not exist"]),
    (["+model.architecture.rope_scaling.foo=1"], ["rope_scaling", "as a whole"]),
    (["a=b=c"], ["a=b=c"]),
    (["workload.num_requests=10000000000000"], ["workload.num_requests", "1000000"]),
    (["scheduler.max_num_seqs=1000000000"], ["scheduler.max_num_seqs", "65535"]),
    (["kv.num_blocks=9223372036854775808"], ["kv.num_blocks", "9223372036854775808"]),
    (["model=tiny", "model.architecture.rope_theta=-5"], ["model.architecture.rope_theta", "above 0", "-5"]),
    (["model=tiny", "model.architecture.rms_norm_eps=nan"], ["model.architecture.rms_norm_eps", "above 0"]),
    (["model=tiny", "model.architecture.rope_scaling=5"], ["model.architecture.rope_scaling", "mapping"]),
    (["model=tiny", "model.max_model_len=9999"], ["model.max_model_len", "512", "9999"]),
    (["scheduler.max_num_batched_tokens=100"], ["scheduler.max_num_batched_tokens=100", "model.max_model_len=4096"]),
    (["sampler.top_p=0"], ["sampler.top_p", "(0, 1]"]),
    (["workload=fixed", "workload.path=x"], ["workload.path", "workload=text"]),
    (["-m", "scheduler.max_num_seqs=2,0"], ["scheduler.max_num_seqs", "got 0"]),
    (["graph.buckets=[1,2"], ["[1,2"]),
    (["pow2"], ["pow2", "key=value"]),
    (["mode=dry"], ["mode", "run, plan", "dry"]),
    (["mode=plan", "graph.buckets=[4,4]"], ["graph.buckets", "once", "[4, 4]"]),
    (["mode=plan", "model=tiny", "workload=nano_vllm_bench"], ["nano_vllm_bench", "model.max_model_len"]),
    (["workload=ladder", "scheduler.max_num_seqs=8"], ["workload.batch_sizes: 256", "scheduler.max_num_seqs=8"]),
    (["workload=ladder", "workload.batch_sizes=[0]"], ["workload.batch_sizes", "got 0"]),
    (["graph.histogram=/nowhere"], ["graph.histogram=/nowhere", "does not exist"]),
], ids=" ".join)
def test_a_mistake_is_one_readable_line(tmp_path, arguments, said):
    done = run([*arguments, f"run.output_root={tmp_path}/out"], tmp_path)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    for text in said:
        assert text in lines[0]
    assert not results(tmp_path)


def test_an_output_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = run([*SMALL, f"run.output_root={tmp_path}/file"], tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1 and "Not a directory" in done.stderr


def test_help_and_composition_answer_without_torch(tmp_path):
    """Importing torch takes seconds: a poisoned one in front of the real shows that nobody asks for it."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    for arguments in (["--help"], ["--cfg", "job"], ["model=qwen3-0.6b", "--cfg", "job"]):
        done = run(arguments, tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
        assert done.returncode == 0, done.stderr
        assert "max_num_seqs" in done.stdout


def test_a_breakpoint_in_the_model_stops(tmp_path):
    hook = tmp_path / "sitecustomize.py"  # stands for a breakpoint() that a user writes into the decoder
    hook.write_text("import engine.model.decoder as d\n"
                    "forward = d.Decoder.forward\n"
                    "def stopped(*args, **kwargs):\n    breakpoint()\n    return forward(*args, **kwargs)\n"
                    "d.Decoder.forward = stopped\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{repository_root() / 'src'}", "PATH": "/usr/bin:/bin"}
    done = run([*SMALL, "graph.mode=eager", "run.isolate=false", f"run.output_root={tmp_path}/out"], tmp_path,
               env=environment, input="p 6 * 7\nq\n")
    assert "(Pdb) 42" in done.stdout
