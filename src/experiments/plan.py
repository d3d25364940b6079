"""What a run would be, without weights and without a GPU: its buckets, its memory, the batches that it will form.

Everything is computed by the parts that the run itself would use: the bucket policy, the KV memory policy, the
workload, the scheduler. Where these contradict each other, one sentence each says so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.graph.buckets import BucketTable
from engine.graph.tuner import describe, tune
from engine.tokenizer import Tokenizer
from engine.units import GIB, MIB
from experiments.config import Config
from experiments.expected_batches import ExpectedBatches, expected_batches
from experiments.memory_plan import MemoryPlan, plan_memory
from experiments.workload import Conversation, WorkItem, bind_to_model, draw_workload

SHORTEST_RUN = 4  # evenly spaced sizes are told by their ends from this many on


@dataclass(frozen=True)
class Padding:
    """Padding if every batch size that has a bucket were equally likely."""

    mean_waste: float  # padded rows that hold no request, of all padded rows
    worst_batch_size: int  # whose bucket is filled least
    worst_bucket: int

    @property
    def worst_waste(self) -> float:
        return 1 - self.worst_batch_size / self.worst_bucket


@dataclass(frozen=True)
class BucketUse:
    """The expected decode steps that one bucket serves; bucket None runs eager."""

    bucket: int | None
    num_steps: int
    num_live_rows: int

    @property
    def padding_waste(self) -> float:
        """Padded rows that hold no request, of all padded rows; 0 where nothing is padded."""
        return 0.0 if self.bucket is None else 1 - self.num_live_rows / (self.num_steps * self.bucket)


@dataclass(frozen=True)
class RunPlan:
    """One run as it can be known beforehand. Without `buckets` every step is eager; without `batches`, see `notes`."""

    config: Config
    buckets: BucketTable | None
    max_running: int  # requests that may hold KV at once
    memory: MemoryPlan
    batches: ExpectedBatches | None
    notes: tuple[str, ...]
    conflicts: tuple[str, ...]


def make_plan(config: Config) -> RunPlan:
    """The plan of a run. ValueError for what the run would refuse before it loads anything."""
    buckets = config.graph.bucket_table(config.scheduler.max_num_seqs)
    max_running = config.scheduler.max_running(buckets)
    memory = plan_memory(config, buckets)
    items, why_not = _items(config, memory)
    batches = None
    if items and memory.num_blocks:
        batches = expected_batches(config, items, memory, max_running)
    elif items:
        why_not = "The expected batches are left out: the KV cache has no block."
    notes = [*_memory_notes(config, memory), *([why_not] if why_not else []), *_batch_notes(batches)]
    conflicts = [*_bucket_conflicts(config, buckets, batches), *_memory_conflicts(config, memory),
                 *_workload_conflicts(config, items, batches), *config.without_effect()]
    return RunPlan(config, buckets, max_running, memory, batches, tuple(notes), tuple(conflicts))


def _items(config: Config, memory: MemoryPlan) -> tuple[list[WorkItem], str | None]:
    """The workload's requests in tokens, or a sentence that says why they cannot be known."""
    if config.measure != "serve":
        return [], f"measure={config.measure} sends no workload: there are no batches to expect."
    drafts = draw_workload(config)
    tokenizer, directory = None, memory.source.directory
    if any(isinstance(draft.prompt, Conversation) for draft in drafts):
        tokenizer = Tokenizer.load(directory) if directory else None
        if tokenizer is None:
            return [], (f"The expected batches are left out: workload=text needs the tokenizer of "
                        f"{config.model.path}, which is not here.")
    return bind_to_model(drafts, tokenizer, memory.source.architecture.vocab_size), None


def uniform_padding(buckets: BucketTable) -> Padding:
    """Padding over the batch sizes 1 to the largest bucket, all equally likely."""
    pairs = [(size, buckets.find(size) or 0) for size in range(1, buckets.largest + 1)]
    worst_batch_size, worst_bucket = min(pairs, key=lambda pair: Fraction(*pair))
    num_padded = sum(bucket for _, bucket in pairs)
    return Padding(1 - sum(size for size, _ in pairs) / num_padded, worst_batch_size, worst_bucket)


def bucket_use(buckets: BucketTable | None, batches: ExpectedBatches) -> list[BucketUse]:
    """The expected decode steps by bucket, those that no bucket holds last."""
    num_steps: Counter[int | None] = Counter()
    num_live_rows: Counter[int | None] = Counter()
    for batch_size, count in batches.num_steps.items():
        bucket = None if buckets is None else buckets.find(batch_size)
        num_steps[bucket] += count
        num_live_rows[bucket] += count * batch_size
    order = sorted(num_steps, key=lambda bucket: float("inf") if bucket is None else bucket)
    return [BucketUse(bucket, num_steps[bucket], num_live_rows[bucket]) for bucket in order]


def bucket_policy(config: Config) -> str:
    """Where the bucket list comes from, in words."""
    graph = config.graph
    if graph.mode == "eager":
        return "none: graph.mode=eager"
    if not isinstance(graph.buckets, str):
        return "an explicit list"
    if graph.buckets == "tuned":
        limit = min(config.scheduler.max_num_seqs, graph.max_bucket)
        return describe(tune(limit, graph.histogram, graph.max_graphs, graph.max_graph_bytes))
    return graph.buckets


