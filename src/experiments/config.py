"""The schema of a run: the engine's own settings plus workload, tracker and how the run is executed.

These dataclasses are what Hydra composes into; `conf/*.yaml` only says what makes a choice different. As in
`engine.config`, a config that exists is a config that makes sense.
"""

from dataclasses import dataclass, field
from typing import Optional

from engine.config import (
    EngineConfig,
    GraphConfig,
    KernelsConfig,
    KVConfig,
    ModelConfig,
    SamplerConfig,
    SchedulerConfig,
    check_choice,
    check_range,
)

WORKLOADS = ("text", "nano_vllm_bench", "fixed")
TRACKERS = ("wandb", "none")
TRACKER_MODES = ("auto", "online", "offline")


@dataclass(frozen=True)
class WorkloadConfig:
    """Which requests are sent. All arrive at once."""

    kind: str = "text"
    path: Optional[str] = None  # text: a .jsonl of prompts; the prompts that ship with the project when not set
    num_requests: Optional[int] = None  # text: the first n (all when not set); others: how many (256 when not set)
    max_tokens: int = 64  # text and fixed: output tokens a request
    prompt_tokens: int = 512  # fixed: prompt tokens a request
    seed: int = 0  # random token ids and lengths

    def __post_init__(self) -> None:
        check_choice("workload.kind", self.kind, WORKLOADS)
        if self.num_requests is not None:
            check_range("workload.num_requests", self.num_requests, 1)
        check_range("workload.max_tokens", self.max_tokens, 1)
        check_range("workload.prompt_tokens", self.prompt_tokens, 1)
        check_range("workload.seed", self.seed, 0)
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
class Config:
    """One run, whole."""

    model: ModelConfig
    device: str = "auto"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self.engine_config()  # refuses what contradicts itself inside the engine
        longest = self.workload.prompt_tokens + self.workload.max_tokens
        if self.workload.kind == "fixed" and longest > self.model.max_model_len:
            raise ValueError(f"workload.prompt_tokens={self.workload.prompt_tokens} + workload.max_tokens="
                             f"{self.workload.max_tokens} must be at most "
                             f"model.max_model_len={self.model.max_model_len}")

    def engine_config(self) -> EngineConfig:
        """The part that the engine is built from."""
        return EngineConfig(model=self.model, device=self.device, scheduler=self.scheduler, graph=self.graph,
                            kv=self.kv, kernels=self.kernels, sampler=self.sampler)
