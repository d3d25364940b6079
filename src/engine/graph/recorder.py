"""How work becomes something that can be replayed: CUDA graphs, and what stands in for them without CUDA.

A recorder knows streams, pools and graphs, and nothing of buckets. The emulation calls the work again on the same
buffers, which keeps every rule about addresses, padding and lookup true on a CPU.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

CUDA_GRAPH, EMULATED = "cuda_graph", "emulated"
NUM_TIMED_REPLAYS = 3

Work = Callable[[], None]


@dataclass(frozen=True)
class Recording:
    """A captured piece of work; `graph` is None where nothing was recorded."""

    replay: Work
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True)
class RecordingFacts:
    """What can be told of a recording; None where nothing was recorded."""

    num_nodes: int | None = None  # kernels, copies, memory sets
    num_kernels: int | None = None
    replay_ms: float | None = None  # device time of one replay


class Recorder(Protocol):
    """Captures on the current stream."""

    name: str

    def warm_up(self, work: Work, num_runs: int) -> None:
        """Run the work as it will be captured, so that nothing first happens inside the recording."""

    def record(self, work: Work) -> Recording:
        """Capture the work, ready to be replayed at full speed."""

    def facts(self, recording: Recording) -> RecordingFacts:
        """Count the nodes and time some replays."""


class CudaGraphRecorder:
    """CUDA graphs of the current stream, in one memory pool or in one each."""

    name = CUDA_GRAPH

    def __init__(self, has_shared_pool: bool) -> None:
        self._pool = torch.cuda.graph_pool_handle() if has_shared_pool else None

    def warm_up(self, work: Work, num_runs: int) -> None:
        for _ in range(num_runs):
            work()
        torch.cuda.current_stream().synchronize()

    def record(self, work: Work) -> Recording:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # kept, so that its nodes can be counted
        graph.capture_begin(pool=self._pool)
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the broken capture's own complaint would hide what broke it
                graph.capture_end()
            raise
        graph.capture_end()
        graph.instantiate()
        graph.replay()  # the first replay uploads the graph; live steps should not pay for that
        torch.cuda.current_stream().synchronize()
        return Recording(graph.replay, graph)

    def facts(self, recording: Recording) -> RecordingFacts:
        assert recording.graph is not None, "a CUDA graph recorder's recording has a graph"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED_REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            recording.replay()
            event.record()
        events[-1].synchronize()
        times_ms = sorted(before.elapsed_time(after) for before, after in pairwise(events))
        return RecordingFacts(*count_nodes(recording.graph), times_ms[NUM_TIMED_REPLAYS // 2])


def count_nodes(graph: torch.cuda.CUDAGraph) -> tuple[int, int]:
    """Nodes of a captured graph, and how many of them are kernels."""
    from cuda.bindings import driver  # comes with torch's CUDA builds

    handle = driver.CUgraph(graph.raw_cuda_graph())
    status, _, num_nodes = driver.cuGraphGetNodes(handle)
    assert status == driver.CUresult.CUDA_SUCCESS, f"cuGraphGetNodes: {status}"
    status, nodes, _ = driver.cuGraphGetNodes(handle, num_nodes)
    assert status == driver.CUresult.CUDA_SUCCESS, f"cuGraphGetNodes: {status}"
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return num_nodes, sum(driver.cuGraphNodeGetType(node)[1] == kernel for node in nodes)


class EmulatedRecorder:
    """The work itself, called again: same buffers, no recording."""

    name = EMULATED

    def warm_up(self, work: Work, num_runs: int) -> None:
        """A CPU compiles and allocates nothing by shape, so there is nothing to keep out of a recording."""

    def record(self, work: Work) -> Recording:
        return Recording(work)

    def facts(self, recording: Recording) -> RecordingFacts:
        return RecordingFacts()


def make_recorder(device: torch.device, has_shared_pool: bool) -> Recorder:
    """CUDA graphs where there is CUDA, else their emulation."""
    return CudaGraphRecorder(has_shared_pool) if device.type == "cuda" else EmulatedRecorder()
