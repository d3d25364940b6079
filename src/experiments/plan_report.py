"""How a plan is read: tables of its buckets, its memory and its batches, then what is left out and what conflicts."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from experiments.formatting import format_value
from experiments.plan import BucketUse, RunPlan, bucket_policy, bucket_use, size_list, uniform_padding

MAX_BUCKETS = 24  # rows; of more, those with the fewest steps are added up


def plan_parts(plan: RunPlan) -> list[RenderableType]:
    """The tables and sentences of a plan, in the order in which they are read."""
    parts: list[RenderableType] = [buckets_table(plan), memory_table(plan)]
    if plan.batches is not None and plan.batches.num_steps:
        parts.append(batches_table(plan))
    parts += [Text(note) for note in plan.notes]
    parts += [Text(f"conflict: {conflict}", style="yellow") for conflict in plan.conflicts]
    return parts


def buckets_table(plan: RunPlan) -> Table:
    """The list, where it comes from, what it covers, and its padding over equally likely batch sizes."""
    table = Table("Buckets", "", box=SIMPLE)
    table.add_row("policy", Text(bucket_policy(plan.config)))
    if (buckets := plan.buckets) is None:
        return table
    max_num_seqs, padding = plan.config.scheduler.max_num_seqs, uniform_padding(buckets)
    table.add_row("list", f"{len(buckets.sizes)}: {size_list(buckets.sizes)}")
    table.add_row("batch sizes with a bucket",
                  f"1 to {buckets.largest:,} of {max_num_seqs:,}" if buckets.largest < max_num_seqs else
                  f"all, 1 to {max_num_seqs:,}")
    table.add_section()
    table.add_row("padding waste if all were equally likely", format_value(padding.mean_waste, "share"))
    table.add_row("at worst", f"{format_value(padding.worst_waste, 'share')}: batch {padding.worst_batch_size:,} in "
                              f"bucket {padding.worst_bucket:,}")
    return table


def memory_table(plan: RunPlan) -> Table:
    """Bytes of weights and KV, and what fits."""
    memory = plan.memory
    table = Table("Memory", "", box=SIMPLE)
    is_assumed = plan.config.plan.device_bytes is not None
    where = "assumed" if is_assumed else "this machine's GPU" if memory.device_type == "cuda" else "this machine's host"
    table.add_row("device", f"{format_value(memory.device_bytes, 'bytes')}, {where}")
    if memory.limit_bytes is not None:
        table.add_row("limit, kv.memory_fraction of it", format_value(memory.limit_bytes, "bytes"))
    table.add_row("parameters", f"{memory.num_parameters:,} in {memory.choices['model.dtype']}")
    table.add_row("weights", format_value(memory.weight_bytes, "bytes"))
    table.add_row("buffers of the decode step", format_value(memory.buffer_bytes, "bytes"))
    table.add_row("graphs", "not known" if memory.graph_bytes is None else format_value(memory.graph_bytes, "bytes"))
    table.add_section()
    table.add_row("KV of a token", f"{memory.geometry.bytes_per_token:,} bytes")
    geometry = memory.geometry
    table.add_row("KV of a block", f"{format_value(geometry.block_bytes, 'bytes')}, {geometry.block_size:,} tokens")
    table.add_row("KV cache", f"{'at most ' if memory.limit_bytes is not None else ''}"
                              f"{format_value(memory.kv_bytes, 'bytes')}, kv.policy={memory.kv_policy}")
    table.add_row("tokens that fit", f"{memory.num_tokens:,} in {memory.num_blocks:,} blocks")
    table.add_row(f"requests of {memory.geometry.max_model_len:,} tokens that fit", f"{memory.num_full_requests:,}")
    table.add_section()
    for setting, choice in memory.choices.items():
        table.add_row(setting, Text(choice))
    return table


def batches_table(plan: RunPlan) -> Table:
    """The decode steps that the workload is expected to make, by the bucket that serves them."""
    assert plan.batches is not None
    uses = bucket_use(plan.buckets, plan.batches)
    num_steps = sum(use.num_steps for use in uses)
    num_rows = sum(use.num_live_rows for use in uses)
    replayed = [use for use in uses if use.bucket is not None]
    num_padded = sum(use.num_steps * (use.bucket or 0) for use in replayed)
    table = Table("Expected decode steps", "steps", "share", "mean batch", "padding waste", box=SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    shown = _most_used(uses)
    for use in shown:
        name = "eager" if use.bucket is None else f"bucket {use.bucket:,}"
        table.add_row(name, f"{use.num_steps:,}", format_value(use.num_steps / num_steps, "share"),
                      f"{use.num_live_rows / use.num_steps:,.1f}", format_value(use.padding_waste, "share"))
    if len(shown) < len(uses):
        rest = num_steps - sum(use.num_steps for use in shown)
        table.add_row(f"{len(uses) - len(shown)} more buckets", f"{rest:,}", format_value(rest / num_steps, "share"))
    table.add_section()
    waste = 1 - sum(use.num_live_rows for use in replayed) / num_padded if num_padded else None
    table.add_row("all", f"{num_steps:,}", "", f"{num_rows / num_steps:,.1f}", format_value(waste, "share"))
    table.add_row("prefill steps", f"{plan.batches.num_prefill_steps:,}")
    return table


def _most_used(uses: Sequence[BucketUse]) -> list[BucketUse]:
    """At most MAX_BUCKETS of them, those with most steps, in their order."""
    kept = sorted(uses, key=lambda use: use.num_steps, reverse=True)[:MAX_BUCKETS]
    return [use for use in uses if use in kept]
