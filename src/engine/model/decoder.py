"""One decoder for Llama, Qwen2 and Qwen3: they differ only by the flags of `Architecture`. Inference only.

Matrices that read the same input are one matrix (query, key and value; gate and up), so that each is one product; which
checkpoint tensors lie where in it is told by `Decoder.checkpoint_tensors`, the one thing that loading needs to know.
Whatever depends on the positions is looked up once a step and not once a layer.

Shape letters: T tokens (rows of the batch), R rows whose logits are wanted, E hidden size, H query heads, K KV heads,
D head dimension, V vocabulary. Nothing here waits for the device, so a decode step can be recorded as a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batch import Batch, PrefillBatch
from engine.checks import check_choice
from engine.config import Architecture
from engine.kernels.attention import AttentionBackend, LayerCache
from engine.kernels.ops import Heads, Ops, Places, Store, TorchOps
from engine.model.rope import rope_table


@dataclass(frozen=True)
class StepInputs:
    """What every layer of one step reads."""

    batch: Batch
    places: Places


FEW_ROWS = range(2, 33)  # `project` transposes for these


def project(x_TE: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, [T, rows of W].

    On a CPU a float32 product of a decode batch is computed as (W x^T)^T, which MKL does 1.2 to 2 times as fast for few
    rows (measured for SmolLM2's shapes on two AVX2 cores).
    """
    if x_TE.is_cpu and x_TE.dtype == torch.float32 and len(x_TE) in FEW_ROWS:
        out_TE = torch.mm(weight, x_TE.t()).t().contiguous()
        return out_TE if bias is None else out_TE.add_(bias)
    return F.linear(x_TE, weight, bias)


