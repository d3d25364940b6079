"""The schema of a run: the engine's own settings plus workload, tracker and how the run is executed.

These dataclasses are what Hydra composes into; `conf/*.yaml` only says what makes a choice different. As in
`engine.config`, a config that exists is a config that makes sense.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Optional

from engine.checks import check_choice, check_range
from engine.config import MAX_NUM_SEQS, EngineConfig, GraphConfig, KVConfig, ModelConfig, SchedulerConfig
from engine.memory.config import MAX_KV_SIZE

MODES = ("run", "plan")
MEASURES = {  # measure -> the function that the run's process executes
    "serve": "experiments.worker:serve",
    "launch_overhead": "experiments.launch_overhead:measure",
}
WORKLOADS = ("text", "nano_vllm_bench", "fixed", "ladder")
TRACKERS = ("wandb", "none")
MAX_NUM_REQUESTS = 1_000_000  # all are drawn before the first is sent
TRACKER_MODES = ("auto", "online", "offline")


@dataclass(frozen=True)
class WorkloadConfig:
    """Which requests are sent. All arrive at once; those of `ladder` batch by batch."""

    kind: str = "text"
    path: Optional[str] = None  # text: a .jsonl of prompts; the prompts that ship with the project when not set
    num_requests: Optional[int] = None  # text: the first n (all when not set); others: how many (256 when not set)
    max_tokens: int = 64  # text, fixed and ladder: output tokens a request
    prompt_tokens: int = 512  # fixed and ladder: prompt tokens a request
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 64, 256])  # ladder: requests of each phase
    seed: int = 0  # random token ids and lengths

    def __post_init__(self) -> None:
        check_choice("workload.kind", self.kind, WORKLOADS)
        if self.num_requests is not None:
            check_range("workload.num_requests", self.num_requests, 1, MAX_NUM_REQUESTS)
        check_range("workload.max_tokens", self.max_tokens, 1)
        check_range("workload.prompt_tokens", self.prompt_tokens, 1)
        check_range("workload.seed", self.seed, 0)
        if not self.batch_sizes:
            raise ValueError("workload.batch_sizes must name at least one batch size, such as [1,8]; got []")
        for size in self.batch_sizes:
            check_range("workload.batch_sizes: each size", size, 1, MAX_NUM_SEQS)
        if self.path is not None and self.kind != "text":
            raise ValueError(f"workload.path belongs to workload=text; got workload.kind={self.kind}")


@dataclass(frozen=True)
class TrackerConfig:
    """Where a run is logged. `auto` is online when a key and a reachable server are there, else offline."""

    kind: str = "wandb"
    mode: str = "auto"
    project: str = "encore"
    group: Optional[str] = None  # default: the sweep's name
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("tracker.kind", self.kind, TRACKERS)
        check_choice("tracker.mode", self.mode, TRACKER_MODES)
        if not self.project:
            raise ValueError("tracker.project must not be empty")


@dataclass(frozen=True)
class RunConfig:
    """How a run is executed and where its files go."""

    name: Optional[str] = None  # default: made from the model, the workload and what was overridden
    isolate: bool = True  # execute in a child process; false runs in the parent, so that pdb works
    output_root: str = "outputs"  # relative to the repository, whatever the current directory


@dataclass(frozen=True)
class PlanConfig:
    """What mode=plan takes for granted."""

    device_bytes: Optional[int] = None  # plan for a GPU of so much memory; this machine's GPU or host when not set

    def __post_init__(self) -> None:
        if self.device_bytes is not None:
            check_range("plan.device_bytes", self.device_bytes, 1, MAX_KV_SIZE)


@dataclass(frozen=True)
class Config(EngineConfig):
    """One run, whole: what the engine is built from, and what is done with it."""

    mode: str = "run"  # or plan: print what would happen, without weights
    measure: str = "serve"  # the workload; launch_overhead: what launching a step costs
    plan: PlanConfig = field(default_factory=PlanConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, MODES)
        check_choice("measure", self.measure, MEASURES)
        if self.measure == "serve":
            self._check_workload()
        else:
            self._check_comparison()

    def _check_workload(self) -> None:
        workload, limit = self.workload, self.model.max_model_len
        longest = workload.prompt_tokens + workload.max_tokens
        if workload.kind in ("fixed", "ladder") and longest > limit:
            raise ValueError(f"workload.prompt_tokens={workload.prompt_tokens} + workload.max_tokens="
                             f"{workload.max_tokens} must be at most model.max_model_len={limit}")
        largest, max_num_seqs = max(workload.batch_sizes), self.scheduler.max_num_seqs
        if workload.kind == "ladder" and largest > max_num_seqs:
            raise ValueError(f"workload.batch_sizes: {largest} is above scheduler.max_num_seqs={max_num_seqs}, so that "
                             f"many requests never decode together")

    def _check_comparison(self) -> None:
        buckets = self.graph.bucket_table(self.scheduler.max_num_seqs)
        if buckets is None:
            raise ValueError(f"measure={self.measure} compares eager steps with graphs: graph.mode must be full")
        if not set(buckets.sizes) & set(self.workload.batch_sizes):
            raise ValueError(f"measure={self.measure} needs a batch size of workload.batch_sizes="
                             f"{self.workload.batch_sizes} among the buckets {list(buckets.sizes)}")

    def without_effect(self) -> list[str]:
        """A sentence for each setting that was changed and changes nothing in this run."""
        settings = [*self._idle_graph_settings(), *self._idle_other_settings()]
        return [f"{key} has no effect: {why}" for key, is_idle, why in settings if is_idle]

    def _idle_graph_settings(self) -> Iterator[tuple[str, bool, str]]:
        """Each key of `graph` that another setting can make idle: whether it was changed for nothing, and why."""
        graph, above = self.graph, self.scheduler.above_largest_bucket
        changed = {item.name for item in fields(graph)
                   if getattr(graph, item.name) != getattr(GraphConfig, item.name) and item.name != "mode"}
        if graph.mode == "eager":
            yield from ((f"graph.{name}", True, "graph.mode=eager captures nothing") for name in sorted(changed))
            yield ("scheduler.above_largest_bucket", above != SchedulerConfig.above_largest_bucket,
                   "graph.mode=eager captures nothing")
            yield from ((f"kv.{name}", getattr(self.kv, name) != getattr(KVConfig, name),
                         "graph.mode=eager captures nothing") for name in ("rehearse", "on_shortage"))
            return
        policy = graph.buckets if isinstance(graph.buckets, str) else "an explicit list"
        yield "graph.max_bucket", "max_bucket" in changed and policy == "an explicit list", f"{policy} ignores it"
        yield "graph.step", "step" in changed and policy != "step", f"it belongs to graph.buckets=step, not {policy}"
        for name in ("histogram", "max_graphs", "max_graph_bytes"):
            # A plan reads the bytes of graphs there, whatever the policy.
            is_idle = policy != "tuned" and not (name == "histogram" and self.mode == "plan")
            yield f"graph.{name}", name in changed and is_idle, f"it belongs to graph.buckets=tuned, not {policy}"
        yield ("graph.capture_seed", "capture_seed" in changed and graph.capture_order != "shuffled",
               "it belongs to graph.capture_order=shuffled")
        yield ("graph.on_parity_failure", "on_parity_failure" in changed and graph.parity_check == "none",
               "graph.parity_check=none compares nothing")

    def _idle_other_settings(self) -> Iterator[tuple[str, bool, str]]:
        load, is_served = self.workload, self.measure == "serve"
        has_sizes, is_ladder = load.kind in ("fixed", "ladder"), load.kind == "ladder"
        yield ("workload.max_tokens", load.kind == "nano_vllm_bench" and load.max_tokens != WorkloadConfig.max_tokens,
               "the benchmark has its own")
        yield ("workload.prompt_tokens", is_served and not has_sizes
               and load.prompt_tokens != WorkloadConfig.prompt_tokens, "it belongs to workload=fixed and ladder")
        yield ("workload.batch_sizes", is_served and not is_ladder
               and load.batch_sizes != WorkloadConfig().batch_sizes, "it belongs to workload=ladder")
        yield ("scheduler.overlap", not is_served and self.scheduler.overlap != SchedulerConfig.overlap,
               f"measure={self.measure} waits for each step")
        yield ("workload.num_requests", (is_ladder or not is_served) and load.num_requests is not None,
               "workload.batch_sizes says how many requests there are")
        yield ("model.dummy_seed", not self.model.is_dummy and self.model.dummy_seed != ModelConfig.dummy_seed,
               "the weights are not random")
        yield "tracker.mode", self.tracker.kind == "none" and self.tracker.mode != TrackerConfig.mode, "tracker=none"
        yield "plan.device_bytes", self.mode == "run" and self.plan.device_bytes is not None, "it belongs to mode=plan"
