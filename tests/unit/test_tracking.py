"""A tracked run can be read back with all that it logged, and where it goes is decided without asking or waiting."""

import json
import re
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from experiments.config import TrackerConfig
from experiments.plots import save_plots
from experiments.timeline import MAX_POINTS
from experiments.tracking import NoTracker, TrackerError, decide_mode, make_tracker, summary
from run_records import make_config, make_finished, make_measured, make_result

WANDB = Path(sys.executable).with_name("wandb")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """As on a machine where nobody has logged in."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def server(monkeypatch):
    """The address of a server that accepts connections."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        set_server(monkeypatch, address)
        yield address


def set_server(monkeypatch, address):
    import wandb

    monkeypatch.setattr(wandb.setup().settings, "base_url", address)


def closed_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return listening.getsockname()[1]


def test_offline_needs_no_reason_but_the_setting():
    assert decide_mode(TrackerConfig(mode="offline")) == ("offline", "tracker.mode=offline")


def test_auto_without_a_key_is_offline_and_says_how_to_get_one():
    mode, why = decide_mode(TrackerConfig(mode="auto"))
    assert mode == "offline"
    assert "no key was found" in why and "WANDB_API_KEY" in why


def test_auto_keeps_to_what_wandb_itself_was_told(monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert decide_mode(TrackerConfig(mode="auto")) == ("offline", "WANDB_MODE=offline")


def test_auto_with_a_key_and_a_server_is_online(monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert decide_mode(TrackerConfig(mode="auto")) == ("online", server)


def test_a_key_of_netrc_counts_for_its_own_server_only(monkeypatch, server, tmp_path):
    (tmp_path / "netrc").write_text("machine elsewhere.example login user password key\n")
    assert decide_mode(TrackerConfig(mode="auto"))[0] == "offline"
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password key\n")
    assert decide_mode(TrackerConfig(mode="auto"))[0] == "online"


def test_a_server_that_does_not_answer_makes_auto_offline_and_online_an_error(monkeypatch):
    address = f"http://127.0.0.1:{closed_port()}"
    set_server(monkeypatch, address)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert decide_mode(TrackerConfig(mode="auto")) == ("offline", f"{address} cannot be reached")
    with pytest.raises(TrackerError, match=re.escape(f"tracker.mode=online: {address} cannot be reached")):
        decide_mode(TrackerConfig(mode="online"))


def test_online_without_a_key_is_an_error_and_never_a_fallback():
    with pytest.raises(TrackerError, match=r"tracker\.mode=online: no key was found"):
        decide_mode(TrackerConfig(mode="online"))


def test_tracker_none_tracks_nothing(tmp_path):
    tracker = make_tracker(make_config(), "name", None, tmp_path)
    assert isinstance(tracker, NoTracker)
    tracker.start(None)
    tracker.finish(make_result(), None, [])
    assert tracker.facts() is None and not list(tmp_path.iterdir())


def inspect(location, *flags):
    command = [WANDB, "leet", "inspect", "--json", *flags, location]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def track(tmp_path, result, finished):
    config = make_config(tracker=TrackerConfig(mode="offline", project="study", tags=["mine"]))
    tracker = make_tracker(config, "tiny fixed", "sweep-1", tmp_path)
    tracker.start(None)
    facts = tracker.facts()
    assert facts is not None
    plots = [] if finished is None else save_plots(tmp_path / "plots", finished, result.tables)
    tracker.finish(result, finished, plots)
    return facts


@pytest.mark.skipif(shutil.which(str(WANDB)) is None, reason="needs the wandb command beside this Python")
def test_a_finished_run_reads_back_with_config_summary_series_tables_and_plots(tmp_path):
    finished = make_finished(num_steps=2 * MAX_POINTS)
    result = make_result(finished)
    facts = track(tmp_path, result, finished)
    assert facts["mode"] == "offline"
    assert Path(facts["location"]).parent == tmp_path / "wandb", "one directory for all offline runs"

    run = json.loads(inspect(facts["location"], "--summary"))
    assert (run["state"], run["exit_code"], run["name"], run["project"]) == ("finished", 0, "tiny fixed", "study")
    assert {"tiny", "mine", "CPU"} <= set(run["tags"])
    assert run["config"]["workload"]["kind"] == "fixed"
    assert run["config"]["code"] == result.code
    for name, value in summary(result).items():
        assert run["summary"][name] == pytest.approx(value), name
    assert {"tables/latency", "tables/ledger", "tables/buckets", "tables/decode_batches", "plots/steps",
            "plots/latency", "plots/memory", "plots/buckets"} <= run["summary"].keys()
    assert "scheduler/batch_size" not in run["summary"], "a series' last value is no figure of the run"

    records = [json.loads(line) for line in inspect(facts["location"]).splitlines()]
    rows = [history_row(record) for record in records if record["type"] == "history"]
    series = [row for row in rows if "time_s" in row]
    assert len(series) == MAX_POINTS
    assert {name.partition("/")[0] for name in series[-1] if "/" in name} == {
        "throughput", "latency", "memory", "graph", "kv", "scheduler"}


@pytest.mark.skipif(shutil.which(str(WANDB)) is None, reason="needs the wandb command beside this Python")
def test_a_measurement_without_requests_is_tracked_by_its_tables(tmp_path):
    finished = make_measured()
    facts = track(tmp_path, make_result(finished), finished)
    run = json.loads(inspect(facts["location"], "--summary"))
    assert run["state"] == "finished"
    assert {"tables/launch_cost", "tables/ledger", "plots/memory"} <= run["summary"].keys()
    assert "tables/latency" not in run["summary"]


def history_row(record):
    return record["history"].get("item", record["history"])


@pytest.mark.skipif(shutil.which(str(WANDB)) is None, reason="needs the wandb command beside this Python")
def test_a_failed_run_reads_back_as_failed_with_its_reason(tmp_path):
    facts = track(tmp_path, make_result(reason="out of memory"), None)
    run = json.loads(inspect(facts["location"], "--summary"))
    assert (run["state"], run["exit_code"]) == ("failed", 1)
    assert (run["summary"]["status"], run["summary"]["reason"]) == ("failed", "out of memory")
