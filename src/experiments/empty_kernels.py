"""Kernels that do nothing, launched and replayed: the price list of the launch model.

The torch operator adds to one element in place, so that it allocates nothing; the Triton kernel has one argument. The
price of a launch comes from long loops that never wait: fewer launches than CUDA's queue holds.
"""

import torch
import triton

from experiments.launch_model import LAUNCH_QUEUE, LaunchCost
from experiments.launch_timing import StreamClock

NUM_LAUNCHES, NUM_LOOPS = LAUNCH_QUEUE // 2, 9


@triton.jit
def _empty_kernel(ptr):
    return


class EmptyKernels:
    """The two empty kernels on `stream`, and graphs of them."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._element = torch.zeros(1, device=stream.device)

    def launch_torch(self) -> None:
        """Launch the smallest torch operator on the current stream."""
        self._element.add_(1)

    def launch_triton(self) -> None:
        """Launch a Triton kernel without an instruction on the current stream."""
        _empty_kernel[(1,)](self._element, num_warps=1)

    @torch.inference_mode()
    def launch_cost(self, clock: StreamClock) -> LaunchCost:
        """Host time to launch each of the two."""
        return LaunchCost(*(clock.launch_us(launch, NUM_LAUNCHES, NUM_LOOPS)
                            for launch in (self.launch_torch, self.launch_triton)))

    @torch.inference_mode()
    def graph(self, num_kernels: int) -> torch.cuda.CUDAGraph:
        """A graph of so many empty Triton kernels, one after the other."""
        self.launch_triton()  # compiles, which a capture forbids
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(num_kernels):
                self.launch_triton()
        return graph
