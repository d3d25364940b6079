"""What a run came to, as one versioned record. result.json holds it; its presence says that the run has ended.

Metrics carry their units and definitions into the file, so that it can be read without this code.
"""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
FINISHED, FAILED = "finished", "failed"  # RunResult.status
RESULT_FILE = "result.json"


@dataclass(frozen=True)
class RunResult:
    """One run. `reason` says why it failed; a failed run has whatever was known before it did."""

    name: str
    status: str
    started_at: str  # ISO 8601, UTC
    command: list[str]
    overrides: list[str]
    config: dict[str, Any]  # resolved
    code: dict[str, Any]  # commit, is_dirty
    environment: dict[str, Any]
    reason: str | None = None
    sweep: str | None = None
    tracker: dict[str, str] | None = None  # mode, why that mode, location
    startup: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # by the names of experiments.metrics.METRICS
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # name -> rows of plain values
    notes: list[str] = field(default_factory=list)  # what the tables show, in sentences
    steps_by_path: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # parts of the run -> duration
    warmup: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {self.schema_version!r}")
        if self.status not in (FINISHED, FAILED):
            raise ValueError(f"status must be {FINISHED} or {FAILED}; got {self.status!r}")
        if (self.reason is None) != (self.status == FINISHED):
            raise ValueError(f"a failed run has a reason, a finished one has none; got {self.status}, {self.reason!r}")

    @property
    def is_finished(self) -> bool:
        return self.status == FINISHED


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON gives it back: mappings, lists and plain values."""
    return json.loads(json.dumps(asdict(record)))


def to_json(result: RunResult) -> dict[str, Any]:
    """The content of result.json."""
    from experiments.metrics import METRICS

    data = asdict(result)
    version = data.pop("schema_version")
    metrics = {name: {"value": value, **asdict(METRICS[name])} for name, value in data.pop("metrics").items()}
    return {"schema_version": version, **data, "metrics": metrics}


def from_json(data: Any) -> RunResult:
    """The run that `to_json` described. ValueError names what is missing, unknown or of a wrong type."""
    if not isinstance(data, dict):
        raise ValueError(f"a result is a JSON object; got {type(data).__name__}")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {data.get('schema_version')!r}")
    known = {item.name for item in fields(RunResult)}
    if differing := known ^ data.keys():
        raise ValueError("keys missing or unknown: " + ", ".join(sorted(differing)))
    for name in ("metrics", "config", "environment", "code", "tables", "steps_by_path", "seconds", "warmup"):
        if not isinstance(data[name], dict):
            raise ValueError(f"{name} must be an object; got {data[name]!r}")
    for name, entry in data["metrics"].items():
        value = entry.get("value") if isinstance(entry, dict) else None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"metrics.{name}.value must be a number; got {entry!r}")
    return RunResult(**{**data, "metrics": {name: entry["value"] for name, entry in data["metrics"].items()}})


def write_result(directory: Path, result: RunResult) -> None:
    """Write result.json, whole or not at all."""
    write_json(directory / RESULT_FILE, to_json(result))


def read_result(directory: Path) -> RunResult:
    """The result of a run's directory. ValueError with the file's name if it is no result of this schema."""
    path = directory / RESULT_FILE
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under all the columns that any of them has, in the order in which they first appear."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, data: Mapping[str, Any] | list[Any]) -> None:
    """Write a file that is there whole or not at all: under a temporary name, then renamed."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)
