"""The fused operations of a layer agree with their PyTorch specification, and write nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.attention import LayerCache
from engine.kernels.ops import Heads, Places, TorchOps, rotate
from engine.kernels.ops_triton import TritonOps
from engine.kernels.reference import ReferenceAttention

REFERENCE, FUSED = TorchOps(ReferenceAttention().store), TritonOps()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 5), size=st.integers(2, 300), has_update=st.booleans(),
       dtype=st.sampled_from(list(TOLERANCE)))
def test_add_rms_norm_agrees(num_tokens, size, has_update, dtype):
    hidden, update = random(num_tokens, size, dtype=dtype), random(num_tokens, size, seed=1, dtype=dtype)
    weight, ours, theirs = random(size, seed=2, dtype=dtype), hidden.clone(), hidden.clone()
    out = FUSED.add_rms_norm(ours, update if has_update else None, weight, 1e-6)
    expected = REFERENCE.add_rms_norm(theirs, update if has_update else None, weight, 1e-6)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"),
                         [(4, 2, 16, 16), (9, 3, 64, 32), (1, 1, 6, 1), (7, 7, 80, 16)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotate_and_store_agrees_and_writes_live_slots_only(has_norm, num_heads, num_kv_heads, head_dim, block_size,
                                                            dtype):
    slots = torch.tensor([block_size * 2, -1, 0, block_size * 4 - 1, -1], dtype=torch.int32)
    num_tokens, num_all = len(slots), num_heads + 2 * num_kv_heads
    qkv = random(num_tokens, num_all, head_dim, dtype=dtype)
    angles = random(num_tokens, 1, head_dim // 2, seed=3)
    table = torch.stack((torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)), 1)
    cosine, sine = table[:, 0], table[:, 1]  # strided, as a look-up leaves them
    norms = (random(head_dim, seed=4, dtype=dtype), random(head_dim, seed=5, dtype=dtype)) if has_norm else (None, None)
    heads, places = Heads(num_heads, num_kv_heads, *norms, 1e-6), Places(cosine, sine, slots)
    results = []
    for ops in (REFERENCE, FUSED):
        # All layers of a block lie between two blocks of this one: strides are not those of a tensor of its own.
        blocks = torch.full((4, 3, 2, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
        cache = LayerCache(blocks[:, 1, 0], blocks[:, 1, 1])
        results.append((*ops.rotate_and_store(qkv.clone(), heads, places, cache), blocks))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype], equal_nan=True)
    assert results[1][3].isfinite().sum() == 3 * 2 * num_kv_heads * head_dim


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 96), (2, 1500)])
def test_silu_and_mul_agrees(num_tokens, size, dtype):
    gate_up = random(num_tokens, 2 * size, dtype=dtype) * 3
    torch.testing.assert_close(FUSED.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up),
                               atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype])


def test_rotation_turns_pairs_of_halves_by_their_angle():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    angle = torch.tensor([0.5, 1.0])
    cosine = torch.cat((angle.cos(), angle.cos()))[None, None]
    sine = torch.cat((-angle.sin(), angle.sin()))[None, None]
    pairs = torch.complex(x[0, 0, :2], x[0, 0, 2:]) * torch.polar(torch.ones(2), angle)
    torch.testing.assert_close(rotate(x, cosine, sine)[0, 0], torch.cat((pairs.real, pairs.imag)))


def test_shapes_that_do_not_fit_are_refused_with_what_was_given():
    with pytest.raises(ValueError, match=r"add_rms_norm needs contiguous rows; got \(4, 3\)"):
        FUSED.add_rms_norm(torch.zeros(3, 4).t(), None, torch.zeros(3), 1e-6)
    with pytest.raises(ValueError, match="silu_and_mul needs contiguous rows"):
        FUSED.silu_and_mul(torch.zeros(4, 6)[:, :4])
    cache = LayerCache(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    places = Places(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"needs contiguous heads \[T, 8, D\]"):
        FUSED.rotate_and_store(torch.zeros(2, 7, 4), Heads(2, 3, None, None, 1e-6), places, cache)
    with pytest.raises(ValueError, match=r"caches \[N, S, 2, 4\]"):
        FUSED.rotate_and_store(torch.zeros(2, 6, 4), Heads(2, 2, None, None, 1e-6), places, cache)
