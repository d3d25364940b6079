"""The command line: Hydra composes a run, and what the user got wrong becomes one readable line.

Every point of a sweep is checked before the first one runs. torch and wandb are imported inside the job only, so that
`--help` and `--cfg job` answer at once.
"""

import difflib
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments import app
from experiments.config import Config
from experiments.machine import check_machine
from experiments.paths import anchored, repository_root

USAGE_ERROR, RUN_FAILED, INTERRUPTED = 2, 1, 130
HYDRA_FLAGS_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-name", "-cn", "--config-dir", "-cd",
                          "--config-path", "-cp", "--info", "-i", "--experimental-rerun")
CONFIG_DIRECTORY = repository_root() / "conf"
HYDRA_SETTINGS = Path(__file__).parent / "data" / "hydra.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; returns the exit code: 0, 1 (a run failed), 2 (usage) or 130 (interrupted)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, and `explain` can say them in one line
    statuses: list[str] = []
    sweeps: set[Path] = set()
    refused: list[ValueError] = []

    def job(composed: DictConfig) -> None:
        try:
            config = to_config(composed)
            if config.mode == "plan":
                app.print_plan(config)
                return
        except ValueError as error:  # raised here, Hydra would print a line of its own above ours
            refused.append(error)
            return
        if (sweep := _sweep_directory()) is not None:
            sweeps.add(sweep)
        statuses.append(_run_job(config, sweep))

    scratch = TemporaryDirectory(prefix="encore-plan-")  # Hydra makes a directory for every job, also for a plan
    try:
        check_keys(arguments)
        _register(Path(scratch.name))
        if {"--help", "-h"} & set(arguments):
            print(help_text([text for text in arguments if not text.startswith("-")]))
            return 0
        sys.argv[1:] = arguments
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIRECTORY), config_name="config")(job)()
        if refused:
            raise refused[0]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if show_traceback:
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:  # a directory that cannot be made or written, a full disk
        if show_traceback:
            raise
        print(f"error: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return RUN_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        scratch.cleanup()
        for sweep in sweeps:
            app.finish_sweep(sweep)
    return RUN_FAILED if any(status != "finished" for status in statuses) else 0


def help_text(overrides: Sequence[str]) -> str:
    """Every choice of every group, and every value as `overrides` leave it.

    Hydra's own help takes two seconds for the same.
    """
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIRECTORY)):
        composed = hydra.compose("config", list(overrides))
    groups = sorted(path for path in CONFIG_DIRECTORY.iterdir() if path.is_dir())
    choices = [f"  {group.name}: {', '.join(sorted(file.stem for file in group.glob('*.yaml')))}" for group in groups]
    return "\n".join([
        "Encore: an LLM inference engine that you configure, sweep and compare.", "",
        "Choices, group=choice:", *choices, "",
        "Values, key=value:", OmegaConf.to_yaml(composed).replace("\n", "\n  ").join(("  ", "")).rstrip(), "",
        "Sweep with -m key=a,b,c. --cfg job prints what would run. Bounds stand in src/engine/config.py,",
        "src/engine/graph/config.py, src/engine/memory/config.py and src/experiments/config.py."])


def _sweep_directory() -> Path | None:
    """Where the points of this sweep go; None for a single run."""
    hydra_config = HydraConfig.get()
    return Path(hydra_config.sweep.dir) if hydra_config.mode == RunMode.MULTIRUN else None


def _run_job(config: Config, sweep: Path | None) -> str:
    """Run one point; returns its status."""
    hydra_config = HydraConfig.get()
    result = app.run_one(config, Path(hydra_config.runtime.output_dir), overrides=hydra_config.overrides.task,
                         command=sys.argv, sweep=sweep.name if sweep else None)
    return result.status


