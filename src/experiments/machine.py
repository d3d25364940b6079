"""What this machine cannot do is said before a child process, torch or a tracker is started."""

import ctypes
from functools import cache
from pathlib import Path

from experiments.config import Config

CUDA_SUCCESS = 0


def check_machine(config: Config) -> None:
    """ValueError for a device that is not here, a setting that this device has not, or a local path that is missing."""
    if config.device == "cuda" and not has_nvidia_gpu():
        raise ValueError("device=cuda needs an NVIDIA GPU and its driver, and none was found; use auto or cpu")
    if config.device == "auto" and not has_nvidia_gpu():
        config.check_runs_on("cpu")
    _check_local_path("model.path", config.model.path, hint="; `make model` brings the default model")
    _check_local_path("workload.path", config.workload.path)


@cache
def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver reports a GPU; asks the driver itself, because importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == CUDA_SUCCESS and driver.cuDeviceGetCount(ctypes.byref(count)) == CUDA_SUCCESS \
        and count.value > 0


def _check_local_path(key: str, path: str | None, hint: str = "") -> None:
    """A path that starts like one of the file system's is no hub id."""
    if path is not None and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
        raise ValueError(f"{key}={path} does not exist{hint}")