class Linear:
    """x W^T + b, where W stacks the checkpoint matrices `parts` (name -> output features)."""

    def __init__(self, in_features: int, parts: dict[str, int], has_bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.parts = parts
        self.weight = torch.empty(sum(parts.values()), in_features, dtype=dtype, device=device)
        self.bias = torch.empty(sum(parts.values()), dtype=dtype, device=device) if has_bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return project(x, self.weight, self.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = list(self.parts.values())
        for kind, values in (("weight", self.weight), ("bias", self.bias)):
            if values is not None:
                yield from ((f"{prefix}{name}.{kind}", part)
                            for name, part in zip(self.parts, values.split(sizes), strict=True))


class RMSNorm:
    """A weight over the last dimension, and what keeps the root from zero."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps


class Attention:
    """Projections and what `ops` does between them, around the attention backend."""

    def __init__(self, arch: Architecture, backend: AttentionBackend, ops: Ops, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.backend, self.ops = backend, ops
        self.head_dim = arch.head_dim
        q_size, kv_size = arch.num_attention_heads * self.head_dim, arch.num_key_value_heads * self.head_dim
        self.qkv = Linear(arch.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, arch.qkv_bias,
                          dtype, device)
        self.out = Linear(q_size, {"o_proj": arch.hidden_size}, arch.o_bias, dtype, device)
        self.q_norm = RMSNorm(self.head_dim, arch.rms_norm_eps, dtype, device) if arch.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, arch.rms_norm_eps, dtype, device) if arch.qk_norm else None
        self.heads = Heads(arch.num_attention_heads, arch.num_key_value_heads,
                           self.q_norm.weight if self.q_norm else None, self.k_norm.weight if self.k_norm else None,
                           arch.rms_norm_eps)

    def __call__(self, x_TE: torch.Tensor, step: StepInputs, cache: LayerCache) -> torch.Tensor:
        heads_TJD = self.qkv(x_TE).view(len(x_TE), -1, self.head_dim)
        q_THD, k_TKD, v_TKD = self.ops.rotate_and_store(heads_TJD, self.heads, step.places, cache)
        if isinstance(step.batch, PrefillBatch):
            attended_THD = self.backend.prefill(q_THD, k_TKD, v_TKD, cache, step.batch)
        else:
            attended_THD = self.backend.decode(q_THD, cache, step.batch)
        return self.out(attended_THD.reshape(x_TE.shape[0], -1))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.qkv.checkpoint_tensors(prefix)
        yield from self.out.checkpoint_tensors(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}q_norm.weight", self.q_norm.weight
            yield f"{prefix}k_norm.weight", self.k_norm.weight


class Layer:
    """Attention, then the gated MLP. Each adds what the one before it has computed, and normalises the sum."""

    def __init__(self, arch: Architecture, backend: AttentionBackend, ops: Ops, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.ops = ops
        self.attention_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype, device)
        self.attention = Attention(arch, backend, ops, dtype, device)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype, device)
        size = arch.intermediate_size
        self.gate_up = Linear(arch.hidden_size, {"gate_proj": size, "up_proj": size}, arch.mlp_bias, dtype, device)
        self.down = Linear(size, {"down_proj": arch.hidden_size}, arch.mlp_bias, dtype, device)

    def __call__(self, hidden_TE: torch.Tensor, update_TE: torch.Tensor | None, step: StepInputs,
                 cache: LayerCache) -> torch.Tensor:
        """Add `update_TE`, the layer before's contribution, and the attention's to `hidden_TE` in place; returns what
        this layer's MLP contributes."""
        normed_TE = self.ops.add_rms_norm(hidden_TE, update_TE, self.attention_norm.weight, self.attention_norm.eps)
        attended_TE = self.attention(normed_TE, step, cache)
        normed_TE = self.ops.add_rms_norm(hidden_TE, attended_TE, self.mlp_norm.weight, self.mlp_norm.eps)
        return self.down(self.ops.silu_and_mul(self.gate_up(normed_TE)))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}input_layernorm.weight", self.attention_norm.weight
        yield from self.attention.checkpoint_tensors(f"{prefix}self_attn.")
        yield f"{prefix}post_attention_layernorm.weight", self.mlp_norm.weight
        yield from self.gate_up.checkpoint_tensors(f"{prefix}mlp.")
        yield from self.down.checkpoint_tensors(f"{prefix}mlp.")


def make_ops(name: str, store: Store) -> Ops:
    """The operations that `kernels.ops` names; `auto` is none of them."""
    check_choice("kernels.ops", name, ("torch", "triton"))
    if name == "torch":
        return TorchOps(store)
    from engine.kernels.ops_triton import TritonOps  # needs Triton, which a CPU machine may lack
    return TritonOps()


class Decoder:
    """The model: token ids to hidden states, and hidden states to logits. Weights are uninitialised until loaded.

    `max_positions` bounds the positions that a batch may hold (`model.max_model_len`); `ops` names who computes what is
    between the matrix products (`kernels.ops`).
    """

    def __init__(self, architecture: Architecture, attention: AttentionBackend, dtype: torch.dtype,
                 device: torch.device, max_positions: int, ops: str = "torch") -> None:
        self.architecture = architecture
        self.ops = make_ops(ops, attention.store)
        shape = (architecture.vocab_size, architecture.hidden_size)
        self.embedding = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [Layer(architecture, attention, self.ops, dtype, device)
                       for _ in range(architecture.num_hidden_layers)]
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, dtype, device)
        self.head = self.embedding if architecture.tie_word_embeddings else torch.empty_like(self.embedding)
        self.rope_table = rope_table(architecture, max_positions, device)

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden]; keys and values go to `caches`, one a layer."""
        if isinstance(batch, PrefillBatch):
            input_ids_T, positions_T, slot_mapping_T = batch.input_ids_T, batch.positions_T, batch.slot_mapping_T
        else:
            input_ids_T, positions_T, slot_mapping_T = batch.input_ids_R, batch.positions_R, batch.slot_mapping_R
        cosine_T1D, sine_T1D = self.rope_table.index_select(0, positions_T).split(1, dim=1)
        step = StepInputs(batch, Places(cosine_T1D, sine_T1D, slot_mapping_T))
        hidden_TE, update_TE = F.embedding(input_ids_T, self.embedding), None
        for layer, cache in zip(self.layers, caches, strict=True):
            update_TE = layer(hidden_TE, update_TE, step, cache)
        return self.ops.add_rms_norm(hidden_TE, update_TE, self.norm.weight, self.norm.eps)

    @torch.inference_mode()
    def logits(self, hidden_RE: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor:
        """Next-token logits [R, V] of hidden states that `forward` returned; written to `out_RV` where it is given."""
        if out_RV is None:
            return project(hidden_RE, self.head)
        if hidden_RE.is_cpu:
            return out_RV.copy_(project(hidden_RE, self.head))
        return torch.mm(hidden_RE, self.head.t(), out=out_RV)  # no copy: at 256 rows these are 78 MB

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint by its Hugging Face name, as a view of where it lies here; tied ones once."""
        tensors = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        for index, layer in enumerate(self.layers):
            tensors.update(layer.checkpoint_tensors(f"model.layers.{index}."))
        if self.head is not self.embedding:
            tensors["lm_head.weight"] = self.head
        return tensors

    @property
    def num_parameters(self) -> int:
        """Weights held, tied ones once."""
        return sum(tensor.numel() for tensor in self.checkpoint_tensors().values())

    @property
    def num_bytes(self) -> int:
        """Device memory of the weights and of the rotary table."""
        return self.rope_table.nbytes + sum(tensor.nbytes for tensor in self.checkpoint_tensors().values())
