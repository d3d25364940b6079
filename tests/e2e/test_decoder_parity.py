"""The decoder computes what transformers computes: float32, prompts and steps through the paged cache."""

import json
from pathlib import Path

import pytest
import torch

from engine.batch import DecodeBatch, PrefillBatch
from engine.config import ModelConfig
from engine.kernels.attention import LayerCache
from engine.kernels.reference import ReferenceAttention
from engine.model.decoder import Decoder
from engine.model.source import resolve_model
from engine.model.weights import load_weights
from tiny_models import VARIANTS, make_checkpoint

BLOCK_SIZE, NUM_BLOCKS = 4, 64
LENGTHS = (1, 4, 5, 23, 60)  # one token, a block, a block and one, several blocks, past the original llama3 context
RELATIVE = 1e-4


class Paged:
    """A decoder over block tables that are handed out in shuffled order, for requests of given prompts."""

    def __init__(self, directory: Path, prompts: list[list[int]], num_new: int) -> None:
        source = resolve_model(ModelConfig(path=str(directory), max_model_len=128), "cpu")
        arch = source.architecture
        self.decoder = Decoder(arch, ReferenceAttention(), torch.float32, torch.device("cpu"), max_positions=128)
        load_weights(self.decoder, directory)
        shape = (2, NUM_BLOCKS, BLOCK_SIZE, arch.num_key_value_heads, arch.head_dim)
        self.caches = [LayerCache(*torch.full(shape, torch.nan)) for _ in range(arch.num_hidden_layers)]
        free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
        self.tokens = [list(prompt) for prompt in prompts]
        self.tables = [[free.pop() for _ in range(-(-(len(prompt) + num_new) // BLOCK_SIZE))] for prompt in prompts]

    def slot(self, request: int, position: int) -> int:
        return self.tables[request][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def prefill(self, cached: tuple[int, ...] | None = None) -> torch.Tensor:
        """Logits of all tokens that lie after each request's `cached` prefix, which was computed before."""
        starts = cached or (0,) * len(self.tokens)
        spans = [range(start, len(tokens)) for start, tokens in zip(starts, self.tokens, strict=True)]
        lengths, contexts = [len(span) for span in spans], [len(tokens) for tokens in self.tokens]
        batch = PrefillBatch(
            input_ids_T=int32([tokens[i] for tokens, span in zip(self.tokens, spans, strict=True) for i in span]),
            positions_T=int32([i for span in spans for i in span]),
            slot_mapping_T=int32([self.slot(r, i) for r, span in enumerate(spans) for i in span]),
            cu_seqlens_q=cumulative(lengths), cu_seqlens_k=cumulative(contexts),
            max_seqlen_q=max(lengths), max_seqlen_k=max(contexts),
            last_token_indices_R=cumulative(lengths)[1:].long() - 1,
            block_tables_RB=None if cached is None else self.block_tables())
        return self.decoder.logits(self.decoder.forward(batch, self.caches))

    def decode(self, num_padded: int = 0) -> torch.Tensor:
        """Logits of each request's last token, from a batch with padded rows at its end."""
        positions, padding = [len(tokens) - 1 for tokens in self.tokens], [0] * num_padded
        batch = DecodeBatch(
            input_ids_R=int32([tokens[-1] for tokens in self.tokens] + padding),
            positions_R=int32(positions + padding),
            slot_mapping_R=int32([self.slot(r, p) for r, p in enumerate(positions)] + [-1] * num_padded),
            block_tables_RB=self.block_tables(num_padded),
            context_lens_R=int32([p + 1 for p in positions] + padding),
            max_context_len=max(positions) + 1)
        return self.decoder.logits(self.decoder.forward(batch, self.caches))[:len(self.tokens)]

    def block_tables(self, num_padded: int = 0) -> torch.Tensor:
        width = max(len(table) for table in self.tables)
        return int32([table + [0] * (width - len(table)) for table in [*self.tables, *([[]] * num_padded)]])


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def random_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 199, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert (ours - theirs).abs().max() <= RELATIVE * theirs.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_prompts_and_of_decode_steps_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model = make_checkpoint(tmp_path, family, **overrides)
    paged = Paged(tmp_path, random_prompts(), num_new=6)
    ours = paged.prefill().split([len(tokens) for tokens in paged.tokens])
    for logits, tokens in zip(ours, paged.tokens, strict=True):
        assert_close(logits, reference_logits(model, tokens))
    last = [logits[-1] for logits in ours]
    for _ in range(6):
        for tokens, logits in zip(paged.tokens, last, strict=True):
            tokens.append(int(logits.argmax()))
        last = list(paged.decode(num_padded=3))
        for logits, tokens in zip(last, paged.tokens, strict=True):
            expected = reference_logits(model, tokens)[-1]
            assert_close(logits, expected)
            assert logits.argmax() == expected.argmax()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_cached_prefix_changes_no_logits(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family)
    prompts = random_prompts((9, 23, 60))
    paged = Paged(tmp_path, [prompt[:length] for prompt, length in zip(prompts, (8, 4, 56), strict=True)], num_new=32)
    paged.prefill()
    paged.tokens = prompts
    ours = paged.prefill(cached=(8, 4, 56)).split([1, 19, 4])
    for logits, tokens in zip(ours, prompts, strict=True):
        assert_close(logits, reference_logits(model, tokens)[-len(logits):])


@pytest.mark.parametrize("variant", ["qwen2_tied", "llama_llama3_rope"])
def test_rope_settings_mean_the_same_in_the_form_of_transformers_4_and_5(variant: str, tmp_path: Path) -> None:
    """nano-vllm issues 167 and 189: settings in a dict gave a crash or the wrong base."""
    family, overrides = VARIANTS[variant]
    model = make_checkpoint(tmp_path, family, **overrides)
    expected = reference_logits(model, random_prompts()[-1])
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    rope = settings.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    old = {"rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    older = {**old, "rope_scaling": old["rope_scaling"] and {"type": rope["rope_type"], **rope, "rope_type": None}}
    for form in ({"rope_parameters": {**rope, "rope_theta": theta}}, old, older):
        path.write_text(json.dumps({**settings, **form}))
        assert_close(Paged(tmp_path, random_prompts()[-1:], num_new=0).prefill(), expected)
