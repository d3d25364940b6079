"""The launch model as arithmetic: what a decode graph should gain, and where the sum is not the truth.

    eager = kernels x launch + compute        graph = replay + compute

Every term is measured apart from the step times that it predicts: launches from a trace, the price of one from empty
kernels, compute from the kernels' own durations, replay from a graph of as many empty kernels. The sentences follow
from the numbers by the rule that each function states. Plain numbers only; `launch_overhead.py` measures them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

NEGLIGIBLE = 0.05  # a deviation below this share of what it is compared with is not spoken of
UNSTEADY = 0.2  # a change of the host's speed by more than this share is told
COST_TABLE, TERM_TABLE, MODEL_TABLE, PREFILL_TABLE = "launch_cost", "launch_terms", "launch_model", "prefill_launches"
LAUNCH_QUEUE = 1024  # launches that CUDA holds before the host has to wait for the GPU


@dataclass(frozen=True)
class Timing:
    """One way to run a step from an idle GPU: host time until all is launched, and time until the GPU has finished."""

    host_ms: float
    total_ms: float


@dataclass(frozen=True)
class LaunchCost:
    """Host time to launch one empty kernel: through a torch operator, and as a Triton kernel."""

    torch_us: float
    triton_us: float


@dataclass(frozen=True)
class Work:
    """What one step asks of the GPU, as a profiler's trace has it."""

    num_kernels: int
    num_triton_kernels: int  # of these
    num_copies: int  # memory copies and sets, which are launched alike
    compute_ms: float  # sum of all their durations

    @property
    def num_launches(self) -> int:
        return self.num_kernels + self.num_copies


@dataclass(frozen=True)
class DecodeMeasurement:
    """A decode step of one batch size: the model's terms, and the two step times that they should explain."""

    batch_size: int
    context_tokens: int
    work: Work
    num_graph_nodes: int  # may be fewer than the launches: what `graph.scope` leaves out is launched beside the graph
    empty_graph_ms: float  # replay of as many empty kernels
    empty_kernels_ms: float  # of this, the empty kernels' own durations
    cost: LaunchCost
    eager: Timing
    graph: Timing

    @property
    def launch_us(self) -> float:
        """Mean price of this step's launches, each as an empty kernel of its kind; copies as torch operators."""
        num_triton, num_launches = self.work.num_triton_kernels, self.work.num_launches
        return (num_triton * self.cost.triton_us + (num_launches - num_triton) * self.cost.torch_us) / num_launches

    @property
    def replay_ms(self) -> float:
        """What a replay takes beside its kernels: the empty kernels' own durations are no part of it."""
        return self.empty_graph_ms - self.empty_kernels_ms

    @property
    def predicted_eager_ms(self) -> float:
        return self.work.num_launches * self.launch_us / 1000 + self.work.compute_ms

    @property
    def predicted_graph_ms(self) -> float:
        num_outside = max(0, self.work.num_launches - self.num_graph_nodes)
        return self.replay_ms + num_outside * self.launch_us / 1000 + self.work.compute_ms

    @property
    def predicted_speedup(self) -> float:
        return self.predicted_eager_ms / self.predicted_graph_ms

    @property
    def speedup(self) -> float:
        return self.eager.total_ms / self.graph.total_ms


@dataclass(frozen=True)
class PrefillMeasurement:
    """An eager prefill of some length."""

    num_tokens: int
    work: Work
    eager: Timing


# Columns of the tables: name -> what it is of a measurement.
TERM_COLUMNS = {
    "batch_size": "batch_size", "context_tokens": "context_tokens", "num_kernels": "work.num_kernels",
    "num_triton_kernels": "work.num_triton_kernels", "num_copies": "work.num_copies",
    "num_graph_nodes": "num_graph_nodes", "launch_us": "launch_us", "compute_ms": "work.compute_ms",
    "empty_graph_ms": "empty_graph_ms", "empty_kernels_ms": "empty_kernels_ms", "replay_ms": "replay_ms"}
MODEL_COLUMNS = {
    "batch_size": "batch_size", "eager_predicted_ms": "predicted_eager_ms", "eager_ms": "eager.total_ms",
    "eager_host_ms": "eager.host_ms", "graph_predicted_ms": "predicted_graph_ms", "graph_ms": "graph.total_ms",
    "graph_host_ms": "graph.host_ms", "speedup_predicted": "predicted_speedup", "speedup": "speedup"}
