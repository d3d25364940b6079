"""The files of a run's directory, apart from result.json: what every reported number can be recomputed from.

    config.yaml        the resolved configuration; can be run again
    environment.json   what it ran on
    startup.json       ledger, buckets, what `auto` became
    steps.parquet      one row a step          requests.jsonl   one line a request, with the time of each token
    outputs.jsonl      the answers             error.txt        the traceback of a failed run
    tables/*.csv       the tables of result.json
    decode_batches.json                        what graph.buckets=tuned reads of a run
    plots/*.png

Times count from the moment at which the first requests arrived.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from engine.graph.decode_profile import DECODE_BATCHES_FILE, DECODE_BATCHES_SCHEMA
from engine.records import RequestRecord, StepRecord
from experiments.config import Config
from experiments.messages import Answer, Failed, Finished
from experiments.result import plain, write_csv, write_json
from experiments.tables import decode_profile

CONFIG_FILE, ERROR_FILE = "config.yaml", "error.txt"
STEPS_FILE, REQUESTS_FILE, OUTPUTS_FILE = "steps.parquet", "requests.jsonl", "outputs.jsonl"
TABLES_DIRECTORY = "tables"


def write_config(directory: Path, config: Config) -> None:
    """Write the resolved configuration as a file that Hydra composes again against the schema."""
    from omegaconf import OmegaConf

    values = asdict(config)
    for section, key in (("model", "path"), ("workload", "path"), ("graph", "histogram")):
        path = values[section][key]  # a relative one means nothing from another directory
        if isinstance(path, str) and Path(path).expanduser().exists():
            values[section][key] = str(Path(path).expanduser().absolute())
    text = OmegaConf.to_yaml(OmegaConf.create(values))
    head = ("# Run again from the repository, DIRECTORY being the one of this file:\n"
            "#   python run.py --config-path=DIRECTORY --config-name=config\n")
    (directory / CONFIG_FILE).write_text(f"{head}defaults:\n- schema\n- encore\n- _self_\n{text}", encoding="utf-8")


def write_environment(directory: Path, environment: Mapping[str, Any]) -> None:
    write_json(directory / "environment.json", environment)


def write_finished(directory: Path, finished: Finished, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write all that a finished run recorded, except its plots."""
    startup, steps = finished.startup, finished.records.steps
    write_json(directory / "startup.json", {**plain(startup), "total_s": startup.total_s})
    write_steps(directory, steps)
    write_json(directory / DECODE_BATCHES_FILE,
               {"schema_version": DECODE_BATCHES_SCHEMA, **decode_profile(steps, startup)})
    write_tables(directory / TABLES_DIRECTORY, tables)
    _write_lines(directory / REQUESTS_FILE, map(vars, finished.records.requests))
    _write_lines(directory / OUTPUTS_FILE, map(_output_line, finished.answers))


def write_failure(directory: Path, failed: Failed) -> Path | None:
    """Write the traceback of a failed run, if there is one; returns the file."""
    if failed.traceback is None:
        return None
    path = directory / ERROR_FILE
    path.write_text(failed.traceback, encoding="utf-8")
    return path


def write_tables(directory: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write <name>.csv for each table that has a row."""
    for name, rows in tables.items():
        if rows:
            directory.mkdir(exist_ok=True)
            write_csv(directory / f"{name}.csv", rows)


def write_steps(directory: Path, steps: Sequence[StepRecord]) -> None:
    """Write one row a step; a run without a step has the columns all the same."""
    import pandas

    columns = [column.name for column in fields(StepRecord)]
    table = pandas.DataFrame([vars(step) for step in steps], columns=columns)
    table["bucket"] = table["bucket"].astype("Int64")  # may be null, and is whole
    table.to_parquet(directory / STEPS_FILE, index=False)


def read_steps(directory: Path) -> list[StepRecord]:
    """The steps of a run's directory, as they were recorded."""
    import pandas

    rows = pandas.read_parquet(directory / STEPS_FILE).astype(object).to_dict("records")
    named = [{str(column): value for column, value in row.items()} for row in rows]
    return [StepRecord(**{**row, "bucket": None if pandas.isna(row["bucket"]) else row["bucket"]}) for row in named]


def read_requests(directory: Path) -> list[RequestRecord]:
    """The requests of a run's directory, as they were recorded."""
    lines = (directory / REQUESTS_FILE).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [RequestRecord(**{**row, "token_times_s": tuple(row["token_times_s"])}) for row in rows]


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _output_line(answer: Answer) -> dict[str, Any]:
    return {"prompt": answer.label, "text": answer.text, "finish_reason": answer.finish_reason, "error": answer.error,
            "token_ids": answer.token_ids}
