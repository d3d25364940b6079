"""Who holds which KV block: a fixed pool of block ids, counted references, and a cache of computed prefixes.

Every block is in exactly one of three states. *Used*: at least one request holds it. *Cached*: nobody holds it, but its
contents are a known prefix that a later request may take up again; it is evicted when no free block is left. *Free*: it
holds nothing of value. So `num_used + num_cached + num_free == num_blocks`, always.

A prefix is known by a chain of digests: a full block's digest covers its own tokens and the digest of the block before
it, so equal digests mean equal tokens from position 0 on. Only full, computed blocks have one, and each block remembers
its own, which makes registering one more block of a long request the hash of that one block.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class BlockAllocator:
    """A pool of `num_blocks` KV blocks of `block_size` tokens. The counters `num_*_tokens` and `num_evictions` run
    since the last `reset_prefix_cache`, over every admission: a request readmitted after a preemption counts again."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id on top, the last freed first
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._num_holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # of a block's tokens and all before them
        self._block_of: dict[bytes, int] = {}  # the one block that answers for a prefix

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of value."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose prefix is still known."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """The blocks, from position 0 on, whose contents equal the beginning of `token_ids`. Changes nothing.

        Full blocks only, and never all tokens: at least one must be computed to have logits.
        """
        blocks: list[int] = []
        digest = b""
        for index in range((len(token_ids) - 1) // self.block_size if self._block_of else 0):
            digest = self._chain(digest, token_ids, index)
            if (block := self._block_of.get(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def can_hold(self, matched: Sequence[int], num_new: int) -> bool:
        """Whether `num_new` blocks can still be allocated once the `matched` ones are acquired."""
        return num_new + sum(self._num_holders[block] == 0 for block in matched) <= self.num_available

    def acquire(self, matched: Sequence[int], num_query_tokens: int) -> None:
        """Hold the blocks that `match_prefix` found for a request of `num_query_tokens` tokens."""
        for block in matched:
            if self._num_holders[block] == 0:
                del self._cached[block]
            self._num_holders[block] += 1
        self.num_query_tokens += num_query_tokens
        self.num_hit_tokens += len(matched) * self.block_size

    def allocate(self, num_new: int) -> list[int]:
        """`num_new` blocks, held once; cached prefixes are evicted when no free block is left.

        The caller has asked `num_available` or `can_hold` before.
        """
        assert num_new <= self.num_available, f"{num_new} blocks wanted, {self.num_available} available"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_new)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def release(self, block_table: Sequence[int]) -> None:
        """Give up one hold on each block of a request.

        Deepest first, so that of the request's cached blocks the head, which more prompts share, is evicted last.
        """
        for block in reversed(block_table):
            assert self._num_holders[block] > 0, f"block {block} is released but nobody holds it"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if self._answers_for_prefix(block):
                    self._cached[block] = None
                else:
                    self._digests[block] = None
                    self._free.append(block)

    def register(self, block_table: Sequence[int], token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the full blocks among a request's first `num_computed_tokens` tokens known as prefixes.

        Hashes only blocks without a digest. Where another block answers for the same prefix already, that one stays.
        """
        num_full = num_computed_tokens // self.block_size
        if not self.prefix_cache or num_full == 0 or self._digests[block_table[num_full - 1]] is not None:
            return
        first = num_full - 1
        while first > 0 and self._digests[block_table[first - 1]] is None:
            first -= 1
        digest = (self._digests[block_table[first - 1]] if first else None) or b""
        for index in range(first, num_full):
            digest = self._chain(digest, token_ids, index)
            self._digests[block_table[index]] = digest
            self._block_of.setdefault(digest, block_table[index])

    def reset_prefix_cache(self) -> None:
        """Forget every prefix and restart the counters. Requests keep the blocks they hold."""
        self._block_of.clear()
        for block in self._cached:
            self._digests[block] = None
        self._free.extend(self._cached)
        self._cached.clear()
        self.num_query_tokens = self.num_hit_tokens = self.num_evictions = 0

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that these block tables are exactly what is held, and that every block is in one state."""
        holds = Counter(block for table in block_tables for block in table)
        counted = {block: count for block, count in enumerate(self._num_holders) if count}
        assert counted == holds, f"holders counted {counted}, block tables hold {dict(holds)}"
        states = sorted([*self._free, *self._cached, *holds])
        assert states == list(range(self.num_blocks)), f"blocks lost or in two states: {states}"
        assert all(self._digests[block] is None for block in self._free), "a free block has a digest"
        assert all(map(self._answers_for_prefix, self._cached)), "a cached block answers for no prefix"
        assert all(self._digests[block] == digest for digest, block in self._block_of.items()), "a prefix is mislaid"

    def _answers_for_prefix(self, block: int) -> bool:
        digest = self._digests[block]
        return digest is not None and self._block_of.get(digest) == block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None, f"cached block {block} has no digest"
        del self._block_of[digest]
        self._digests[block] = None
        self.num_evictions += 1
        return block

    def _chain(self, parent: bytes, token_ids: Sequence[int], index: int) -> bytes:
        """The digest of block `index` of a request, given that of the block before it (empty for the first)."""
        tokens = array("i", token_ids[index * self.block_size:(index + 1) * self.block_size])
        return blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
