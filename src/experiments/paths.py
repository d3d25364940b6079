"""Where files lie. Outputs belong to the repository, so that a run started from any directory is found again."""

from pathlib import Path

PLOTS_DIRECTORY = "plots"  # of a run, and of a sweep


def repository_root() -> Path:
    """The checkout that this package lies in; the current directory where the package is installed without one."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "run.py").is_file() and (checkout / "conf").is_dir() else Path.cwd()


def anchored(path: str) -> Path:
    """`path`, taken from the repository's root where it is relative."""
    return repository_root() / path
