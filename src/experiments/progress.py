"""How a run's progress is shown: a bar on a terminal, else one plain line for each stage. Always on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from experiments.messages import Progress
from experiments.worker import Report


@contextmanager
def progress_display(name: str, is_interactive: bool) -> Iterator[Report]:
    """What shows progress while the context lasts; an interactive run leaves the terminal to its debugger."""
    if sys.stderr.isatty() and not is_interactive:
        with _bar(name) as show:
            yield show
    else:
        yield _StageLines(name)


class _StageLines:
    """A line when a stage begins."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = ""

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            print(f"{self._name}: {progress.stage}", file=sys.stderr, flush=True)


@contextmanager
def _bar(name: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.console.print(name, markup=False, highlight=False)
        task = bar.add_task("start", total=None, detail="")

        def show(progress: Progress) -> None:
            is_serving = progress.num_tokens is not None
            detail = f"{progress.num_tokens:,} tokens, batch {progress.batch_size}" if is_serving else ""
            bar.update(task, description=progress.stage, total=progress.num_requests,
                       completed=progress.num_finished or 0, detail=detail)

        yield show
