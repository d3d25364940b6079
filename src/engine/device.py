"""The device's queue of work: one stream for all that an engine launches, and copies that do not wait for it.

Start-up, eager steps, captures and replays share the stream, so library workspaces, which exist once a stream, exist
once; and a capture, which the default stream forbids, needs none of its own.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


@cache
def engine_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of the device that engines launch on; None for a CPU.

    One for all engines of a process, since a library keeps a workspace for each stream that it has seen.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is launched inside goes to `stream`."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` on `device`, without waiting: a copy from pinned memory does not stall the launches before it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
