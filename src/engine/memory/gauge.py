"""Reading device memory: what the driver says, of the device and of this process, and what torch's allocator says.

The views are kept apart on purpose: what a graph, a stream or a loaded kernel takes outside torch's allocator shows in
their difference alone.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Reading:
    """One device's memory at one moment, in bytes."""

    used: int  # on the device, by every process
    process: int | None  # by this process, as the driver reports it; None: it does not
    reserved: int  # by torch's allocator, live or not
    pools: int  # of these, in graph pools
    allocated: int  # in live tensors outside graph pools

    @property
    def cached(self) -> int:
        """Held by torch's allocator outside graph pools, and in no tensor."""
        return self.reserved - self.pools - self.allocated


class MemoryGauge(Protocol):
    """Bytes on one device."""

    source: str  # whose figure a process's bytes are: nvml | none | emulated
    total_bytes: int

    def context_bytes(self) -> int:
        """What the device gives to a process that does nothing with it; 0 where that is not known."""

    def read(self) -> Reading: ...

    def used_bytes(self) -> int:
        """In use on the device by every process, as the driver (or the system) reports it."""

    def reserved_bytes(self) -> int:
        """Held by torch's allocator, live or not."""

    def outside_bytes(self) -> int:
        """In use outside torch's allocator: by this process, or by all where the driver does not tell them apart."""

    def peaks(self) -> tuple[int, int]:
        """Most bytes ever allocated and most ever reserved since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def trim(self) -> None:
        """Return cached memory to the device, so that the driver's figure means what is needed."""

    def cap(self, num_bytes: int | None) -> None:
        """Let torch's allocator reserve at most so much; it gives cached blocks back before it exceeds that."""

    def watch(self) -> AbstractContextManager[object]:
        """Count what is allocated inside, where nobody else does."""

    def snapshot(self) -> dict[str, int]:
        """The figures a run reports."""


def make_gauge(device: torch.device) -> MemoryGauge:
    """The gauge of `device`; a CPU stands in for a device with the host's memory."""
    if device.type == "cuda":
        from engine.memory.cuda_gauge import CudaGauge  # needs a driver
        return CudaGauge(device)
    from engine.memory.emulated import EmulatedGauge
    return EmulatedGauge()
