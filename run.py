"""Run one configuration, or with `-m` a sweep of them. See README.md, or `python run.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # works from any directory, also when not installed

if __name__ == "__main__":  # a run's child process imports this file, and needs nothing of it
    from experiments.cli import main

    sys.exit(main())
