"""Storing keys and values: live rows land at their slots in every layer's strided view, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import reference
from engine.kernels.attention import LayerCache
from engine.kernels.kv_store import store_kv
from engine.kernels.reference import ReferenceAttention
from engine.kernels.triton_attention import TritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [ReferenceAttention, TritonAttention]
BLOCK_SIZE, NUM_BLOCKS = 16, 4


def stored_one_by_one(whole, k_TKD, v_TKD, slots):
    expected = whole.clone()
    for k_KD, v_KD, slot in zip(k_TKD, v_TKD, slots, strict=True):
        if slot >= 0:
            expected[slot // BLOCK_SIZE, 1, 0, slot % BLOCK_SIZE] = k_KD
            expected[slot // BLOCK_SIZE, 1, 1, slot % BLOCK_SIZE] = v_KD
    return expected


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, BLOCK_SIZE * NUM_BLOCKS - 1), unique=True, max_size=6), st.integers(0, 3), st.randoms())
def test_live_rows_are_written_and_padding_writes_nothing(backend, live_slots, num_padding, random):
    slots = [*live_slots, *[-1] * num_padding]
    random.shuffle(slots)
    whole = torch.full((NUM_BLOCKS, 3, 2, BLOCK_SIZE, 3, 40), torch.nan, device=DEVICE)
    fused_THD = torch.randn(len(slots), 9, 40, device=DEVICE)  # keys and values are slices of one projection
    k_TKD, v_TKD = fused_THD[:, 3:6], fused_THD[:, 6:]
    expected = stored_one_by_one(whole, k_TKD, v_TKD, slots)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    backend().store(k_TKD, v_TKD, LayerCache(whole[:, 1, 0], whole[:, 1, 1]), slots_T)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slots", [[5, -1, 0], [-1, -1], [-1, 63], [7]], ids=str)
def test_the_reference_stores_the_same_without_counting_live_rows(slots):
    whole = torch.full((NUM_BLOCKS, 3, 2, BLOCK_SIZE, 2, 8), torch.nan, device=DEVICE)
    k_TKD = torch.randn(len(slots), 2, 8, device=DEVICE)
    expected = stored_one_by_one(whole, k_TKD, k_TKD, slots)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    for side in (0, 1):
        reference._write_padded(k_TKD, whole[:, 1, side], slots_T)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)


def test_mismatched_shapes_are_refused_with_both():
    cache = LayerCache(torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8))
    with pytest.raises(ValueError, match=r"\(3, 2, 4\).*\(2, 16, 2, 8\)"):
        store_kv(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), cache, torch.zeros(3, dtype=torch.int32))