def _register(scratch: Path) -> None:
    """Tell Hydra the schema, and the resolvers that the files of conf use. Plans leave their traces in `scratch`."""
    OmegaConf.register_new_resolver("repository", lambda path: str(repository_root() / path), replace=True)
    OmegaConf.register_new_resolver("outputs", lambda mode, root: str(scratch if mode == "plan" else anchored(root)),
                                    replace=True)
    # Cached, so that one run has one id wherever it is asked for.
    OmegaConf.register_new_resolver("unique", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
    ConfigStore.instance().store(name="schema", node=schema())
    # Stored, so that a saved configuration finds it when its own directory is the one that Hydra searches.
    ConfigStore.instance().store(name="encore", node=OmegaConf.load(HYDRA_SETTINGS), package="_global_")
    ConfigStore.instance().store(group="hydra/sweeper", name="checked", provider="encore", node={
        "_target_": "hydra_plugins.checked_sweeper.CheckedSweeper", "max_batch_size": None, "params": None})


def schema() -> DictConfig:
    """The dataclasses as a config that can be overridden: frozen ones arrive read-only, and those required missing."""
    node = OmegaConf.structured(Config)
    _fill(node, Config)
    return node


def _fill(node: DictConfig, cls: type) -> None:
    OmegaConf.set_readonly(node, None)
    for name, hint in get_type_hints(cls).items():
        if (nested := _dataclass_of(hint)) is not None:
            with open_dict(node):
                node[name] = OmegaConf.structured(nested)
            _fill(node[name], nested)


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass in a type hint, also if it is optional."""
    candidates = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((candidate for candidate in candidates if is_dataclass(candidate)), None)  # type: ignore[return-value]


def to_config(composed: DictConfig) -> Config:
    """The checked configuration; ValueError in one line for what is out of range or contradicts itself."""
    composed = composed.copy()
    with open_dict(composed):
        composed.pop("hydra", None)
    try:
        config: Config = OmegaConf.to_object(composed)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error
    check_machine(config)
    return config


def check_keys(arguments: Sequence[str]) -> None:
    """ValueError for an override whose key the schema does not have, also one that `+` would add in silence."""
    texts = [text for text in arguments if not text.startswith(("-", "~"))]
    for text in texts:
        if "=" not in text and arguments[arguments.index(text) - 1] not in HYDRA_FLAGS_WITH_VALUE:
            raise ValueError(f"{text}: an override is key=value")
    texts = [text for text in texts if "=" in text]
    for text in texts:
        try:
            [override] = OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            raise ValueError(f"{text}: {str(error).splitlines()[0]}") from error
        key = override.key_or_group
        if key.split(".")[0] in ("hydra", "", "experiment") or key.startswith("hydra/"):
            continue
        _check_key(key.replace("/", "."), text)


def _check_key(key: str, text: str) -> None:
    cls: Any = Config
    path = ""
    for part in key.split("."):
        if not is_dataclass(cls):
            if cls is Any:
                if text.startswith("+"):  # Hydra cannot add to a mapping that is null
                    raise ValueError(f"{text}: set {path} as a whole, such as '{path}={{rope_type:llama3,factor:8}}'")
                return  # a free mapping, such as rope_scaling
            raise ValueError(f"{text}: {path} has no keys of its own")
        hints = get_type_hints(cls)
        if part not in hints:
            raise ValueError(f"{text}: there is no key {_dotted(path, part)}; {path or 'the top level'} has "
                             + ", ".join(field.name for field in fields(cls)) + _suggest(path, part, hints))
        path = _dotted(path, part)
        cls = _dataclass_of(hints[part]) or hints[part]


def _dotted(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _suggest(path: str, part: str, hints: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(part, hints, n=1)
    return f". Did you mean {_dotted(path, close[0])}?" if close else ""


def explain(error: Exception) -> str:
    """What is wrong, in one line: the first sentence of Hydra's or OmegaConf's message with the key it concerns."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, MissingConfigException):
        options = [line for line in lines[1:] if "=" not in line and " " not in line]
        return lines[0] + (f"; available: {', '.join(options)}" if options else "")
    if cause is not None:
        return f"{lines[0].removeprefix('Error merging override ')}: {str(cause).splitlines()[0]}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {lines[0]}"
    return lines[0] if lines else repr(error)
