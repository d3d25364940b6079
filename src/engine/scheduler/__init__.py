"""Who runs in the next step. Policies hold no tensors and never read a token's value while they schedule."""

from engine.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.scheduler.base import Scheduler
from engine.scheduler.prefill_first import PrefillFirst

SCHEDULERS: dict[str, type[Scheduler]] = {"prefill_first": PrefillFirst}


def make_scheduler(config: SchedulerConfig, allocator: BlockAllocator, max_model_len: int,
                   max_running: int | None = None) -> Scheduler:
    """The scheduler that `config.policy` names; at most `max_running` requests hold KV (config.max_num_seqs)."""
    return SCHEDULERS[config.policy](config, allocator, max_model_len, max_running)
