"""The only file that knows Weights & Biases. The parent owns the tracked run; the measured child never sees it.

Whether a run is online is decided before wandb is asked for one: without a key its `init` raises or prompts, and
without a network it waits for minutes. Everything is logged after the run, since a single log call can take 0.1 s; only
the system metrics, which follow the child, are collected meanwhile.
"""

import logging
import netrc
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from experiments.config import Config, TrackerConfig
from experiments.memory_report import ledger_rows
from experiments.messages import Finished
from experiments.metrics import STATISTICS, latency_samples, summarise
from experiments.result import RunResult, plain
from experiments.timeline import time_series

if TYPE_CHECKING:
    import wandb

CONNECT_TIMEOUT_S = 1.5  # for the look-up of the name and the connection together
INIT_TIMEOUT_S = 30.0
SYSTEM_METRICS_INTERVAL_S = 5.0
SERIES_GROUPS = ("throughput", "latency", "memory", "graph", "kv", "scheduler")
MAX_TAG_CHARS = 64  # wandb refuses longer ones
log = logging.getLogger("experiments")


class TrackerError(ValueError):
    """Tracking that was asked for by name cannot be had."""


class Tracker(Protocol):
    """Follows one run."""

    def start(self, pid: int | None) -> None:
        """Begin to track the run that process `pid` executes (None: this process)."""

    def facts(self) -> dict[str, str] | None:
        """`mode`, `why` that mode, and the `location` of the tracked run; None if nothing is tracked."""

    def finish(self, result: RunResult, finished: Finished | None, plots: Sequence[Path]) -> None:
        """Log what the run came to and end tracking."""


def make_tracker(config: Config, name: str, sweep: str | None, root: Path) -> Tracker:
    """The tracker that the config chooses, with its files below `root`/wandb; none where WANDB_MODE=disabled.

    TrackerError if tracker.mode=online is asked for and a key or the server is missing.
    """
    if config.tracker.kind == "none" or os.environ.get("WANDB_MODE") == "disabled":
        return NoTracker()
    mode, why = decide_mode(config.tracker)
    return WandbTracker(config, name, sweep, root, mode, why)


class NoTracker:
    """Tracks nothing."""

    def start(self, pid: int | None) -> None:
        pass

    def facts(self) -> dict[str, str] | None:
        return None

    def finish(self, result: RunResult, finished: Finished | None, plots: Sequence[Path]) -> None:
        pass


class WandbTracker:
    """A run of Weights & Biases, on a server or in a directory that can be synchronised later."""

    def __init__(self, config: Config, name: str, sweep: str | None, root: Path, mode: str, why: str) -> None:
        self._config, self._name, self._root = config, name, root
        self._group = config.tracker.group or sweep
        self._mode, self._why = mode, why
        self._run: wandb.Run | None = None

    def start(self, pid: int | None) -> None:
        import wandb

        try:
            self._run = self._init(pid)
        except wandb.errors.Error as error:
            if self._mode == "offline" or self._config.tracker.mode == "online":
                raise TrackerError(f"wandb could not start a run with tracker.mode={self._mode}: {error}") from error
            self._mode, self._why = "offline", f"the server refused: {error}"
            self._run = self._init(pid)

    def _init(self, pid: int | None) -> "wandb.Run":
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True,
                                  init_timeout=INIT_TIMEOUT_S, x_stats_pid=pid or os.getpid(),
                                  x_stats_sampling_interval=SYSTEM_METRICS_INTERVAL_S)
        tags = [tag[:MAX_TAG_CHARS] for tag in (self._config.model.name, *self._config.tracker.tags)]
        self._root.mkdir(parents=True, exist_ok=True)
        return wandb.init(mode="online" if self._mode == "online" else "offline", dir=str(self._root), job_type="run",
                          project=self._config.tracker.project, group=self._group, name=self._name, tags=tags,
                          config=plain(self._config), settings=settings)

    def facts(self) -> dict[str, str] | None:
        if self._run is None:
            return None
        location = self._run.url if self._mode == "online" else str(Path(self._run.settings.sync_dir))
        return {"mode": self._mode, "why": self._why, "location": location or ""}

    def finish(self, result: RunResult, finished: Finished | None, plots: Sequence[Path]) -> None:
        if self._run is None:
            return
        import wandb

        try:
            self._run.config.update({"code": result.code, "environment": result.environment})
            if finished is not None:
                self._log_finished(self._run, result, finished, plots)
            self._run.summary.update(summary(result))
            self._run.finish(exit_code=0 if result.is_finished else 1)
        except wandb.errors.Error as error:  # the run's own files are complete by now
            log.warning("tracking the run failed: %s", error)

    @staticmethod
    def _log_finished(run: "wandb.Run", result: RunResult, finished: Finished, plots: Sequence[Path]) -> None:
        import wandb

        startup, records = finished.startup, finished.records
        run.tags = (*(run.tags or ()), startup.device_name[:MAX_TAG_CHARS])
        run.config.update({"chosen": dict(startup.choices)})
        # Series have an axis of their own, and stay out of the summary, which holds figures of the whole run.
        run.define_metric("time_s", hidden=True, summary="none")
        for group in SERIES_GROUPS:
            run.define_metric(f"{group}/*", step_metric="time_s", summary="none")
        for row in time_series(records.steps, startup):
            run.log(row)
        if result.notes:
            run.notes = "\n".join(result.notes)
        tables = {name: _table(rows) for name, rows in result.tables.items() if rows}
        tables["ledger"] = _table(ledger_rows(startup.ledger))
        if records.requests:
            tables["latency"] = _table([{"latency": name, **dict.fromkeys(STATISTICS), **summarise(samples)}
                                        for name, samples in latency_samples(records.requests).items()])
        run.log({**{f"tables/{name}": table for name, table in tables.items()},
                 **{f"plots/{plot.stem}": wandb.Image(str(plot)) for plot in plots}})


