"""What a layer does between its matrix products, in plain PyTorch: the specification, and the engine's path on a CPU.

Three operations cover it: add to the residual and normalise, turn queries and keys and store keys and values, gate. On
a GPU `ops_triton` does each in one launch; at small batches a layer is little else than launches.

Shape letters: T tokens, E hidden size, F twice the intermediate size, J = H + 2K heads of queries, keys and values side
by side, H query heads, K KV heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels.attention import LayerCache

Store = Callable[[torch.Tensor, torch.Tensor, LayerCache, torch.Tensor], None]


@dataclass(frozen=True)
class Heads:
    """How the columns of a query-key-value product divide, and the norms of queries and keys where there are some."""

    num_heads: int
    num_kv_heads: int
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    eps: float


@dataclass(frozen=True)
class Places:
    """Where each token stands: the cosine and signed sine of its position, and its slot (-1: stored nowhere)."""

    cosine_T1D: torch.Tensor
    sine_T1D: torch.Tensor
    slot_mapping_T: torch.Tensor


class Ops(Protocol):
    """The three operations of a layer."""

    def add_rms_norm(self, hidden_TE: torch.Tensor, update_TE: torch.Tensor | None, weight_E: torch.Tensor,
                     eps: float) -> torch.Tensor:
        """Add `update_TE`, if there is one, to `hidden_TE` in place; returns hidden / rms(hidden) * weight.

        The sum is rounded to the dtype of `hidden_TE` first; the mean is accumulated in float32.
        """

    def rotate_and_store(self, heads_TJD: torch.Tensor, heads: Heads, places: Places,
                         cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise queries and keys, turn them to their positions, and write keys and values to their slots.

        Returns queries [T, H, D], keys and values [T, K, D]; `heads_TJD` may be overwritten. Arithmetic is float32.
        """

    def silu_and_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half, [T, F / 2]."""


def rotate(x_THD: torch.Tensor, cosine_T1D: torch.Tensor, sine_T1D: torch.Tensor) -> torch.Tensor:
    """Heads turned to their positions, in x's dtype; the arithmetic is float32. See `engine.model.rope`."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return torch.addcmul(x_THD * cosine_T1D, swapped_THD, sine_T1D).to(x_THD.dtype)


@dataclass(frozen=True)
class TorchOps:
    """The specification. `store` is the attention backend's."""

    store: Store

    def add_rms_norm(self, hidden_TE: torch.Tensor, update_TE: torch.Tensor | None, weight_E: torch.Tensor,
                     eps: float) -> torch.Tensor:
        if update_TE is not None:
            hidden_TE += update_TE
        return F.rms_norm(hidden_TE, weight_E.shape, weight_E, eps)

    def rotate_and_store(self, heads_TJD: torch.Tensor, heads: Heads, places: Places,
                         cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        rope = places.cosine_T1D, places.sine_T1D
        if heads.q_norm_D is not None and heads.k_norm_D is not None:
            q_THD, k_TKD, v_TKD = heads_TJD.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            q_THD = rotate(F.rms_norm(q_THD, heads.q_norm_D.shape, heads.q_norm_D, heads.eps), *rope)
            k_TKD = rotate(F.rms_norm(k_TKD, heads.k_norm_D.shape, heads.k_norm_D, heads.eps), *rope)
        else:
            # Queries and keys lie side by side: without a norm of their own they turn together.
            qk, v_TKD = heads_TJD.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
            q_THD, k_TKD = rotate(qk, *rope).split((num_heads, num_kv_heads), dim=1)
        self.store(k_TKD, v_TKD, cache, places.slot_mapping_T)
        return q_THD, k_TKD, v_TKD

    def silu_and_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
