"""`measure=launch_overhead`: what launching a decode step costs on this GPU, and whether a simple sum explains it.

For batch sizes that have a graph it measures the terms of the launch model and the two step times that they should
explain; for prompts of growing length, host against GPU time. The steps are synthetic (`engine.probe`), full, and begin
on an idle GPU. Without CUDA nothing is launched: what does not exist stays empty in the tables, and a note says so.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.records import EngineRecords
from experiments.config import Config
from experiments.launch_model import (
    COST_TABLE,
    MODEL_COLUMNS,
    MODEL_TABLE,
    PREFILL_COLUMNS,
    PREFILL_TABLE,
    TERM_COLUMNS,
    TERM_TABLE,
    DecodeMeasurement,
    PrefillMeasurement,
    Timing,
    decode_sentences,
    partial_row,
    prefill_sentences,
    steadiness_sentences,
    table,
)
from experiments.messages import Finished, Progress
from experiments.worker import process_facts

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.probe import DecodeProbe
    from experiments.launch_timing import StreamClock

NUM_DECODE_REPEATS, NUM_PREFILL_REPEATS, NUM_CPU_REPEATS = 20, 5, 3
MAX_STEPS = NUM_DECODE_REPEATS + 1  # from one filling, a warm-up included; each moves every context on by a token
SHORTEST_PREFILL, LONGEST_PREFILL = 16, 16384

Report = Callable[[Progress], None]
Tables = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Measurements:
    """What is measured: batch sizes that have a graph, one context length, prompt lengths."""

    batch_sizes: tuple[int, ...]
    context_tokens: int
    temperature: float  # of every request
    prefill_tokens: tuple[int, ...]
    notes: tuple[str, ...]  # what was asked for and is not measured


def measure(config: Config, report: Report) -> Finished:
    """Execute the experiment. Raises ValueError for a configuration without anything to compare."""
    report(Progress("import torch"))
    start_s = time.perf_counter()
    from engine.engine import Engine

    with Engine(config, on_stage=lambda stage: report(Progress(stage))) as engine:
        seconds = {"build_engine": time.perf_counter() - start_s}
        start_s = time.perf_counter()
        engine.start_measurement()
        probe = engine.probe()
        plan = measurements(config, probe.sizes, probe.max_num_live)
        measure_on = _measure_cuda if engine.startup.device == "cuda" else _measure_cpu
        tables, notes = measure_on(engine, probe, plan, report)
        seconds["measure"] = time.perf_counter() - start_s
        records = EngineRecords(warnings=list(engine.records.warnings))
        startup = replace(engine.startup, ledger=engine.memory_ledger())
        return Finished(startup, records, (), engine.memory_snapshot(), {}, seconds, process_facts(),
                        tables=tables, notes=(*plan.notes, *notes))


def measurements(config: Config, captured: Sequence[int], max_num_live: int) -> Measurements:
    """What of `workload.batch_sizes` and of the prompt lengths the engine can run. ValueError if no size is left."""
    wanted, longest = config.workload.batch_sizes, config.model.max_model_len
    sizes = tuple(size for size in sorted(set(wanted)) if size in captured and size <= max_num_live)
    if not sizes:
        raise ValueError(f"measure=launch_overhead needs a captured batch size among workload.batch_sizes="
                         f"{list(wanted)}: captured are {list(captured)}, and the KV cache has room for "
                         f"{max_num_live} rows")
    notes = []
    if left_out := [size for size in wanted if size not in sizes]:
        notes.append(f"Not measured, since no graph of that size was captured or its rows exceed the KV cache: batch "
                     f"{', '.join(map(str, left_out))}.")
    context_tokens = min(config.workload.prompt_tokens, longest - MAX_STEPS)
    if context_tokens < 1:
        raise ValueError(f"measure=launch_overhead needs model.max_model_len above {MAX_STEPS}; got {longest}")
    if context_tokens < config.workload.prompt_tokens:
        notes.append(f"Contexts have {context_tokens} tokens and not workload.prompt_tokens="
                     f"{config.workload.prompt_tokens}: model.max_model_len={longest} leaves no room for the steps.")
    bound = min(LONGEST_PREFILL, longest, config.scheduler.max_num_batched_tokens)
    lengths = (SHORTEST_PREFILL << doubling for doubling in range(bound.bit_length()))
    return Measurements(sizes, context_tokens, config.sampler.temperature,
                        tuple(length for length in lengths if length <= bound), tuple(notes))


def _measure_cuda(engine: "Engine", probe: "DecodeProbe", plan: Measurements,
                  report: Report) -> tuple[Tables, list[str]]:
    from experiments.empty_kernels import EmptyKernels
    from experiments.launch_timing import StreamClock

    assert probe.stream is not None, "an engine on CUDA has a stream"
    clock, empty = StreamClock(probe.stream), EmptyKernels(probe.stream)
    num_nodes = {record.batch_size: record.num_nodes or 0 for record in engine.startup.buckets}
    empty_graphs = {size: empty.graph(num_nodes[size]) for size in plan.batch_sizes}
    report(Progress("time launches"))
    cost = empty.launch_cost(clock)
    time_decode = partial(_time_decode, probe, clock, plan)
    times = {size: (clock.timing(empty_graphs[size].replay, NUM_DECODE_REPEATS), time_decode(size, probe.eager),
                    time_decode(size, probe.replay)) for size in plan.batch_sizes}
    prefill_times = {num_tokens: clock.timing(partial(probe.prefill, num_tokens), NUM_PREFILL_REPEATS)
                     for num_tokens in plan.prefill_tokens}
    unsteady = steadiness_sentences(cost, empty.launch_cost(clock))
    report(Progress("trace kernels"))  # after all times: a profiler that was once attached may make launches dearer
    steps = []
    for size, (empty_graph, eager, graph) in times.items():
        probe.fill(size, size, plan.context_tokens, temperature=plan.temperature)
        steps.append(DecodeMeasurement(
            size, plan.context_tokens, clock.work(probe.eager), num_nodes[size], empty_graph.total_ms,
            clock.work(empty_graphs[size].replay).compute_ms, cost, eager, graph))
    prefills = [PrefillMeasurement(num_tokens, clock.work(partial(probe.prefill, num_tokens)), timing)
                for num_tokens, timing in prefill_times.items()]
    tables: Tables = {
        COST_TABLE: _cost_rows(cost.torch_us, cost.triton_us),
        TERM_TABLE: table(TERM_COLUMNS, steps), MODEL_TABLE: table(MODEL_COLUMNS, steps),
        PREFILL_TABLE: table(PREFILL_COLUMNS, prefills)}
    return tables, [*unsteady, *decode_sentences(steps), *prefill_sentences(prefills)]


def _time_decode(probe: "DecodeProbe", clock: "StreamClock", plan: Measurements, size: int,
                 run: Callable[[], None]) -> Timing:
    """Times of a full batch, from the same contexts whichever way it runs."""
    probe.fill(size, size, plan.context_tokens, temperature=plan.temperature)
    return clock.timing(run, NUM_DECODE_REPEATS)


def _measure_cpu(engine: "Engine", probe: "DecodeProbe", plan: Measurements,
                 report: Report) -> tuple[Tables, list[str]]:
    """Durations of the same calls. A CPU runs them itself: there is no launch, and replay is emulated by the calls."""
    terms, model, prefills = [], [], []
    for size in plan.batch_sizes:
        report(Progress(f"batch size {size}"))
        times_ms = []
        for run in (probe.eager, probe.replay):
            probe.fill(size, size, plan.context_tokens, temperature=plan.temperature)
            times_ms.append(_wall_ms(run))
        eager_ms, graph_ms = times_ms
        terms.append(partial_row(TERM_COLUMNS, batch_size=size, context_tokens=plan.context_tokens))
        model.append(partial_row(MODEL_COLUMNS, batch_size=size, eager_ms=eager_ms, graph_ms=graph_ms))
    for num_tokens in plan.prefill_tokens:
        report(Progress(f"prefill of {num_tokens} tokens"))
        total_ms = _wall_ms(partial(probe.prefill, num_tokens))
        prefills.append(partial_row(PREFILL_COLUMNS, num_tokens=num_tokens, total_ms=total_ms))
    tables: Tables = {COST_TABLE: _cost_rows(None, None), TERM_TABLE: terms, MODEL_TABLE: model,
                      PREFILL_TABLE: prefills}
    return tables, [f"On a CPU nothing is launched and replay is {engine.startup.replay}: kernels, launches and what "
                    f"is predicted from them do not exist here; eager and graph are the same calls, so there is no "
                    f"speed-up."]


def _wall_ms(run: Callable[[], None]) -> float:
    """Median duration of work that has ended when the call returns, after one run that warms up."""
    times_ms = []
    for _ in range(NUM_CPU_REPEATS + 1):
        start_s = time.perf_counter()
        run()
        times_ms.append((time.perf_counter() - start_s) * 1000)
    return statistics.median(times_ms[1:])


def _cost_rows(torch_us: float | None, triton_us: float | None) -> list[dict[str, Any]]:
    return [{"empty_kernel": "torch operator", "launch_us": torch_us},
            {"empty_kernel": "Triton kernel", "launch_us": triton_us}]
