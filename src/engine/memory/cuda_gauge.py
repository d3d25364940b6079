"""The memory of a CUDA device, by its driver and by torch's allocator."""

from contextlib import AbstractContextManager, nullcontext

import torch

from engine.memory.gauge import Reading
from engine.memory.ledger import NONE, NVML
from engine.memory.process_memory import ProcessMemory

DEFAULT_POOL = (0, 0)  # segment_pool_id of what no graph owns


class CudaGauge:
    """The current CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.mem_get_info(device)[1]
        self._process = ProcessMemory(device)
        self.source = NONE if self._process.num_bytes() is None else NVML

    def context_bytes(self) -> int:
        return self._process.bare_bytes()

    def read(self) -> Reading:
        used, process = self.used_bytes(), self._process.num_bytes()
        segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == self._device.index]
        pools = [segment for segment in segments if segment["segment_pool_id"] != DEFAULT_POOL]
        others = [segment for segment in segments if segment["segment_pool_id"] == DEFAULT_POOL]
        return Reading(used, process, reserved=sum(segment["total_size"] for segment in segments),
                       pools=sum(segment["total_size"] for segment in pools),
                       allocated=sum(segment["allocated_size"] for segment in others))

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return self.total_bytes - torch.cuda.mem_get_info(self._device)[0]

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def outside_bytes(self) -> int:
        used = self.used_bytes()
        process = self._process.num_bytes()
        return (used if process is None else process) - self.reserved_bytes()

    def peaks(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def cap(self, num_bytes: int | None) -> None:
        share = 1.0 if num_bytes is None else min(1.0, num_bytes / self.total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def watch(self) -> AbstractContextManager[object]:
        return nullcontext()

    def snapshot(self) -> dict[str, int]:
        return {"allocated_bytes": torch.cuda.memory_allocated(self._device), "peak_bytes": self.peaks()[0],
                "device_used_bytes": self.used_bytes()}
