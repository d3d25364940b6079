"""What can be said about the KV cache: how large it is, when that is decided, and how it is cut into blocks."""

from dataclasses import dataclass
from typing import Any, Optional

from engine.checks import check_choice, check_range
from engine.memory.policies import KV_MEMORY_POLICIES

KV_POLICIES = ("auto", *KV_MEMORY_POLICIES)
REHEARSALS = ("two_largest", "all")
ON_SHORTAGE = ("error", "drop_buckets")
MAX_KV_SIZE = 2**47  # bytes, tokens or blocks: what a processor can address
DEFAULT_MEMORY_FRACTION = 0.9
DEFAULT_CPU_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class KVConfig:
    """How much memory the KV cache gets, and when that is decided."""

    policy: str = "auto"  # auto: fixed on a CPU, capture_then_allocate on a GPU
    memory_fraction: Optional[float] = None  # of the device's total; 0.9 when no size is given
    bytes: Optional[int] = None
    tokens: Optional[int] = None
    num_blocks: Optional[int] = None
    block_size: Any = "auto"  # tokens a block; auto: 256 for flash_attn, 128 for reference, 64 for triton
    prefix_cache: bool = True
    rehearse: str = "two_largest"  # or all: the buckets that profile_then_allocate captures for measure
    on_shortage: str = "error"  # or drop_buckets: the least valuable graphs go until the rest fits

    def __post_init__(self) -> None:
        check_choice("kv.policy", self.policy, KV_POLICIES)
        check_choice("kv.rehearse", self.rehearse, REHEARSALS)
        check_choice("kv.on_shortage", self.on_shortage, ON_SHORTAGE)
        if self.rehearse != "two_largest" and self.policy != "profile_then_allocate":
            raise ValueError(f"kv.rehearse={self.rehearse} belongs to kv.policy=profile_then_allocate; got "
                             f"kv.policy={self.policy}, which rehearses nothing")
        sizes = {name: value for name in ("memory_fraction", "bytes", "tokens", "num_blocks")
                 if (value := getattr(self, name)) is not None}
        if len(sizes) > 1:
            raise ValueError("at most one of kv.memory_fraction, kv.bytes, kv.tokens, kv.num_blocks may be set; got "
                             + ", ".join(f"kv.{name}={value}" for name, value in sizes.items()))
        for name in sizes.keys() - {"memory_fraction"}:
            check_range(f"kv.{name}", sizes[name], 1, MAX_KV_SIZE)
        fraction = self.memory_fraction
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
            raise ValueError(f"kv.memory_fraction must be a number in (0, 1]; got {fraction!r}")
        if self.policy == "fixed" and "memory_fraction" in sizes:
            raise ValueError("kv.policy=fixed takes kv.bytes, kv.tokens or kv.num_blocks, not kv.memory_fraction")
        if self.policy not in ("auto", "fixed") and sizes.keys() - {"memory_fraction"}:
            raise ValueError(f"kv.policy={self.policy} sizes the cache itself from kv.memory_fraction; "
                             f"kv.{next(iter(sizes))} belongs to kv.policy=fixed")
        if self.block_size != "auto":
            check_range("kv.block_size", self.block_size, 1)

    def limit_bytes(self, device_bytes: int) -> int:
        """Most of the device that may be in use: `memory_fraction` of its total."""
        fraction = DEFAULT_MEMORY_FRACTION if self.memory_fraction is None else self.memory_fraction
        return int(fraction * device_bytes)

    def stated_bytes(self, block_size: int, block_bytes: int) -> int:
        """The size that is stated, in bytes; a CPU's default without one. ValueError for less than one block."""
        if self.num_blocks is not None:
            return self.num_blocks * block_bytes
        if self.tokens is not None:
            return -(-self.tokens // block_size) * block_bytes
        if self.bytes is None:
            return DEFAULT_CPU_KV_BYTES
        if self.bytes < block_bytes:
            raise ValueError(f"kv.bytes must be at least one block of {block_size} tokens, {block_bytes} bytes; got "
                             f"{self.bytes}")
        return self.bytes

    @property
    def is_size_stated(self) -> bool:
        """Whether bytes, tokens or blocks are given, so that nothing has to be measured."""
        return any(size is not None for size in (self.bytes, self.tokens, self.num_blocks))
