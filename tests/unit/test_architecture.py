"""Imports go one way: the engine knows neither Hydra nor wandb nor who measures it, and policies hold no tensors."""

import ast
from pathlib import Path

import pytest

import engine
import experiments

ENGINE = Path(engine.__file__).parent
EXPERIMENTS = Path(experiments.__file__).parent
WITHOUT_TORCH = ("config.py", "request.py", "records.py", "block_allocator.py", "scheduler", "graph/buckets.py",
                 "graph/config.py", "graph/tuner.py", "memory/config.py", "memory/policies",
                 "memory/ledger.py", "memory/geometry.py", "memory/book.py", "graph/estimate.py")


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("file", sorted(ENGINE.rglob("*.py")), ids=lambda file: str(file.relative_to(ENGINE)))
def test_engine_imports_nothing_of_configuration_tracking_or_experiments(file):
    assert not imported(file) & {"hydra", "omegaconf", "wandb", "experiments"}


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_policies_hold_no_tensors(place):
    path = ENGINE / place
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        assert "torch" not in imported(file), file


def test_one_file_knows_wandb():
    assert [file.name for file in sorted(EXPERIMENTS.rglob("*.py")) if "wandb" in imported(file)] == ["tracking.py"]


@pytest.mark.parametrize("file", sorted([*ENGINE.rglob("*.py"), *EXPERIMENTS.rglob("*.py")]), ids=lambda f: f.name)
def test_every_module_says_what_it_is_about(file):
    assert ast.get_docstring(ast.parse(file.read_text()))
