"""From a configuration to the parts of a running engine, in the order that the KV memory policy says.

Every `auto` becomes a fact with its reason here, once, before anything is loaded.
"""

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig, KVConfig
from engine.device import on_stream
from engine.kernels.attention import choose_attention
from engine.memory.address_range import has_address_ranges
from engine.memory.config import DEFAULT_CPU_KV_BYTES
from engine.memory.policies import KV_MEMORY_POLICIES
from engine.model.source import resolve_model
from engine.records import StartupRecord
from engine.startup import EngineStartup, OnStage
from engine.tokenizer import Tokenizer
from engine.units import MIB

if TYPE_CHECKING:
    from engine.kernels.attention import AttentionBackend


WHERE = {"cuda": "a GPU", "cpu": "a CPU"}  # why a choice was made


@dataclass(frozen=True)
class Assembly:
    """What start-up has built, and the record of it."""

    parts: EngineStartup
    tokenizer: Tokenizer | None
    record: StartupRecord


def assemble(config: EngineConfig, on_stage: OnStage) -> Assembly:
    """Build everything in the order that the KV memory policy says; ValueError for what cannot be done here."""
    choices: dict[str, str] = {}
    device = _choose_device(config.device, choices)
    config.check_runs_on(device.type)
    source = resolve_model(config.model, device.type)
    if config.model.dtype == "auto":
        choices["model.dtype"] = str(source.dtype).removeprefix("torch.")
    attention, reason = choose_attention(config.kernels.attention, device, source.dtype, source.architecture.head_dim)
    if config.kernels.attention == "auto":
        choices["kernels.attention"] = f"{attention.name}: {reason}"
    block_size = choose_block_size(config.kv, attention, choices)
    tokenizer = Tokenizer.load(source.directory) if source.directory else None  # before the weights
    policy = KV_MEMORY_POLICIES[choose_kv_policy(config.kv, device, choices)]
    sampler = _torch_or_triton("sampler.impl", config.sampler.impl, device, choices)
    ops = _torch_or_triton("kernels.ops", config.kernels.ops, device, choices)
    parts = EngineStartup(config, source, device, attention, ops, sampler, block_size, policy.name, on_stage)
    try:
        with parts.gauge.watch():
            parts.prepare()
            with on_stream(parts.stream):
                policy.run(parts)
                parts.finish()
        record = _record(config, parts, attention.name, policy.name, choices)
    except BaseException as error:
        _forget_frames(error)
        parts.release()
        raise
    return Assembly(parts, tokenizer, record)


def _forget_frames(error: BaseException | None) -> None:
    """Empty the frames of an error and of those that led to it: they hold tensors as long as somebody has the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _choose_device(requested: str, choices: dict[str, str]) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ValueError("device=cuda needs an NVIDIA GPU that torch can use; none was found (device=cpu runs without)")
    if requested == "auto":
        requested = "cuda" if has_cuda else "cpu"
        choices["device"] = f"{requested}: {'a GPU was found' if has_cuda else 'no GPU was found'}"
    return torch.device("cuda", torch.cuda.current_device()) if requested == "cuda" else torch.device("cpu")


def _torch_or_triton(key: str, requested: str, device: torch.device, choices: dict[str, str]) -> str:
    if requested != "auto":
        return requested
    chosen = "triton" if device.type == "cuda" else "torch"
    choices[key] = f"{chosen}: {WHERE[device.type]}"
    return chosen


def choose_block_size(kv: KVConfig, attention: "AttentionBackend", choices: dict[str, str]) -> int:
    """Tokens a KV block; what `auto` became goes to `choices`. ValueError for a size the backend cannot read."""
    if kv.block_size != "auto":
        attention.check_block_size(kv.block_size)
        return kv.block_size
    block_size = attention.default_block_size
    choices["kv.block_size"] = f"{block_size} tokens: the default for {attention.name}"
    return block_size


def choose_kv_policy(kv: KVConfig, device: torch.device, choices: dict[str, str]) -> str:
    """The KV memory policy; what `auto` became goes to `choices`."""
    if kv.policy != "auto":
        return kv.policy
    if kv.is_size_stated or (device.type == "cpu" and kv.memory_fraction is None):
        size = "as stated" if kv.is_size_stated else f"at most {DEFAULT_CPU_KV_BYTES // MIB} MiB on a CPU"
        choices["kv.policy"] = f"fixed: {size}"
        return "fixed"
    if has_address_ranges(device):
        choices["kv.policy"] = "capture_then_allocate: no size was stated"
        return "capture_then_allocate"
    choices["kv.policy"] = "profile_then_allocate: no size was stated, and the device cannot map memory later"
    return "profile_then_allocate"


def _record(config: EngineConfig, parts: EngineStartup, attention: str, kv_policy: str,
            choices: dict[str, str]) -> StartupRecord:
    source, device, kv_cache, builder = parts.source, parts.device, parts.kv_cache, parts.graph_builder
    graphs = builder.graphs
    if config.graph.scope == "auto" and graphs:
        choices["graph.scope"] = f"{builder.scope}: {WHERE[device.type]}"
    if config.scheduler.overlap == "auto":
        is_on = "true" if config.scheduler.overlaps_on(device.type) else "false"
        choices["scheduler.overlap"] = f"{is_on}: {WHERE[device.type]}"
    if config.model.load_format == "auto":
        choices["model.load_format"] = source.load_format
    return StartupRecord(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        dtype=str(source.dtype).removeprefix("torch."),
        attention=attention,
        load_format=source.load_format,
        kv_policy=kv_policy,
        replay="none" if graphs is None else graphs.replay_kind,
        choices=choices,
        num_parameters=parts.decoder.num_parameters,
        block_size=kv_cache.block_size,
        num_kv_blocks=kv_cache.num_blocks,
        kv_bytes=kv_cache.num_bytes,
        kv_bytes_per_token=parts.geometry.bytes_per_token,
        device_total_bytes=parts.gauge.total_bytes,
        scope=builder.scope if graphs else "none",
        ops=parts.ops_name,
        sampler=parts.sampler_name,
        buckets=builder.records,
        capture_order=builder.capture_order,
        parity=builder.parity,
        disabled_buckets=builder.disabled,
        ledger=parts.ledger(),
        seconds=dict(parts.seconds),
        kv_sized_by=parts.kv_sized_by,
        num_full_requests=parts.geometry.num_full_requests(kv_cache.num_blocks),
        dropped_buckets=builder.dropped,
        kv_estimate_error_bytes=builder.estimate_error_bytes,
    )
