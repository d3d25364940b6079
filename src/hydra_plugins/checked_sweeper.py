"""Hydra's basic sweeper, with every point checked against the schema before the first one runs.

Hydra finds sweepers only in the namespace package `hydra_plugins`.
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser


class CheckedSweeper(BasicSweeper):
    """A typing error in the last point is reported before the first has spent an hour."""

    def sweep(self, arguments: list[str]) -> Any:
        # Imported here: Hydra loads its plugins while the schema is still being registered.
        from experiments.cli import to_config

        assert self.hydra_context is not None and self.config is not None
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(loader).parse_overrides([*self._parse_config(), *arguments])
        for override in overrides:
            if override.key_or_group == "experiment" and override.is_sweep_override():
                raise ValueError(f"experiment={override.get_value_string()}: an experiment is a sweep of its own; "
                                 f"run one at a time")
        for (*points,) in self.split_arguments(overrides, None):
            for point in points:
                to_config(loader.load_sweep_config(self.config, point))
        return super().sweep(arguments)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing is left to check."""
