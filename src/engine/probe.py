"""Decode steps without requests: synthetic rows on a built engine, eager or replayed, for checks and measurements.

A probe writes the rows of live requests and the KV cache, so no request may be unfinished. Contexts get blocks of
their own as far as the cache reaches; beyond that they share the blocks before their last, which changes no shape.
Tokens that later steps add beyond a context's last block share block 0.
"""

import random
from collections.abc import Sequence

import torch

from engine.batch import PrefillBatch
from engine.decode_step import NO_HINTS, STAGES, DecodeStep
from engine.device import on_stream
from engine.graph.graphs import DecodeGraphs
from engine.memory.kv_cache import KVCache
from engine.sampler import SamplingBatch
from engine.worst_case import largest_prefill


class DecodeProbe:
    """One batch of synthetic rows at a time. Everything is launched on the engine's stream and not waited for."""

    def __init__(self, step: DecodeStep, graphs: DecodeGraphs | None, kv_cache: KVCache, max_model_len: int,
                 stream: torch.cuda.Stream | None) -> None:
        self.step, self.graphs = step, graphs
        self.max_num_live = min(step.static.capacity, kv_cache.num_blocks)
        self.max_model_len, self.stream = max_model_len, stream
        self._kv_cache = kv_cache
        self._size = 0
        self._prefills: dict[int, PrefillBatch] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured batch sizes."""
        return () if self.graphs is None else self.graphs.sizes

    @torch.inference_mode()
    def fill(self, num_live: int, size: int, context_len: int, seed: int = 0, is_mixed: bool = False,
             temperature: float = 0.0) -> None:
        """Make rows 0 to `num_live` live, with contexts of `context_len` tokens (up to it where `is_mixed`), and send a
        batch of them padded to `size`. All sample at `temperature`; every other one is greedy where `is_mixed`.

        Raises ValueError where the rows, their blocks or `context_len` exceed what the engine has.
        """
        if not 1 <= num_live <= min(size, self.max_num_live) or size > self.step.static.capacity:
            raise ValueError(f"a probe of {size} rows (at most {self.step.static.capacity}) takes 1 to "
                             f"{min(size, self.max_num_live)} live ones; got {num_live}")
        if not 1 <= context_len <= self.max_model_len:
            raise ValueError(f"a probe takes contexts of 1 to {self.max_model_len} tokens; got {context_len}")
        rng = random.Random(seed)
        lengths = [rng.randint(1, context_len) if is_mixed else context_len for _ in range(num_live)]
        with on_stream(self.stream):
            self._write_rows(lengths, [temperature * (not is_mixed or row % 2 == 0) for row in range(num_live)], rng)
            self.step.static.write(range(num_live), [-1] * num_live, size)
        self._size = size

    def _write_rows(self, lengths: Sequence[int], temperatures: Sequence[float], rng: random.Random) -> None:
        state, block_size = self.step.rows.state, self._kv_cache.block_size
        num_live, num_blocks = len(lengths), self._kv_cache.num_blocks
        widths = [-(-length // block_size) for length in lengths]
        tables = torch.zeros(num_live, max(widths), dtype=torch.int32)
        next_block, num_shared = num_live, max(1, num_blocks - num_live)
        for row, width in enumerate(widths):
            before = [num_live + (next_block - num_live + column) % num_shared for column in range(width - 1)]
            tables[row, :width] = torch.tensor([*(block % num_blocks for block in before), row])
            next_block += width - 1
        used = min(next_block, num_blocks)
        self._kv_cache.blocks_NLPSKD[:used].normal_()
        vocab_size = self.step.static.logits_RV.shape[1]
        columns = {
            state.last_token_N: [rng.randrange(vocab_size) for _ in lengths],
            state.position_N: [length - 1 for length in lengths],
            state.temperature_N: temperatures,
            state.seed_N: [rng.getrandbits(62) for _ in lengths],
        }
        for column, values in columns.items():
            column[:num_live] = torch.tensor(values, dtype=column.dtype, device=column.device)
        state.block_tables_NB[:num_live, :max(widths)] = tables.to(state.block_tables_NB.device)

    def eager(self, stages: Sequence[str] = STAGES) -> None:
        """Launch the step, or some of its stages, eagerly; padding included, and for any context length."""
        with on_stream(self.stream):
            self.step.run(stages, self._size)

    def replay(self) -> None:
        """Launch the step with the stages of the graph by replay; those after it work on padding, too."""
        assert self.graphs is not None, "nothing was captured"
        with on_stream(self.stream):
            self.graphs.run_step(self._size, self._size, NO_HINTS)

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> None:
        """Launch a prefill of `num_tokens` (one prompt, if that is within model.max_model_len) with its logits and
        sampling. It stores nothing. Its batch is built on the first call and used again."""
        step = self.step
        with on_stream(self.stream):
            if num_tokens not in self._prefills:
                device = step.static.tokens_R.device
                self._prefills[num_tokens] = largest_prefill(num_tokens, self.max_model_len, device)
            batch = self._prefills[num_tokens]
            logits_RV = step.decoder.logits(step.decoder.forward(batch, step.caches)[batch.last_token_indices_R])
            zeros_R = torch.zeros(len(logits_RV), device=logits_RV.device)
            step.sampler(logits_RV, SamplingBatch(zeros_R, zeros_R.long(), zeros_R.int()))
