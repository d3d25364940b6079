"""What this machine cannot do is said before a child process, torch or a tracker is started."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from experiments.config import Config

CUDA_SUCCESS = 0


def check_machine(config: Config) -> None:
    """ValueError for a device that is not here, a setting that this device has not, or a local path that is missing."""
    device_type = "cpu" if config.device == "auto" and not has_gpu(config) else config.device
    if device_type == "cuda" and not has_gpu(config):
        hint = "; plan.device_bytes=... plans for one" if config.mode == "plan" else ""
        raise ValueError(f"device=cuda needs an NVIDIA GPU and its driver, and none was found; use auto or cpu{hint}")
    if device_type == "cpu":
        config.check_runs_on("cpu")
    _check_local_path("model.path", config.model.path, hint="; `make model` brings the default model")
    _check_local_path("workload.path", config.workload.path)
    _check_local_path("graph.histogram", config.graph.histogram)


def has_gpu(config: Config) -> bool:
    """Whether this run has a GPU: one of this machine, or one that a plan is told to assume."""
    is_assumed = config.mode == "plan" and config.plan.device_bytes is not None
    return has_nvidia_gpu() or is_assumed


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver reports a GPU; asks the driver itself, because importing torch takes seconds."""
    return gpu_bytes() is not None


@cache
def gpu_bytes() -> int | None:
    """Memory of the first GPU, as the NVIDIA driver reports it; None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    is_known = driver.cuInit(0) == CUDA_SUCCESS and driver.cuDeviceGet(ctypes.byref(device), 0) == CUDA_SUCCESS \
        and driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == CUDA_SUCCESS
    return size.value if is_known else None


def _check_local_path(key: str, path: Any, hint: str = "") -> None:
    """A path that starts like one of the file system's is no hub id, and what is no text is no path."""
    if isinstance(path, str) and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
        raise ValueError(f"{key}={path} does not exist{hint}")
