"""Two clocks for work that is launched and not waited for, and a trace of what it was.

Each repetition starts on an idle GPU, so the host waits for room in the launch queue only if one step alone has more
launches than it holds (`launch_model` then says so); and the time from a CUDA event before the first launch to one
after the last is that of a step which begins when the one before it has ended.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.launch_model import Timing, Work

Launch = Callable[[], None]
NUM_TRACES = 3
KERNEL, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")  # categories of a trace's events
COMPILED_PREFIX = "triton_"  # kernels of torch.compile


class StreamClock:
    """Measures what is launched on one stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def timing(self, launch: Launch, num_repeats: int) -> Timing:
        """Medians of `num_repeats` runs, after one that warms up."""
        runs = [self._time_once(launch) for _ in range(num_repeats + 1)][1:]
        return Timing(*(statistics.median(times_ms) for times_ms in zip(*runs, strict=True)))

    def _time_once(self, launch: Launch) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.synchronize()
        start.record(self._stream)
        with torch.cuda.stream(self._stream):
            start_s = time.perf_counter()
            launch()
            host_ms = (time.perf_counter() - start_s) * 1000
        end.record(self._stream)
        end.synchronize()
        return host_ms, start.elapsed_time(end)

    def launch_us(self, launch: Launch, num_launches: int, num_loops: int) -> float:
        """Median host time of one launch in loops of `num_launches`, each begun on an idle GPU."""
        def loop() -> None:
            for _ in range(num_launches):
                launch()

        return self.timing(loop, num_loops).host_ms * 1000 / num_launches

    def work(self, launch: Launch) -> Work:
        """What `launch` asks of the GPU: of some traces the one with the median compute time, after one that warms up.

        Raises RuntimeError where the profiler sees no kernel.
        """
        triton_names = triton_kernel_names()
        works = [work_in_trace(self._trace(launch), triton_names) for _ in range(NUM_TRACES + 1)][1:]
        if not all(work.num_kernels for work in works):
            raise RuntimeError("torch.profiler recorded no kernel: the launch model needs CUPTI, which is missing or "
                               "in use by another profiler")
        return sorted(works, key=lambda work: work.compute_ms)[NUM_TRACES // 2]

    def _trace(self, launch: Launch) -> list[dict[str, Any]]:
        """The events of a Chrome trace, which names the category of each."""
        self._stream.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            with torch.cuda.stream(self._stream):
                launch()
            self._stream.synchronize()
        with TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def work_in_trace(events: Sequence[Mapping[str, Any]], triton_names: Collection[str]) -> Work:
    """Kernels and copies among a trace's events, and the sum of their durations."""
    kernels = [event for event in events if event.get("cat") == KERNEL]
    copies = [event for event in events if event.get("cat") in COPIES]
    num_triton = sum(event["name"] in triton_names or event["name"].startswith(COMPILED_PREFIX) for event in kernels)
    compute_ms = sum(event["dur"] for event in (*kernels, *copies)) / 1000  # a trace is in microseconds
    return Work(len(kernels), num_triton, len(copies), compute_ms)


def triton_kernel_names() -> set[str]:
    """Names of the engine's Triton kernels that have been imported."""
    from triton.runtime import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("engine.kernels.")]
    return {value.__name__ for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
