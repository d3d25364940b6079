"""A run's process may end in any way; its parent always gets an outcome with a reason and never hangs."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from experiments.config import Config, RunConfig
from experiments.messages import INTERRUPTED, Failed, Finished, Progress
from experiments.runner import describe_exit, execute
from experiments.worker import Report
from run_records import ignore, make_config, make_finished

LARGE_STEPS = 50_000  # records of several MiB, far above what a pipe holds


def finishes(config: Config, report: Report) -> Finished:
    report(Progress("serve", 1, 2, 3, 4))
    return make_finished(num_steps=LARGE_STEPS)


def refuses(config: Config, report: Report) -> Finished:
    raise ValueError("kv.bytes must be at least 1; got 0")


def breaks(config: Config, report: Report) -> Finished:
    raise KeyError("block 7")


def calls_sys_exit(config: Config, report: Report) -> Finished:
    sys.exit(3)


def calls_os_exit(config: Config, report: Report) -> Finished:
    report(Progress("capture"))
    os._exit(7)


def is_killed(config: Config, report: Report) -> Finished:
    report(Progress("serve"))
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def crashes_in_native_code(config: Config, report: Report) -> Finished:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's fault handler would print a stack
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def never_ends(config: Config, report: Report) -> Finished:
    report(Progress("serve"))
    time.sleep(3600)
    raise AssertionError("unreachable")


def is_interrupted(config: Config, report: Report) -> Finished:
    os.kill(os.getpid(), signal.SIGINT)  # what a terminal's Ctrl-C sends to the child as well
    return make_finished()


def test_a_large_outcome_arrives_whole_and_progress_before_it():
    seen = []
    outcome = execute(make_config(), seen.append, target=finishes)
    assert isinstance(outcome, Finished)
    assert len(outcome.records.steps) == LARGE_STEPS
    assert outcome == make_finished(num_steps=LARGE_STEPS)
    assert seen == [Progress("serve", 1, 2, 3, 4)]


@pytest.mark.parametrize("isolate", [True, False])
def test_what_the_user_got_wrong_is_the_message_alone(isolate):
    outcome = execute(make_config(run=RunConfig(isolate=isolate)), ignore, target=refuses)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "kv.bytes must be at least 1; got 0"


@pytest.mark.parametrize("isolate", [True, False])
def test_any_other_error_is_named_by_its_type_and_keeps_its_traceback(isolate, capfd):
    outcome = execute(make_config(run=RunConfig(isolate=isolate)), ignore, target=breaks)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "KeyError: 'block 7'"
    assert 'raise KeyError("block 7")' in (outcome.traceback or "")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("target", "reason"), [
    (calls_sys_exit, "the run called sys.exit(3) before it had a result"),
    (calls_os_exit, "the run's process exited with code 7 in stage 'capture', before it had a result"),
    (is_killed, "the run's process was killed by SIGKILL (often the system, when host memory runs out) in stage "
                "'serve', before it had a result"),
    (crashes_in_native_code, "the run's process was killed by SIGSEGV (a crash in native code) in stage 'start', "
                             "before it had a result"),
])
def test_a_child_that_ends_without_a_result_is_a_failed_run_with_a_reason(target, reason):
    outcome = execute(make_config(), ignore, target=target)
    assert isinstance(outcome, Failed)
    assert outcome.reason == reason


def test_ctrl_c_ends_the_child_and_the_run_is_interrupted():
    pids = []

    def interrupt(progress: Progress) -> None:
        Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    outcome = execute(make_config(), interrupt, on_start=pids.append, target=never_ends)
    assert outcome == Failed(INTERRUPTED)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_child_leaves_ctrl_c_to_its_parent():
    """Also the first child of a process, whose start brings up multiprocessing's resource tracker."""
    script = ("from test_runner import *; "
              "print(type(execute(make_config(), ignore, target=is_interrupted)).__name__)")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert (done.stdout, done.stderr) == ("Finished\n", "")


def test_an_error_while_the_run_is_started_ends_the_child():
    pids = []

    def refuse(pid: int | None) -> None:
        pids.append(pid)
        raise RuntimeError("no tracker")

    with pytest.raises(RuntimeError, match="no tracker"):
        execute(make_config(), ignore, on_start=refuse, target=never_ends)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_every_exit_code_can_be_described():
    assert describe_exit(0) == "exited with code 0"
    assert describe_exit(-signal.SIGTERM) == "was killed by SIGTERM"
    assert describe_exit(-200) == "was killed by signal 200"
