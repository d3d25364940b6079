"""What the process that executes a run tells the one that started it: progress, and in the end one outcome."""

from dataclasses import dataclass, field
from typing import Any

from engine.records import EngineRecords, StartupRecord

INTERRUPTED = "interrupted"  # Failed.reason after Ctrl-C


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Counts are None until requests are being served."""

    stage: str
    num_finished: int | None = None
    num_requests: int | None = None
    num_tokens: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class Answer:
    """What became of one request, in the order of the workload."""

    label: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: str | None = None


@dataclass(frozen=True)
class Finished:
    """A run that came to its end. Record times count from the moment at which its first requests arrived.

    A measurement that serves no workload leaves no step, no request and no answer, and has tables instead.
    """

    startup: StartupRecord
    records: EngineRecords
    answers: tuple[Answer, ...]
    memory: dict[str, int]
    warmup: dict[str, Any]  # what ran before the measurement: num_requests, max_tokens
    seconds: dict[str, float]  # build_engine, bind_workload, warm_up, serve
    process: dict[str, Any] = field(default_factory=dict)  # what only that process knows: torch's threads, CUDA version
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # name -> rows of plain values, columns alike
    notes: tuple[str, ...] = ()  # what the tables show, in sentences


@dataclass(frozen=True)
class Failed:
    """A run that did not. `reason` is for the user; `traceback` for whoever looks into it."""

    reason: str
    traceback: str | None = None


Outcome = Finished | Failed
