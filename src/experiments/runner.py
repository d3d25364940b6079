"""Executes a run in a child process and turns whatever becomes of it into an outcome.

The parent waits for the child's pipe and for its end together, so that a child that dies in any way (an exception,
sys.exit, os._exit, a signal) is a failed run with a reason, and never a hang. The child does not see Ctrl-C: the parent
takes it, ends the child and reports the run as interrupted.
"""

import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from experiments.config import Config
from experiments.messages import INTERRUPTED, Failed, Finished, Outcome, Progress
from experiments.worker import Report, serve

Target = Callable[[Config, Report], Finished]
OnStart = Callable[[int | None], None]  # gets the child's process id; None where there is no child

END_GRACE_S = 20.0  # for a child that has delivered its outcome to give its device back
TERMINATE_GRACE_S = 5.0  # for a child that was asked to end


def execute(config: Config, show: Report, on_start: OnStart = lambda pid: None, target: Target = serve) -> Outcome:
    """Run `target` in a child process, or here for run.isolate=false; returns what became of it, whatever that was.

    `show` is called with the run's progress. `on_start` is called once the run has been started; what it raises ends
    the run and is raised here.
    """
    return _in_child(config, show, on_start, target) if config.run.isolate else _here(config, show, on_start, target)


def _here(config: Config, show: Report, on_start: OnStart, target: Target) -> Outcome:
    on_start(None)
    try:
        return _attempt(config, show, target)
    except KeyboardInterrupt:
        return Failed(INTERRUPTED)


def _attempt(config: Config, report: Report, target: Target) -> Outcome:
    """The boundary at which whatever a run raises becomes an outcome."""
    try:
        return target(config, report)
    except ValueError as error:
        return Failed(str(error), traceback.format_exc())
    except SystemExit as error:
        return Failed(f"the run called sys.exit({error.code!r}) before it had a result", traceback.format_exc())
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())


def _child_main(sender: Connection, config: Config, target: Target) -> None:
    """What the child executes: the run, with progress and outcome sent through the pipe."""
    try:
        sender.send(_attempt(config, sender.send, target))
    except BrokenPipeError:  # the parent is gone: nobody is left to tell
        sys.exit(1)


def _in_child(config: Config, show: Report, on_start: OnStart, target: Target) -> Outcome:
    context = get_context("spawn")  # a fork would inherit the parent's threads and CUDA state
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child_main, args=(sender, config, target), name="encore-run")
    grace_s = 0.0
    try:
        with _interrupts_held_back():
            process.start()
        sender.close()  # the child has its own copy; with ours closed, its end shows as the pipe's end
        on_start(process.pid)
        outcome = _listen(receiver, process, show)
        grace_s = END_GRACE_S
        return outcome
    except KeyboardInterrupt:
        return Failed(INTERRUPTED)
    finally:
        receiver.close()
        _end(process, grace_s)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block Ctrl-C while a child is started: the child inherits the block, the parent gets the signal afterwards."""
    resource_tracker.ensure_running()  # starting a child would start it, and that unblocks Ctrl-C again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(receiver: Connection, process: BaseProcess, show: Report) -> Outcome:
    """The child's outcome, or what its end says when it leaves none. Shows progress meanwhile."""
    stage = "start"
    while True:
        ready = wait([receiver, process.sentinel])
        # A child that has ended may have left messages: they are read first.
        if receiver not in ready and not receiver.poll():
            return _died(process, stage)
        try:
            message = receiver.recv()
        except (EOFError, OSError):  # ended between two messages, or in the middle of one
            return _died(process, stage)
        if isinstance(message, (Finished, Failed)):
            return message
        assert isinstance(message, Progress), f"unexpected message {message!r}"
        stage = message.stage
        show(message)


def _died(process: BaseProcess, stage: str) -> Failed:
    """How a child ended that left no outcome."""
    _end(process, TERMINATE_GRACE_S)
    return Failed(f"the run's process {describe_exit(process.exitcode)} in stage '{stage}', before it had a result")


def describe_exit(exit_code: int | None) -> str:
    """`exited with code 3`, or `was killed by SIGSEGV (...)` with what usually sends it."""
    if exit_code is None or exit_code >= 0:
        return f"exited with code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in {*signal.Signals} else f"signal {-exit_code}"
    hints = {"SIGKILL": "often the system, when host memory runs out", "SIGSEGV": "a crash in native code",
             "SIGABRT": "native code gave up"}
    return f"was killed by {name}" + (f" ({hints[name]})" if name in hints else "")


def _end(process: BaseProcess, grace_s: float) -> None:
    """Wait for the child to end, ask it to, and make it, in this order. Does nothing to one that never started."""
    if process.pid is None:
        return
    process.join(grace_s)
    if process.is_alive():
        process.terminate()
        process.join(TERMINATE_GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()
