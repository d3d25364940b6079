"""The schema of a run: the engine's own settings plus workload, tracker and how the run is executed.

These dataclasses are what Hydra composes into; `conf/*.yaml` only says what makes a choice different. As in
`engine.config`, a config that exists is a config that makes sense.
"""

from dataclasses import dataclass, field
from typing import Optional

from engine.checks import check_choice, check_range
from engine.config import EngineConfig, GraphConfig, ModelConfig

WORKLOADS = ("text", "nano_vllm_bench", "fixed")
TRACKERS = ("wandb", "none")
MAX_NUM_REQUESTS = 1_000_000  # all are drawn before the first is sent
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
            check_range("workload.num_requests", self.num_requests, 1, MAX_NUM_REQUESTS)
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
class Config(EngineConfig):
    """One run, whole: what the engine is built from, and what is done with it."""

    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = self.workload.prompt_tokens + self.workload.max_tokens
        if self.workload.kind == "fixed" and longest > self.model.max_model_len:
            raise ValueError(f"workload.prompt_tokens={self.workload.prompt_tokens} + workload.max_tokens="
                             f"{self.workload.max_tokens} must be at most "
                             f"model.max_model_len={self.model.max_model_len}")

    def without_effect(self) -> list[str]:
        """A sentence for each setting that was changed and changes nothing in this run."""
        graph, load = self.graph, self.workload
        is_bench, is_eager = load.kind == "nano_vllm_bench", graph.mode == "eager"
        is_list = not isinstance(graph.buckets, str)
        idle = [
            ("graph.max_bucket", is_list and graph.max_bucket != GraphConfig.max_bucket, "an explicit list ignores it"),
            ("graph.buckets", is_eager and graph.buckets != GraphConfig.buckets, "graph.mode=eager captures nothing"),
            ("workload.max_tokens", is_bench and load.max_tokens != WorkloadConfig.max_tokens,
             "the benchmark has its own"),
            ("workload.prompt_tokens", load.kind != "fixed" and load.prompt_tokens != WorkloadConfig.prompt_tokens,
             "it belongs to workload=fixed"),
            ("model.dummy_seed", not self.model.is_dummy and self.model.dummy_seed != ModelConfig.dummy_seed,
             "the weights are not random"),
            ("tracker.mode", self.tracker.kind == "none" and self.tracker.mode != TrackerConfig.mode, "tracker=none"),
        ]
        return [f"{key} has no effect: {why}" for key, is_idle, why in idle if is_idle]
