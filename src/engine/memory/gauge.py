"""Reading device memory: what the driver says, what torch's allocator says, and a CPU's resident set.

The two views are kept apart on purpose: what a graph takes outside torch's allocator shows only in their difference.
"""

from pathlib import Path
from typing import Protocol

import psutil
import torch


class MemoryGauge(Protocol):
    """Bytes on one device."""

    total_bytes: int

    def used_bytes(self) -> int:
        """In use on the device by every process, as the driver (or the system) reports it."""

    def allocated_bytes(self) -> int:
        """In live tensors of this process."""

    def reserved_bytes(self) -> int:
        """Held by torch's allocator, live or not."""

    def peak_allocated_bytes(self) -> int:
        """Most that was ever allocated since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def trim(self) -> None:
        """Return cached memory to the device, so that the driver's figure means what is needed."""

    def snapshot(self) -> dict[str, int]:
        """The figures a run reports."""


class CudaGauge:
    """The current CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return self.total_bytes - torch.cuda.mem_get_info(self._device)[0]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_allocated_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def snapshot(self) -> dict[str, int]:
        return {"allocated_bytes": self.allocated_bytes(), "peak_bytes": self.peak_allocated_bytes(),
                "device_used_bytes": self.used_bytes()}


class HostGauge:
    """The host's memory, seen as this process's resident set."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.total_bytes = psutil.virtual_memory().total

    def used_bytes(self) -> int:
        return psutil.virtual_memory().total - psutil.virtual_memory().available

    def allocated_bytes(self) -> int:
        return self._process.memory_info().rss

    def reserved_bytes(self) -> int:
        return self.allocated_bytes()

    def peak_allocated_bytes(self) -> int:
        # Not getrusage: its peak is inherited from the parent that started this process.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024  # KiB

    def reset_peak(self) -> None:
        """The kernel keeps one peak for the process's whole life; there is nothing to reset."""

    def trim(self) -> None:
        """The host's allocator returns memory by itself."""

    def snapshot(self) -> dict[str, int]:
        return {"rss_bytes": self.allocated_bytes(), "peak_rss_bytes": self.peak_allocated_bytes()}


def make_gauge(device: torch.device) -> MemoryGauge:
    """The gauge of `device`."""
    return CudaGauge(device) if device.type == "cuda" else HostGauge()
