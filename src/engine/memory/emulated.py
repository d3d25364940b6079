"""A CPU standing in for a device: the live tensors of a start-up are counted, against the host's memory.

A context, loaded kernels and graphs take nothing here. What remains is exact and the same on every run, so that the
order of a KV memory policy's verbs and the sums of the ledger can be tried anywhere.
"""

import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.memory.gauge import Reading
from engine.memory.ledger import EMULATED


class EmulatedGauge:
    """The host's memory as a device. Outside `watch` nothing is counted, and only what has been counted is freed."""

    source = EMULATED

    def __init__(self) -> None:
        memory = psutil.virtual_memory()
        self.total_bytes = memory.total
        self._used_before = memory.total - memory.available
        self._mapped_bytes = 0
        self._meter = TensorMeter()
        self._process = psutil.Process()

    def context_bytes(self) -> int:
        return 0

    def read(self) -> Reading:
        live = self._meter.num_bytes
        return Reading(self.used_bytes(), live + self._mapped_bytes, reserved=live, pools=0, allocated=live)

    def used_bytes(self) -> int:
        return self._used_before + self._meter.num_bytes + self._mapped_bytes

    def map(self, num_bytes: int) -> None:
        """Count memory that stands behind addresses; torch.OutOfMemoryError if the host has less."""
        if self.used_bytes() + num_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes on an emulated device of {self.total_bytes}, of which "
                                         f"{self.used_bytes()} are in use")
        self._mapped_bytes += num_bytes

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor's storage, nor views of it."""
        self._meter.leave_out(tensor.untyped_storage())

    def reserved_bytes(self) -> int:
        return self._meter.num_bytes

    def outside_bytes(self) -> int:
        return self._mapped_bytes

    def peaks(self) -> tuple[int, int]:
        return self._meter.peak_bytes, self._meter.peak_bytes

    def reset_peak(self) -> None:
        self._meter.peak_bytes = self._meter.num_bytes

    def trim(self) -> None:
        """Nothing is cached."""

    def cap(self, num_bytes: int | None) -> None:
        """The host's allocator has no cap; tensors are not counted while requests are served."""

    def watch(self) -> AbstractContextManager[object]:
        return self._meter

    def snapshot(self) -> dict[str, int]:
        # Not getrusage: its peak is inherited from the parent that started this process.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return {"rss_bytes": self._process.memory_info().rss,
                "peak_rss_bytes": int(status.split("VmHWM:")[1].split()[0]) * 1024}  # KiB


class TensorMeter(TorchDispatchMode):
    """Counts the bytes of every storage that an operator returns while it is active, until the storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.peak_bytes = 0
        self._finalizers: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._count(leaf.untyped_storage())
        return outputs

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Do not count this storage, nor that it is freed."""
        if (finalizer := self._finalizers.get(storage)) is not None:
            finalizer()
        self._finalizers[storage] = None

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._finalizers:
            return
        size = storage.nbytes()
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self._finalizers[storage] = weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.num_bytes -= size
