"""What a finished run knows that a bucket list can be tuned for: the batch sizes of its decode steps, and what each of
its buckets cost in time and memory.

Every finished run leaves these in one small file. A histogram written by hand does as well, and has no costs.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checks import check_range

DECODE_BATCHES_FILE = "decode_batches.json"
DECODE_BATCHES_SCHEMA = 1
KEY = "graph.histogram"
MAX_NUMBER = 2**53  # up to here a double holds every whole number


@dataclass(frozen=True)
class DecodeProfile:
    """Decode steps by live batch size, and the costs of the buckets that were measured, if any."""

    steps_by_batch_size: dict[int, int]
    replay_ms_by_bucket: dict[int, float] = field(default_factory=dict)
    bytes_by_bucket: dict[int, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        """A hash by content, so that what was computed for a profile is found again; equality compares all fields."""
        return hash(tuple(sorted(self.steps_by_batch_size.items())))


def load_profile(source: Any) -> DecodeProfile:
    """The profile in a finished run's directory, in the file itself, or in a mapping {batch size: number of steps}.

    Raises ValueError that names graph.histogram and what is wrong with it.
    """
    if source is None:
        raise ValueError(f"graph.buckets=tuned needs {KEY}: the directory of a finished run with such a workload "
                         f"({KEY}=outputs/<date>/<run>), or numbers of decode steps by batch size, for instance "
                         f"'{KEY}={{1: 20, 8: 300}}'")
    if isinstance(source, Mapping):
        rows = [{"batch_size": _whole(size), "num_steps": num_steps} for size, num_steps in source.items()]
        return DecodeProfile(_steps(KEY, rows))
    if isinstance(source, (str, Path)) and str(source):
        return _read(Path(source).expanduser())
    raise ValueError(f"{KEY} must be a finished run's directory or a mapping {{batch size: number of decode steps}}; "
                     f"got {source!r}")


def _whole(size: Any) -> Any:
    """The number that a key of digits spells: where keys are text, a mapping's batch sizes are too."""
    return int(size) if isinstance(size, str) and size.isascii() and size.isdecimal() else size


def _read(path: Path) -> DecodeProfile:
    file = path / DECODE_BATCHES_FILE if path.is_dir() else path
    where = f"{KEY}: {file}"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}; a finished run's directory has it") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{where} is not JSON: {error}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != DECODE_BATCHES_SCHEMA:
        raise ValueError(f"{where} must have schema_version {DECODE_BATCHES_SCHEMA}; got {version!r}")
    buckets = _rows(where, document, "buckets")
    timed, weighed = ([row for row in buckets if row.get(name) is not None] for name in ("replay_ms", "bytes"))
    return DecodeProfile(
        steps_by_batch_size=_steps(where, _rows(where, document, "batch_sizes")),
        replay_ms_by_bucket=_by_batch_size(where, timed, "replay_ms", float),
        bytes_by_bucket=_by_batch_size(where, weighed, "bytes", int),
    )


def _rows(where: str, document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = document.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{where}: {name} must be a list of objects; got {rows!r:.80}")
    return rows


def _steps(where: str, rows: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Number of steps by batch size, without the batch sizes that no step had."""
    steps = {size: num for size, num in _by_batch_size(where, rows, "num_steps", int).items() if num > 0}
    if not steps:
        raise ValueError(f"{where} holds no decode step")
    return steps


def _by_batch_size(where: str, rows: Iterable[dict[str, Any]], name: str, kind: type) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for row in rows:
        size: Any = row.get("batch_size")
        value = row.get(name)
        check_range(f"{where}: batch_size", size, 1, MAX_NUMBER)
        check_range(f"{where}: {name} of batch size {size}", value, 0, MAX_NUMBER, kind=kind)
        if size in found:
            raise ValueError(f"{where}: batch size {size} is there twice")
        found[size] = value
    return found
