"""What the driver reports for one process, through NVML; and what it reports for a process that does nothing.

`mem_get_info` counts every process on the device together; the ledger needs this one apart from the others.
"""

import os
import subprocess
import sys

import pynvml
import torch

# A context and nothing else: without torch, so that none of its kernels is loaded.
BARE_PROCESS = """
import os, sys
import pynvml
from cuda.bindings import driver

index, uuid = int(sys.argv[1]), sys.argv[2]
driver.cuInit(0)
status, device = driver.cuDeviceGet(index)
status, context = driver.cuDevicePrimaryCtxRetain(device)
driver.cuCtxSetCurrent(context)
driver.cuCtxSynchronize()
pynvml.nvmlInit()
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
print(*[process.usedGpuMemory for process in processes if process.pid == os.getpid()])
"""
BARE_PROCESS_TIMEOUT_S = 60


class ProcessMemory:
    """This process on one CUDA device, which needs a context there; and a bare one, started beside it."""

    def __init__(self, device: torch.device) -> None:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._pid = os.getpid()
        self._handle = None
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            pass  # a driver without NVML, or a device that it does not know: nothing is reported
        self._bare = None
        if self.num_bytes() is not None:
            self._bare = subprocess.Popen([sys.executable, "-c", BARE_PROCESS, str(device.index), uuid],
                                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def num_bytes(self) -> int | None:
        """Device bytes of this process; None where the driver lists no processes, or another number for this one."""
        if self._handle is None:
            return None
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return next((process.usedGpuMemory for process in processes if process.pid == self._pid), None)

    def bare_bytes(self) -> int:
        """Device bytes of a process with a context and nothing else; 0 where it could not be measured."""
        if self._bare is None:
            return 0
        try:
            figure = self._bare.communicate(timeout=BARE_PROCESS_TIMEOUT_S)[0].strip()
        except subprocess.TimeoutExpired:
            self._bare.kill()
            figure = ""
        self._bare = None
        return int(figure) if figure.isdecimal() else 0
