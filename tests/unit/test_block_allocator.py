"""The allocator never loses a block, never hands one out twice, and never takes one prefix for another."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_allocator import BlockAllocator


@dataclass
class Holder:
    """Tokens, and the blocks that hold them."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


def hold(allocator: BlockAllocator, tokens: list[int], computed: bool = True) -> Holder:
    matched = allocator.match_prefix(tokens)
    num_new = allocator.num_blocks_for(len(tokens)) - len(matched)
    assert allocator.can_hold(matched, num_new)
    allocator.acquire(matched, len(tokens))
    holder = Holder(tokens, matched + allocator.allocate(num_new))
    if computed:
        allocator.register(holder.blocks, tokens, len(tokens))
    return holder


class AllocatorMachine(RuleBasedStateMachine):
    """Random holders on a small pool. `contents` is what a KV cache would hold: the tokens up to a block's end."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(num_blocks=6, block_size=2, prefix_cache=True)
        self.holders: list[Holder] = []
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), computed=st.booleans())
    def admit(self, tokens, computed):
        matched = self.allocator.match_prefix(tokens)
        assert len(matched) * 2 < len(tokens)
        for index, block in enumerate(matched):
            assert self.contents[block] == tuple(tokens[:2 * index + 2])
        num_new = self.allocator.num_blocks_for(len(tokens)) - len(matched)
        if not self.allocator.can_hold(matched, num_new):
            return
        holder = hold(self.allocator, tokens, computed)
        for index, block in enumerate(holder.blocks[len(matched):], start=len(matched)):
            self.contents[block] = tuple(tokens[:2 * index + 2]) if computed else ("not computed",)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data):
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.release(holder.blocks)

    @rule()
    def reset(self):
        self.allocator.reset_prefix_cache()
        assert self.allocator.num_cached == 0

    @invariant()
    def every_block_is_in_one_state(self):
        self.allocator.check(holder.blocks for holder in self.holders)
        allocator = self.allocator
        assert allocator.num_used == len({block for holder in self.holders for block in holder.blocks})
        assert allocator.num_used + allocator.num_cached + allocator.num_free == allocator.num_blocks


TestRandomHolders = AllocatorMachine.TestCase
TestRandomHolders.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_released_prefix_is_found_again_without_its_last_token():
    allocator = BlockAllocator(8, 4, prefix_cache=True)
    first = hold(allocator, list(range(12)))
    allocator.release(first.blocks)
    assert allocator.num_cached == 3
    assert allocator.match_prefix(list(range(12))) == first.blocks[:2]  # all 12 would leave nothing to compute
    assert allocator.match_prefix(list(range(13))) == first.blocks
    assert allocator.match_prefix([0, 1, 2, 3, 9, 9, 9, 9, 8]) == first.blocks[:1]


def test_equal_tokens_after_different_ones_are_a_different_prefix():
    allocator = BlockAllocator(8, 2, prefix_cache=True)
    hold(allocator, [1, 1, 7, 7])
    assert allocator.match_prefix([2, 2, 7, 7, 0]) == []
    assert allocator.match_prefix([7, 7, 7, 7, 0]) == []


def test_blocks_that_are_not_computed_are_not_shared():
    allocator = BlockAllocator(8, 2, prefix_cache=True)
    first = hold(allocator, [1, 2, 3, 4, 5], computed=False)
    assert allocator.match_prefix([1, 2, 3, 4, 5]) == []
    allocator.register(first.blocks, first.tokens, num_computed_tokens=3)
    assert allocator.match_prefix([1, 2, 3, 4, 5]) == first.blocks[:1]


def test_the_first_of_two_equal_prefixes_stays_and_the_other_is_freed():
    allocator = BlockAllocator(8, 2, prefix_cache=True)
    first, second = (hold(allocator, [1, 2, 3], computed=False) for _ in range(2))
    for holder in (first, second):
        allocator.register(holder.blocks, holder.tokens, 3)
    assert allocator.match_prefix([1, 2, 3]) == first.blocks[:1]
    allocator.release(second.blocks)
    assert (allocator.num_cached, allocator.num_used) == (0, 2)
    allocator.check([first.blocks])


def test_the_head_of_a_prefix_outlives_its_tail():
    allocator = BlockAllocator(3, 2, prefix_cache=True)
    first = hold(allocator, [1, 2, 3, 4, 5, 6])
    allocator.release(first.blocks)
    allocator.allocate(1)
    assert allocator.num_evictions == 1
    assert allocator.match_prefix([1, 2, 3, 4, 5, 6, 7]) == first.blocks[:2]


def test_the_prefix_that_was_released_longest_ago_is_evicted_first():
    allocator = BlockAllocator(2, 2, prefix_cache=True)
    old, new = hold(allocator, [1, 1]), hold(allocator, [2, 2])
    allocator.release(old.blocks)
    allocator.release(new.blocks)
    allocator.release(hold(allocator, [1, 1, 0]).blocks)  # takes up the old one again, and evicts the new one
    assert allocator.match_prefix([1, 1, 0]) == old.blocks
    assert allocator.match_prefix([2, 2, 0]) == []


def test_an_evicted_block_can_stand_for_another_prefix():
    allocator = BlockAllocator(2, 2, prefix_cache=True)
    allocator.release(hold(allocator, [1, 1, 2, 2]).blocks)
    second = hold(allocator, [3, 3, 4, 4])
    assert allocator.match_prefix([3, 3, 4, 4, 0]) == second.blocks
    assert allocator.match_prefix([1, 1, 2, 2, 0]) == []


def test_matched_blocks_do_not_count_as_room_for_new_ones():
    allocator = BlockAllocator(3, 2, prefix_cache=True)
    allocator.release(hold(allocator, [1, 2, 3, 4]).blocks)
    matched = allocator.match_prefix([1, 2, 3, 4, 5])
    assert allocator.num_available == 3
    assert allocator.can_hold(matched, 1)
    assert not allocator.can_hold(matched, 2)


def test_hit_counters_restart_with_the_cache():
    allocator = BlockAllocator(8, 2, prefix_cache=True)
    for _ in range(2):
        allocator.release(hold(allocator, [1, 2, 3, 4, 5]).blocks)
    assert (allocator.num_query_tokens, allocator.num_hit_tokens) == (10, 4)
    allocator.reset_prefix_cache()
    assert (allocator.num_query_tokens, allocator.num_hit_tokens, allocator.num_cached) == (0, 0, 0)
    assert allocator.match_prefix([1, 2, 3, 4, 5]) == []


def test_without_a_prefix_cache_nothing_is_kept_or_found():
    allocator = BlockAllocator(8, 2, prefix_cache=False)
    allocator.release(hold(allocator, [1, 2, 3, 4, 5]).blocks)
    assert allocator.num_free == 8
    assert allocator.match_prefix([1, 2, 3, 4, 5]) == []


def test_registering_one_more_block_hashes_one_block(monkeypatch):
    allocator = BlockAllocator(64, 2, prefix_cache=True)
    holder = hold(allocator, list(range(100)))
    hashed = []
    chain = allocator._chain
    monkeypatch.setattr(allocator, "_chain", lambda parent, tokens, index: hashed.append(index) or
                        chain(parent, tokens, index))
    holder.blocks.extend(allocator.allocate(1))
    for num_computed in (100, 101, 102):
        allocator.register(holder.blocks, list(range(102)), num_computed)
    assert hashed == [50]


def test_more_than_what_is_available_is_an_error_in_the_engine():
    allocator = BlockAllocator(2, 2, prefix_cache=True)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 available"):
        allocator.allocate(3)
