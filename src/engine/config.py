"""What an engine can be told: names, units, defaults and validity, each in one place.

Every class is frozen and checks itself when it is built, so a config that exists is a config that makes sense. What is
only known later (the block count, what `auto` became) is a fact of the run and goes into its records.
Settings of graphs and of the KV cache stand beside what they set: `engine.graph.config`, `engine.memory.config`.
The module imports no torch: the command line reads it to answer `--help`.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from engine.checks import check_choice, check_range, check_sampling
from engine.graph.buckets import BucketTable
from engine.graph.config import GraphConfig
from engine.memory.config import KVConfig

DEVICES = ("auto", "cuda", "cpu")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SCHEDULER_POLICIES = ("prefill_first",)
ABOVE_LARGEST_BUCKET = ("eager", "cap", "error")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "reference")
OPS = ("auto", "torch", "triton")
SAMPLERS = ("auto", "torch", "compiled", "triton")
FAMILIES = ("llama", "qwen2", "qwen3")

MAX_NUM_SEQS = 65_535  # rows of a grid that CUDA launches


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder, under the names that Hugging Face's config.json uses.

    One decoder serves all families; they differ by `qkv_bias` (Qwen2), `qk_norm` (Qwen3) and the rope settings.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Any = None  # a mapping; Llama 3: {rope_type: llama3, factor, low_freq_factor, ...}
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_choice("model.architecture.family", self.family, FAMILIES)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):
            check_range(f"model.architecture.{name}", getattr(self, name), 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.architecture.num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
                raise ValueError(f"model.architecture.{name} must be a number above 0; got {value!r}")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, dict):
            raise ValueError(f"model.architecture.rope_scaling must be a mapping; got {self.rope_scaling!r}")
        if self.head_dim % 2:
            raise ValueError(f"model.architecture.head_dim must be even (rotary pairs); got {self.head_dim}")

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class ModelConfig:
    """Which weights, and in which precision.

    With `path` (a Hugging Face directory or hub id) that directory's config.json is the architecture; `architecture`
    serves dummy weights, and is compared with config.json when both are there.
    """

    name: str = "custom"
    path: Optional[str] = None
    load_format: str = "auto"  # auto: safetensors when path is set, else dummy
    dtype: str = "auto"  # auto: float32 on a CPU, the checkpoint's own (bfloat16 for dummy) on a GPU
    max_model_len: int = 4096  # tokens of prompt and output together
    dummy_seed: int = 0
    architecture: Optional[Architecture] = None

    def __post_init__(self) -> None:
        check_choice("model.load_format", self.load_format, LOAD_FORMATS)
        check_choice("model.dtype", self.dtype, DTYPES)
        check_range("model.max_model_len", self.max_model_len, 1)
        check_range("model.dummy_seed", self.dummy_seed, 0, 2**63 - 1)
        if self.path is None and self.architecture is None:
            raise ValueError("model.path is not set and model.architecture is not either: give a model directory or "
                             "hub id (model.path=...), or choose a model group")
        if self.path is None and self.load_format == "safetensors":
            raise ValueError("model.load_format=safetensors needs model.path; without one only dummy weights exist")
        arch = self.architecture
        if arch is not None and self.max_model_len > arch.max_position_embeddings:
            raise ValueError(f"model.max_model_len must be at most the model's max_position_embeddings="
                             f"{arch.max_position_embeddings}; got {self.max_model_len}")

    @property
    def is_dummy(self) -> bool:
        """Whether weights are random instead of read from `path`."""
        return self.load_format == "dummy" or (self.load_format == "auto" and self.path is None)


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs in a step."""

    policy: str = "prefill_first"
    max_num_seqs: int = 256  # most live requests: requests that hold KV blocks
    max_num_batched_tokens: int = 16384  # most prompt tokens in one prefill step
    overlap: Any = "auto"  # schedule and launch step n+1 before the tokens of step n are read; auto: on a GPU
    above_largest_bucket: str = "eager"  # a batch that no graph holds: run it so, or never form it; or refuse

    def __post_init__(self) -> None:
        if self.overlap != "auto" and not isinstance(self.overlap, bool):
            raise ValueError(f"scheduler.overlap must be auto, true or false; got {self.overlap!r}")
        check_choice("scheduler.above_largest_bucket", self.above_largest_bucket, ABOVE_LARGEST_BUCKET)
        check_choice("scheduler.policy", self.policy, SCHEDULER_POLICIES)
        check_range("scheduler.max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        check_range("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1)

    def check_covered(self, buckets: BucketTable) -> None:
        """Raise ValueError if above_largest_bucket=error and some batch has no bucket."""
        if self.above_largest_bucket == "error" and (gap := buckets.uncovered(self.max_num_seqs)):
            raise ValueError(f"scheduler.above_largest_bucket=error: {gap}")

    def max_running(self, buckets: BucketTable | None) -> int:
        """Most requests that may hold KV at once, given the buckets that there are (None: none)."""
        is_capped = buckets is not None and self.above_largest_bucket == "cap"
        return min(self.max_num_seqs, buckets.largest) if buckets and is_capped else self.max_num_seqs

    def cap_sentence(self, buckets: BucketTable) -> str | None:
        """What above_largest_bucket=cap does to max_num_seqs; None if nothing."""
        if (most := self.max_running(buckets)) == self.max_num_seqs:
            return None
        return (f"at most {most} requests run at once, though scheduler.max_num_seqs={self.max_num_seqs}: "
                f"scheduler.above_largest_bucket=cap")

    def overlaps_on(self, device_type: str) -> bool:
        """Whether steps overlap on a "cpu" or "cuda" device. A CPU computes while it launches: nothing would be won."""
        return device_type == "cuda" if self.overlap == "auto" else self.overlap


