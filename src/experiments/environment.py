"""What a number was measured on: code, packages, processor, memory, GPU. Nothing here imports what it reports on."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "flash-attn", "numpy", "hydra-core",
            "omegaconf", "wandb")
COMMAND_TIMEOUT_S = 5


def environment() -> dict[str, Any]:
    """Python, package versions (None: not installed), host and GPUs, as plain values for JSON."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "variables": {name: value for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
                      if (value := os.environ.get(name)) is not None},
    }


def code_version(root: Path) -> dict[str, Any]:
    """`commit` (None outside a repository or before its first commit) and `is_dirty` of the checkout at `root`."""
    commit = _output("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain")
    return {"commit": commit, "is_dirty": None if changes is None else bool(changes)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU of the host; empty without a driver."""
    fields = ("name", "driver_version", "memory.total", "uuid")
    listing = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in (listing or "").splitlines()]


def _output(*command: str) -> str | None:
    """Standard output of a command; None if it is not there, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
