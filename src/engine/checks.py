"""Checks that say what a setting must be: key, bound and value in one line.

The module imports nothing of the engine, so that every config object can stand beside its component.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def check_choice(key: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in (names := tuple(allowed)):
        raise ValueError(f"{key} must be one of {', '.join(names)}; got {value!r}")


def check_range(key: str, value: Any, low: float, high: float | None = None, kind: type = int) -> None:
    """Raise ValueError unless `value` is a `kind` in [low, high]; booleans are not numbers here."""
    bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
    wanted = "a whole number" if kind is int else "a number"
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number or not (low <= value <= (float("inf") if high is None else high)):
        raise ValueError(f"{key} must be {wanted} {bounds}; got {value!r}")


def check_sampling(prefix: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError unless temperature, top_k, top_p and min_p in `values` are in range."""
    check_range(f"{prefix}temperature", values["temperature"], 0, 100, kind=float)
    check_range(f"{prefix}top_k", values["top_k"], 0, 2**31 - 1)
    check_range(f"{prefix}min_p", values["min_p"], 0, 1, kind=float)
    check_range(f"{prefix}top_p", values["top_p"], 0, 1, kind=float)
    if values["top_p"] == 0:
        raise ValueError(f"{prefix}top_p must be in (0, 1]; got 0")
    if values["seed"] is not None:
        check_range(f"{prefix}seed", values["seed"], 0, 2**63 - 1)