@dataclass(frozen=True)
class KernelsConfig:
    """Which implementation computes attention, and what lies between matrix products.

    `auto` takes the fastest that the device can run and records it.
    """

    attention: str = "auto"
    ops: str = "auto"  # norms, rotation with the KV store, gate: triton on a GPU, torch on a CPU

    def __post_init__(self) -> None:
        check_choice("kernels.ops", self.ops, OPS)
        check_choice("kernels.attention", self.attention, ATTENTION_BACKENDS)


@dataclass(frozen=True)
class SamplerConfig:
    """How tokens are drawn, and the sampling parameters of requests that state none.

    `torch` and `triton` draw noise that is a pure function of (request seed, position, token id): the same tokens, the
    second in one pass over the logits. `compiled` is the lesson's exponential race under torch.compile, whose noise
    depends on the batch.
    """

    impl: str = "auto"  # auto: triton on a GPU, torch on a CPU
    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # requests without a seed of their own derive one from this and their number

    def __post_init__(self) -> None:
        check_choice("sampler.impl", self.impl, SAMPLERS)
        check_sampling("sampler.", vars(self))


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig
    device: str = "auto"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def __post_init__(self) -> None:
        check_choice("device", self.device, DEVICES)
        if self.scheduler.max_num_batched_tokens < self.model.max_model_len:
            raise ValueError(
                f"scheduler.max_num_batched_tokens={self.scheduler.max_num_batched_tokens} is below "
                f"model.max_model_len={self.model.max_model_len}: scheduler.policy=prefill_first computes a prompt in "
                f"one step")
        self._check_buckets()
        if self.device == "cpu":
            self.check_runs_on("cpu")

    def _check_buckets(self) -> None:
        if (buckets := self.graph.bucket_table(self.scheduler.max_num_seqs)) is not None:
            self.scheduler.check_covered(buckets)

    def check_runs_on(self, device_type: str) -> None:
        """Raise ValueError for a setting that a `device_type` ("cpu" or "cuda") has not."""
        kv = self.kv
        if device_type == "cpu":
            if self.kernels.attention not in ("auto", "reference"):
                raise ValueError(f"kernels.attention={self.kernels.attention} needs a GPU; on a CPU it must be auto or "
                                 f"reference")
            for key, value, others in (("sampler.impl", self.sampler.impl, "auto, torch or compiled"),
                                       ("kernels.ops", self.kernels.ops, "auto or torch")):
                if value == "triton":
                    raise ValueError(f"{key}=triton needs a GPU; on a CPU it must be {others}")
        elif kv.policy == "fixed" and not kv.is_size_stated:
            raise ValueError("kv.policy=fixed needs kv.bytes, kv.tokens or kv.num_blocks on a GPU; got none of them")
