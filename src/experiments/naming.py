"""A run's readable name: the model, the workload, and what was overridden. It stays short whatever was overridden."""

import hashlib
import re
from collections.abc import Sequence

from experiments.config import Config

MAX_NAME_CHARS = 80
MAX_VALUE_CHARS = 24
_DIGEST_CHARS = 6
_TOLD_OTHERWISE = ("model", "model.name", "model.path", "workload", "workload.kind", "tracker")
_SAYS_NOTHING = ("run.", "tracker.", "hydra.", "hydra/")  # how a run is executed and logged, not what is run


def run_name(config: Config, overrides: Sequence[str]) -> str:
    """`run.name`, or a name such as `smollm2-135m text buckets=pow2`, at most 80 characters.

    A name that had to be cut ends in a digest of all overrides, so that two runs which differ do not share a name.
    """
    if config.run.name:
        return config.run.name
    name = " ".join([config.model.name, config.workload.kind, *filter(None, map(_short, overrides))])
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[:MAX_NAME_CHARS - _DIGEST_CHARS - 2]}… {digest}"


def _short(override: str) -> str:
    """`buckets=pow2` of `graph.buckets=pow2`; empty for what the name already says."""
    key, _, value = override.lstrip("+~").partition("=")
    name = key.rpartition(".")[2]
    if key in _TOLD_OTHERWISE or key.startswith(_SAYS_NOTHING):
        return ""
    value = value.strip("'\"")
    if len(value) > MAX_VALUE_CHARS and re.fullmatch(r"\[.*\]", value):
        value = f"[{value.count(',') + 1} values]"
    return f"{name}={value if len(value) <= MAX_VALUE_CHARS else value[:MAX_VALUE_CHARS - 1] + '…'}"