def summary(result: RunResult) -> dict[str, Any]:
    """The figures of the whole run, grouped by slash, as plain values."""
    startup = result.startup or {}
    return {
        "status": result.status,
        **({} if result.reason is None else {"reason": result.reason}),
        **result.metrics,
        **{f"startup/{verb}_s": seconds for verb, seconds in startup.get("seconds", {}).items()},
        **{f"graph/steps: {path}": count for path, count in result.steps_by_path.items()},
        "num_warnings": len(result.warnings),
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> "wandb.Table":
    """A table of at least one row; the first says the columns."""
    import wandb

    columns: list[str | int] = list(rows[0])
    return wandb.Table(columns=columns, data=[[row[str(column)] for column in columns] for row in rows])


def decide_mode(config: TrackerConfig) -> tuple[str, str]:
    """`online` or `offline`, and why. TrackerError if online is asked for and a key or the server is missing."""
    if config.mode == "offline":
        return "offline", "tracker.mode=offline"
    if config.mode == "auto" and os.environ.get("WANDB_MODE") == "offline":
        return "offline", "WANDB_MODE=offline"
    server, obstacle = _server_and_obstacle()
    if obstacle is None:
        return "online", server
    if config.mode == "online":
        raise TrackerError(f"tracker.mode=online: {obstacle}; tracker.mode=offline needs neither key nor server")
    return "offline", obstacle


def _server_and_obstacle() -> tuple[str, str | None]:
    """The server that wandb is set up for, and what keeps a run from it; None if nothing does."""
    no_key = "no key was found (set WANDB_API_KEY, or run `wandb login`)"
    if not _has_environment_key() and not _netrc_path().is_file():
        return "", no_key  # the usual case is told without the second that importing wandb takes
    import wandb

    server = wandb.setup().settings.base_url
    if not _has_environment_key() and not _has_netrc_key(server):
        return server, no_key
    return server, None if _is_reachable(server) else f"{server} cannot be reached"


def _has_environment_key() -> bool:
    return bool(os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))


def _netrc_path() -> Path:
    return Path(os.environ.get("NETRC", "~/.netrc")).expanduser()


def _has_netrc_key(server: str) -> bool:
    try:
        return netrc.netrc(str(_netrc_path())).authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _is_reachable(server: str) -> bool:
    """Whether a TCP connection to `server` opens within a moment.

    In a thread of its own, because looking up a name has no timeout and can take half a minute without a network.
    """
    address = urlsplit(server)
    port = address.port or (80 if address.scheme == "http" else 443)
    is_open = []

    def connect() -> None:
        try:
            socket.create_connection((address.hostname or "", port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError:
            return
        is_open.append(True)

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    return bool(is_open)
