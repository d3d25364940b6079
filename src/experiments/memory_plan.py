"""Device memory on paper: the bytes of weights and of KV, from shapes alone, and the KV cache that a policy leaves.

The decoder and the buffers of the decode step are built on torch's `meta` device, where tensors have shapes and no
memory, so nothing is counted that the engine would not allocate. A policy orders the same verbs as at a start-up; what
only a run can measure (activations, the CUDA context, graphs that no run has recorded) counts as nothing, and is named.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.assembly import choose_block_size, choose_kv_policy
from engine.config import KVConfig, ModelConfig
from engine.decode_state import RequestRows
from engine.graph.buckets import BucketTable
from engine.graph.decode_profile import load_profile
from engine.graph.static_batch import StaticBatch
from engine.graph.tuner import graph_bytes
from engine.kernels.attention import choose_attention
from engine.memory.geometry import KVGeometry
from engine.memory.policies import KV_MEMORY_POLICIES
from engine.model.decoder import Decoder
from engine.model.source import ModelSource, find_directory, resolve_model
from experiments.config import Config
from experiments.machine import gpu_bytes, has_gpu

META = torch.device("meta")


@dataclass(frozen=True)
class MemoryPlan:
    """What fits where. Bytes are of the device."""

    source: ModelSource
    device_type: str
    device_bytes: int
    limit_bytes: int | None  # what the engine may use; None where the KV cache has a size of its own
    num_parameters: int
    weight_bytes: int  # with the rotary table
    buffer_bytes: int  # of the decode step and of the rows of live requests
    graph_bytes: int | None  # as an earlier run measured them; None: not known
    kv_policy: str
    geometry: KVGeometry
    num_blocks: int
    choices: dict[str, str]  # setting -> what `auto` becomes, and why

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.geometry.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.geometry.block_size

    @property
    def num_full_requests(self) -> int:
        """Requests of max_model_len tokens that it holds at once."""
        return self.geometry.num_full_requests(self.num_blocks)


def plan_memory(config: Config, buckets: BucketTable | None) -> MemoryPlan:
    """The memory of this run. ValueError for a model whose shape cannot be read and for what its kernels refuse."""
    device = torch.device("cuda" if config.device == "cuda" or (config.device == "auto" and has_gpu(config)) else "cpu")
    config.check_runs_on(device.type)
    source = model_source(config.model, device.type)
    arch = source.architecture
    attention, reason = choose_attention(config.kernels.attention, device, source.dtype, arch.head_dim)
    choices = {"model.dtype": str(source.dtype).removeprefix("torch."), "kernels.attention": reason}
    block_size = choose_block_size(config.kv, attention, choices)
    kv_policy = choose_kv_policy(config.kv, device, choices)
    geometry = KVGeometry(block_size, arch.kv_bytes_per_token(source.dtype.itemsize), config.model.max_model_len,
                          config.scheduler.max_num_seqs)
    decoder = Decoder(arch, attention, source.dtype, META, config.model.max_model_len)
    rows = RequestRows(config.scheduler.max_num_seqs, geometry.table_width, block_size, META)
    static = StaticBatch(config.scheduler.max_num_seqs, rows, arch.hidden_size, arch.vocab_size, source.dtype, META)
    device_bytes = _device_bytes(config, device.type)
    startup = _PaperStartup(config.kv, device_bytes, decoder.num_bytes + static.num_bytes + rows.num_bytes,
                            _graph_bytes(config, buckets, device.type), geometry)
    KV_MEMORY_POLICIES[kv_policy].run(startup)
    num_blocks = max(0, startup.kv_bytes // geometry.block_bytes)
    return MemoryPlan(
        source=source, device_type=device.type, device_bytes=device_bytes,
        limit_bytes=None if kv_policy == "fixed" else startup.limit_bytes, num_parameters=decoder.num_parameters,
        weight_bytes=decoder.num_bytes, buffer_bytes=static.num_bytes + rows.num_bytes, graph_bytes=startup.graph_bytes,
        kv_policy=kv_policy, geometry=geometry,
        num_blocks=num_blocks if config.kv.is_size_stated else min(num_blocks, geometry.num_useful_blocks),
        choices=choices)


def model_source(config: ModelConfig, device_type: str) -> ModelSource:
    """The model's shape without its weights: of the directory, or for a hub id of the model group.

    A hub id without a stated architecture is looked up, which fetches its small files alone.
    """
    if config.path is None or Path(config.path).expanduser().is_dir():
        return resolve_model(config, device_type)
    if config.architecture is not None:
        return resolve_model(replace(config, path=None, load_format="dummy"), device_type)
    return resolve_model(replace(config, path=str(find_directory(config.path, with_weights=False))), device_type)


def _device_bytes(config: Config, device_type: str) -> int:
    if config.plan.device_bytes is not None:
        return config.plan.device_bytes
    if device_type == "cuda":
        found = gpu_bytes()
        assert found is not None, "a plan for a GPU has one, or says how much memory to assume"
        return found
    import psutil

    return psutil.virtual_memory().total


def _graph_bytes(config: Config, buckets: BucketTable | None, device_type: str) -> int | None:
    """Bytes of all graphs by those of the run in graph.histogram; None: not known; 0 without graphs."""
    if buckets is None or device_type == "cpu":
        return 0
    profile = None if config.graph.histogram is None else load_profile(config.graph.histogram)
    if profile is None or not profile.bytes_by_bucket:
        return None
    return int(graph_bytes(buckets.sizes, profile).sum())


class _PaperStartup:
    """The verbs of `engine.memory.policies.base.Startup`, with what is known before anything is loaded."""

    def __init__(self, kv: KVConfig, device_bytes: int, resident_bytes: int, graph_bytes: int | None,
                 geometry: KVGeometry) -> None:
        self.limit_bytes = kv.limit_bytes(device_bytes)
        self.graph_bytes = graph_bytes
        self.kv_bytes = 0
        self._kv, self._resident_bytes = kv, resident_bytes
        self._geometry = geometry

    def load(self) -> None:
        pass

    def profile_forward(self) -> int:
        return 0

    def rehearse_capture(self) -> int:
        return self.graph_bytes or 0

    def reserve(self) -> None:
        pass

    def available_bytes(self) -> int:
        return self.limit_bytes - self._resident_bytes

    def stated_bytes(self) -> int:
        return self._kv.stated_bytes(self._geometry.block_size, self._geometry.block_bytes)

    def allocate(self, num_bytes: int) -> None:
        self.kv_bytes = num_bytes

    def capture(self) -> None:
        self._resident_bytes += self.graph_bytes or 0