def size_list(sizes: Sequence[int]) -> str:
    """Ascending sizes as text, evenly spaced ones by their ends: `1, 2, 4, 8, 16 to 256 by 16`."""
    texts: list[str] = []
    start = 0
    while start < len(sizes):
        end = start + 1
        step = sizes[end] - sizes[start] if end < len(sizes) else 0
        while end < len(sizes) and sizes[end] - sizes[end - 1] == step:
            end += 1
        if end - start >= SHORTEST_RUN:
            texts.append(f"{sizes[start]} to {sizes[end - 1]}" + (f" by {step}" if step > 1 else ""))
        else:
            end = start + 1
            texts.append(str(sizes[start]))
        start = end
    return ", ".join(texts)


def unreached_buckets(buckets: BucketTable, batches: ExpectedBatches) -> list[int]:
    """Buckets that no batch of the workload replays.

    Where requests may end early, smaller batches than expected can come, and only buckets above the largest count.
    """
    used = {buckets.find(batch_size) for batch_size in batches.num_steps}
    largest = max(batches.num_steps, default=0)
    return [size for below, size in zip((0, *buckets.sizes), buckets.sizes, strict=False)
            if (size not in used if batches.is_exact else below >= largest)]


def _bucket_conflicts(config: Config, buckets: BucketTable | None, batches: ExpectedBatches | None) -> list[str]:
    if buckets is None:
        return []
    found = []
    if sentence := config.scheduler.cap_sentence(buckets) or buckets.uncovered(config.scheduler.max_num_seqs):
        found.append(sentence)
    if batches is not None and (idle := unreached_buckets(buckets, batches)):
        found.append(f"{len(idle)} of {len(buckets.sizes)} buckets never replayed by this workload: {size_list(idle)}")
    return found


def _memory_conflicts(config: Config, memory: MemoryPlan) -> list[str]:
    max_num_seqs, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
    needed = memory.weight_bytes + memory.buffer_bytes + memory.kv_bytes + (memory.graph_bytes or 0)
    found = []
    needed_blocks = 1 if memory.limit_bytes is None else memory.geometry.blocks_per_full_request
    if memory.num_blocks < needed_blocks:
        limit = memory.limit_bytes if memory.limit_bytes is not None else memory.device_bytes
        smallest = "a block" if memory.limit_bytes is None else f"one request of model.max_model_len={max_model_len}"
        found.append(f"{needed_blocks * memory.geometry.block_bytes / MIB:.1f} MiB of KV, {smallest}, do not fit, so "
                     f"the run would be refused: weights {memory.weight_bytes / GIB:.1f} GiB, buffers "
                     f"{memory.buffer_bytes / GIB:.2f} GiB, limit {limit / GIB:.1f} GiB")
    elif memory.num_full_requests < 1:
        found.append(f"the KV cache holds {memory.num_tokens:,} tokens, below one request of "
                     f"model.max_model_len={max_model_len}: longer requests are rejected")
    elif memory.num_full_requests < max_num_seqs:
        found.append(f"scheduler.max_num_seqs={max_num_seqs} requests of model.max_model_len={max_model_len} would "
                     f"take {memory.geometry.num_useful_blocks:,} KV blocks and {memory.num_blocks:,} fit: beyond "
                     f"{memory.num_full_requests:,} such requests, others wait or are preempted")
    if needed > memory.device_bytes:
        found.append(f"weights, buffers, graphs and KV cache take {needed / GIB:.1f} GiB and the device has "
                     f"{memory.device_bytes / GIB:.1f} GiB")
    return found


def _workload_conflicts(config: Config, items: Sequence[WorkItem], batches: ExpectedBatches | None) -> list[str]:
    found = []
    num_together = max(Counter(item.phase for item in items).values(), default=0)
    if items and config.scheduler.max_num_seqs > num_together:
        found.append(f"scheduler.max_num_seqs={config.scheduler.max_num_seqs} is above the {num_together} requests "
                     f"that workload.kind={config.workload.kind} sends at once")
    if batches is not None and batches.rejections:
        found.append(f"{len(batches.rejections)} of {batches.num_requests} requests would be rejected; the first "
                     f"{batches.rejections[0]}")
    if batches is not None and batches.num_preemptions:
        found.append(f"KV blocks run out: {batches.num_preemptions:,} preemptions are expected")
    return found


def _memory_notes(config: Config, memory: MemoryPlan) -> list[str]:
    notes = []
    if config.model.path is not None and memory.source.directory is None:
        notes.append(f"{config.model.path} is not looked up: the shape is the model group's, the dtype "
                     f"{memory.choices['model.dtype']}.")
    if memory.limit_bytes is not None:
        unknown = ["activations", "the CUDA context", "other processes",
                   *(["graphs"] if memory.graph_bytes is None else [])]
        notes.append(f"The KV cache is an upper bound: {', '.join(unknown)} also take from the limit, and only a run "
                     f"can measure them.")
    if memory.graph_bytes is None:
        notes.append("Bytes of graphs are known after a run: graph.histogram=<its directory> takes them into account.")
    return notes


def _batch_notes(batches: ExpectedBatches | None) -> list[str]:
    if batches is None:
        return []
    notes = []
    if batches.num_left_out:
        notes.append(f"Batches are those of the first {batches.num_requests:,} requests; {batches.num_left_out:,} more "
                     f"are left out, so that this takes seconds.")
    if not batches.is_exact:
        notes.append("Requests run to their max_tokens here; in a run they may end earlier, at an end-of-sequence "
                     "token or a stop string, and batches are then smaller.")
    return notes
