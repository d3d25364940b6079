"""One run from its configuration to its files, its plan, and the summary of a sweep. What the command line calls.

Importing this is cheap, since `--help` and the child process pay for it; what takes time to import is imported when
needed. Order of a run: what it ran on is written down, the child executes it while the tracker follows, then files,
result, tracker and report. result.json comes last of the files: where it is, the others are complete.
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from experiments.config import MEASURES, Config
from experiments.messages import INTERRUPTED, Failed, Finished, Outcome
from experiments.naming import run_name
from experiments.paths import PLOTS_DIRECTORY, anchored, repository_root
from experiments.result import FAILED, FINISHED, RunResult, plain, write_result

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.tracking import Tracker

REPORT_WIDTH = 140  # columns where standard output is no terminal


def run_one(config: Config, directory: Path, overrides: Sequence[str] = (), command: Sequence[str] = (),
            sweep: str | None = None) -> RunResult:
    """Execute one run, write its files into `directory`, track it and print its report.

    A run that fails returns a failed result. Ctrl-C raises KeyboardInterrupt once the interrupted run is written down.
    """
    from experiments import run_files
    from experiments.environment import code_version, environment

    directory.mkdir(parents=True, exist_ok=True)
    name = run_name(config, overrides)
    ran_on = environment()
    run_files.write_config(directory, config)
    run_files.write_environment(directory, ran_on)
    about = {"name": name, "sweep": sweep, "started_at": datetime.now(UTC).isoformat(), "command": list(command),
             "overrides": list(overrides), "config": plain(config), "code": code_version(repository_root())}
    outcome, tracker = _execute_tracked(config, name, sweep)
    if isinstance(outcome, Finished):
        ran_on |= outcome.process
        run_files.write_environment(directory, ran_on)
    result = _result(outcome, config.without_effect(), environment=ran_on, tracker=tracker.facts(), **about)
    _conclude(outcome, result, tracker, directory)
    if result.reason == INTERRUPTED:
        raise KeyboardInterrupt
    return result


def print_plan(config: Config) -> None:
    """Print what this run would be, and leave nothing. ValueError for what would be refused."""
    from rich.text import Text

    from experiments.plan import make_plan
    from experiments.plan_report import plan_parts

    parts = plan_parts(make_plan(config))
    console = _console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def finish_sweep(directory: Path) -> None:
    """Write summary.csv and summary.json of the sweep in `directory`, and print its table."""
    from experiments import sweep

    points, without_result = sweep.collect(directory)
    sweep.write_summary(directory, points)
    console = _console()
    for table in (sweep.summary_table(directory, points), *sweep.batch_tables(points)):
        console.print(table)
    for line in (*sweep.failures(points), *(f"without a result: {run}" for run in without_result)):
        console.print(line, style="red", markup=False, soft_wrap=True)
    console.print(f"summary:  {directory / 'summary.csv'}", markup=False, soft_wrap=True)


def _execute_tracked(config: Config, name: str, sweep: str | None) -> "tuple[Outcome, Tracker]":
    """The run's outcome, and the tracker that followed it. A bad workload and tracking that cannot be had fail it."""
    from experiments.progress import progress_display
    from experiments.runner import execute
    from experiments.tracking import NoTracker, TrackerError, make_tracker
    from experiments.workload import draw_workload

    tracker: Tracker = NoTracker()
    try:
        if config.measure == "serve":
            draw_workload(config)  # what is wrong with it is said before anything is started
        tracker = make_tracker(config, name, sweep, anchored(config.run.output_root))
    except ValueError as error:
        return Failed(str(error)), tracker
    except KeyboardInterrupt:
        return Failed(INTERRUPTED), tracker
    try:
        with progress_display(name, is_interactive=not config.run.isolate) as show:
            return execute(config, show, tracker.start, resolve_name(MEASURES[config.measure])), tracker
    except TrackerError as error:
        return Failed(str(error)), tracker
    except KeyboardInterrupt:
        return Failed(INTERRUPTED), tracker


def _result(outcome: Outcome, warnings: list[str], **about: Any) -> RunResult:
    from experiments.metrics import compute_metrics
    from experiments.tables import run_tables, steps_by_path

    if isinstance(outcome, Failed):
        return RunResult(status=FAILED, reason=outcome.reason, **about)
    records, startup = outcome.records, outcome.startup
    return RunResult(
        status=FINISHED, startup={**plain(startup), "total_s": startup.total_s},
        metrics=compute_metrics(records.steps, records.requests, startup, outcome.memory),
        tables={**run_tables(records, startup), **outcome.tables}, notes=list(outcome.notes),
        steps_by_path=steps_by_path(records.steps), seconds=outcome.seconds, warmup=outcome.warmup,
        warnings=[*warnings, *records.warnings], **about)


def _conclude(outcome: Outcome, result: RunResult, tracker: "Tracker", directory: Path) -> None:
    """Write the files of the outcome, the result last; then log to the tracker and print the report."""
    from experiments import report, run_files

    finished, plots = None, []
    if isinstance(outcome, Finished):
        from experiments.plots import save_plots

        finished = outcome
        run_files.write_finished(directory, finished, result.tables)
        plots = save_plots(directory / PLOTS_DIRECTORY, finished, result.tables)
    else:
        run_files.write_failure(directory, outcome)
    write_result(directory, result)
    tracker.finish(result, finished, plots)
    report.print_run(_console(is_error=finished is None), result, outcome, directory)


def _console(is_error: bool = False) -> "Console":
    """Standard output, or standard error for what went wrong; wide enough for a table where it is no terminal."""
    from rich.console import Console

    stream = sys.stderr if is_error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else REPORT_WIDTH, highlight=False)
