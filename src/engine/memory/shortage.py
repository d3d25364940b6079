"""When device memory does not suffice: telling that from other errors, and the sum that explains it."""

from collections.abc import Mapping

import torch

from engine.units import GIB, MIB

CUDA_ERROR_OUT_OF_MEMORY = 2  # error_code of torch.AcceleratorError
# Libraries say it in words alone: Triton's launcher, cuBLAS's handle.
PHRASES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device has no memory left, whichever library it comes from."""
    if isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", None) == CUDA_ERROR_OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)


def size(num_bytes: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / MIB:.1f} MiB"


def sum_text(parts: Mapping[str, int]) -> str:
    """The parts that take something, as text: `weights 1.11 GiB, graph pool 58.0 MiB`."""
    return ", ".join(f"{part.replace('_', ' ')} {size(num_bytes)}" for part, num_bytes in parts.items() if num_bytes)