PREFILL_COLUMNS = {
    "num_tokens": "num_tokens", "num_launches": "work.num_launches", "host_ms": "eager.host_ms",
    "compute_ms": "work.compute_ms", "total_ms": "eager.total_ms"}


def table(columns: Mapping[str, str], measured: Iterable[object]) -> list[dict[str, Any]]:
    """One row for each measurement."""
    getters = {name: attrgetter(path) for name, path in columns.items()}
    return [{name: get(each) for name, get in getters.items()} for each in measured]


def partial_row(columns: Mapping[str, str], **known: Any) -> dict[str, Any]:
    """A row of which only some columns are known; the others are None."""
    assert known.keys() <= columns.keys(), f"unknown columns: {known.keys() - columns.keys()}"
    return {**dict.fromkeys(columns), **known}


def decode_sentences(steps: Sequence[DecodeMeasurement]) -> list[str]:
    """What these measurements say about the model, one sentence for each of its assumptions."""
    return [speedup_sentence(steps), *overlap_sentences(steps), price_sentence(steps), *idle_sentences(steps),
            hidden_launches_sentence(steps),
            *crowd_sentences({f"eager step of batch {step.batch_size}": step.work for step in steps})]


def speedup_sentence(steps: Sequence[DecodeMeasurement]) -> str:
    """Predicted and measured speed-up of every batch size."""
    each = "; ".join(f"{step.predicted_speedup:.2f}x and {step.speedup:.2f}x at batch {step.batch_size}"
                     for step in steps)
    return f"Speed-up by the graph, predicted and measured: {each}."


def overlap_sentences(steps: Sequence[DecodeMeasurement]) -> list[str]:
    """Whether the eager step is nearer to host time plus compute, or to the larger of the two."""
    def is_sum(step: DecodeMeasurement) -> bool:
        host_ms, compute_ms = step.eager.host_ms, step.work.compute_ms
        return abs(step.eager.total_ms - host_ms - compute_ms) < abs(step.eager.total_ms - max(host_ms, compute_ms))

    def numbers(step: DecodeMeasurement) -> str:
        host_ms, compute_ms = step.eager.host_ms, step.work.compute_ms
        return (f"{step.eager.total_ms:.2f} ms at batch {step.batch_size}, where launching takes {host_ms:.2f} and "
                f"compute {compute_ms:.2f}")

    sentences = []
    if added := [step for step in steps if is_sum(step)]:
        sentences.append(f"Launching and compute add up, as the model has it, in eager steps of {_batches(added)}: "
                         f"{numbers(added[0])}.")
    if overlapped := [step for step in steps if not is_sum(step)]:
        sentences.append(f"Host and GPU work side by side, where the model adds them, in eager steps of "
                         f"{_batches(overlapped)}: {numbers(overlapped[0])}, so the larger of the two decides.")
    return sentences


def price_sentence(steps: Sequence[DecodeMeasurement]) -> str:
    """What a launch of the step costs the host, against an empty kernel's; by the step for which they differ most."""
    def ratio(step: DecodeMeasurement) -> float:
        return step.eager.host_ms * 1000 / step.work.num_launches / step.launch_us

    step = max(steps, key=lambda each: abs(ratio(each) - 1))
    found = (f"A launch of the eager step costs the host {ratio(step) * step.launch_us:.1f} us at batch "
             f"{step.batch_size}, and an empty kernel's {step.launch_us:.1f} us")
    if abs(ratio(step) - 1) <= NEGLIGIBLE:
        return f"{found}: the price that the model takes is right."
    if ratio(step) > 1:
        return (f"{found}: {ratio(step):.1f} times as much, since operators also choose kernels, check and allocate; "
                f"the model's first term is too small by that factor.")
    return f"{found}: the model's first term is too large."


