"""A range of device addresses that exist before the memory behind them: CUDA virtual memory.

Addresses are reserved once, and memory is mapped behind them from the front, as much as is asked for and when it is. A
graph that was captured against the range reaches all of it, also what is mapped after the capture. The driver's
functions do not synchronise; `close` does, since unmapping memory that a kernel reads is a fault.
"""

from typing import Any

import numpy as np
import torch

from engine.memory.emulated import EmulatedGauge
from engine.memory.gauge import MemoryGauge

UNSIGNED_BYTE = "|u1"  # typestr of __cuda_array_interface__


def has_address_ranges(device: torch.device) -> bool:
    """Whether the device and its driver can map memory behind reserved addresses; so it is taken for granted of a
    device that is emulated, or planned for and not here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(_call(driver.cuDeviceGetAttribute, attribute, device.index))


class _Granules:
    """Memory is mapped by whole granules."""

    granularity: int  # bytes

    def round_down(self, num_bytes: int) -> int:
        """As much of `num_bytes` as can be mapped without taking more."""
        return num_bytes // self.granularity * self.granularity

    def _round_up(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granularity) * self.granularity


class AddressRange(_Granules):
    """`num_bytes` addresses, rounded up to the device's granularity, of which the first `mapped_bytes` have memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError if the driver has no such range."""
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        place = driver.CUmemAllocationProp()
        place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.location.id = device.index
        self._place = place
        self.granularity = _call(driver.cuMemGetAllocationGranularity, place,
                                 driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        self.num_bytes = self._round_up(num_bytes)
        self.mapped_bytes = 0
        self._address = int(_call(driver.cuMemAddressReserve, self.num_bytes, 0, 0, 0))

    def map_up_to(self, num_bytes: int) -> None:
        """Map memory behind the first `num_bytes`, unless it is there. Raises torch.OutOfMemoryError if none is left,
        and then maps nothing."""
        size = self._round_up(num_bytes) - self.mapped_bytes
        if size <= 0:
            return
        assert self._round_up(num_bytes) <= self.num_bytes, f"{num_bytes} bytes of a range of {self.num_bytes}"
        driver, start = self._driver, self._address + self.mapped_bytes
        memory = _call(driver.cuMemCreate, size, self._place, 0)
        try:
            _call(driver.cuMemMap, start, size, 0, memory, 0)
        finally:
            _call(driver.cuMemRelease, memory)  # a mapping keeps its memory
        access = driver.CUmemAccessDesc()
        access.location = self._place.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            _call(driver.cuMemSetAccess, start, size, [access], 1)
        except BaseException:
            _call(driver.cuMemUnmap, start, size)
            raise
        self.mapped_bytes += size

    def tensor(self) -> torch.Tensor:
        """The whole range as bytes. It owns nothing: not to be touched beyond what is mapped, or after `close`."""
        assert self.mapped_bytes, "torch asks the driver for the device of the first address, which needs memory"
        return torch.as_tensor(_DeviceBytes(self._address, self.num_bytes), device=self._device)

    def close(self) -> None:
        """Give memory and addresses back; closing twice does nothing."""
        if self._address:
            torch.cuda.synchronize(self._device)
            if self.mapped_bytes:
                _call(self._driver.cuMemUnmap, self._address, self.mapped_bytes)
            _call(self._driver.cuMemAddressFree, self._address, self.num_bytes)
            self._address = self.mapped_bytes = 0


class EmulatedAddressRange(_Granules):
    """Host memory that becomes resident when it is written; the gauge counts what is mapped."""

    granularity = 2 << 20

    def __init__(self, num_bytes: int, gauge: EmulatedGauge) -> None:
        self._gauge = gauge
        self._bytes = torch.from_numpy(np.empty(num_bytes, np.uint8))
        gauge.leave_out(self._bytes)
        self.num_bytes, self.mapped_bytes = num_bytes, 0

    def map_up_to(self, num_bytes: int) -> None:
        """As AddressRange does."""
        size = self._round_up(num_bytes) - self.mapped_bytes
        if size > 0:
            self._gauge.map(size)
            self.mapped_bytes += size

    def tensor(self) -> torch.Tensor:
        """The whole range as bytes."""
        return self._bytes

    def close(self) -> None:
        """Give the memory back once no view is left."""
        self._gauge.map(-self.mapped_bytes)
        self.mapped_bytes = 0


def reserve_addresses(num_bytes: int, device: torch.device, gauge: MemoryGauge) -> AddressRange | EmulatedAddressRange:
    """A range of addresses on `device`, without memory."""
    if isinstance(gauge, EmulatedGauge):
        return EmulatedAddressRange(num_bytes, gauge)
    return AddressRange(num_bytes, device)


class _DeviceBytes:
    """What torch needs to see foreign device memory without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": UNSIGNED_BYTE, "data": (address, False),
                                         "version": 3, "strides": None}


def _call(function: Any, *arguments: Any) -> Any:
    """The result of a driver call. Raises torch.OutOfMemoryError for want of memory, RuntimeError for the rest."""
    from cuda.bindings import driver

    status, *results = function(*arguments)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{function.__name__}: the device is out of memory")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None