def idle_sentences(steps: Sequence[DecodeMeasurement]) -> list[str]:
    """How much of a replay no kernel runs, against what a graph of empty kernels says; by the smallest batch."""
    step = min(steps, key=lambda each: each.batch_size)
    idle_ms = step.graph.total_ms - step.work.compute_ms
    if idle_ms < -NEGLIGIBLE * step.graph.total_ms:
        return [f"The kernels' durations add up to {step.work.compute_ms:.2f} ms at batch {step.batch_size}, more than "
                f"the {step.graph.total_ms:.2f} ms of the step by graph: kernels overlap in it, or run longer when "
                f"they are launched one by one and traced."]
    if idle_ms <= NEGLIGIBLE * step.graph.total_ms:
        return [f"A step by graph is compute alone, within {NEGLIGIBLE:.0%}, at batch {step.batch_size}."]
    return [f"In a step by graph no kernel runs for {idle_ms:.2f} of {step.graph.total_ms:.2f} ms at batch "
            f"{step.batch_size}, {idle_ms * 1000 / step.num_graph_nodes:.2f} us a node: gaps that a graph keeps. The "
            f"model expects {step.predicted_graph_ms - step.work.compute_ms:.2f} ms of them."]


def hidden_launches_sentence(steps: Sequence[DecodeMeasurement]) -> str:
    """From which batch size on compute takes at least as long as launching."""
    hidden = [step for step in steps if step.work.compute_ms >= step.eager.host_ms]
    if not hidden:
        return "At every batch size measured launching takes longer than compute: eager decoding waits for the host."
    return (f"At {_batches(hidden)} compute takes longer than launching, so the host is ahead: there a graph saves "
            f"gaps and host time only.")


def prefill_sentences(prefills: Sequence[PrefillMeasurement]) -> list[str]:
    """From which length on prefill waits for the GPU alone, and below which a graph would help it.

    A length is bound by launches if the host takes longer to launch it than its kernels take to run.
    """
    bound = [each for each in prefills if each.eager.host_ms > each.work.compute_ms]
    hidden = [each for each in prefills if not bound or each.num_tokens > bound[-1].num_tokens]
    sentences = []
    if hidden:
        first, host_ms, compute_ms = hidden[0], hidden[0].eager.host_ms, hidden[0].work.compute_ms
        sentences.append(f"Prefill of {first.num_tokens:,} tokens and more needs no graph: its kernels run for "
                         f"{compute_ms:.2f} ms, and launching them takes {host_ms:.2f} ms meanwhile. Nor could few "
                         f"graphs serve it, since each batch of prompts has a shape of its own.")
    if bound:
        first, host_ms, compute_ms = bound[0], bound[0].eager.host_ms, bound[0].work.compute_ms
        where = f"below {hidden[0].num_tokens:,} tokens" if hidden else "at every length measured"
        sentences.append(f"Launching binds prefill {where}: {first.num_tokens:,} tokens take the host {host_ms:.2f} ms "
                         f"and the GPU {compute_ms:.2f}, so a graph could make them at most "
                         f"{first.eager.total_ms / compute_ms:.1f} times as fast.")
    sentences += crowd_sentences({f"prefill of {each.num_tokens:,} tokens": each.work for each in prefills})
    return sentences


def steadiness_sentences(before: LaunchCost, after: LaunchCost) -> list[str]:
    """A warning where the host's own speed has changed between two measurements of the same empty kernels."""
    faster, slower = sorted((before.triton_us, after.triton_us))
    if slower <= faster * (1 + UNSTEADY):
        return []
    return [f"The host's speed changed while this was measured: launching an empty Triton kernel took "
            f"{before.triton_us:.1f} us before and {after.triton_us:.1f} us after. Eager times, which wait for the "
            f"host, are uncertain by that factor of {slower / faster:.1f}."]


def crowd_sentences(works: Mapping[str, Work]) -> list[str]:
    """A warning where a single step has more launches than CUDA's queue holds; by the first such step."""
    crowded = [(name, work.num_launches) for name, work in works.items() if work.num_launches > LAUNCH_QUEUE]
    return [f"The host time of a {name} may include waiting: it has {num_launches:,} launches, and CUDA's queue holds "
            f"{LAUNCH_QUEUE:,}." for name, num_launches in crowded[:1]]


def _batches(steps: Sequence[DecodeMeasurement]) -> str:
    sizes = _join(str(step.batch_size) for step in steps)
    return f"batch {sizes}" if len(steps) == 1 else f"batches {sizes}"


def _join(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last
