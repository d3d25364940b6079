"""From logits to token ids without a look from the host: temperature, top-k, top-p, min-p, then one argmax.

Sampling is an argmax over noisy logits, so it needs no cumulative sum, no random stream and no host synchronisation.
The filters come in Hugging Face's order and meaning. Each of them keeps the tokens above some logit, so all three are
one threshold a row; tokens that tie with the last one kept are kept too (Hugging Face drops some of them in top-p).

Shape letters: R requests (rows), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from engine.checks import check_choice
from engine.kernels import noise as reference_noise

FILTER_ROWS = 32  # a sort of [R, V] needs several times the memory of the logits; this bounds it


@dataclass(frozen=True)
class SamplingFilters:
    """Which tokens may be drawn at all."""

    top_k_R: torch.Tensor  # int32; 0: off
    top_p_R: torch.Tensor  # float32; 1: off
    min_p_R: torch.Tensor  # float32; 0: off


@dataclass(frozen=True)
class SamplingBatch:
    """How each row is sampled. `all_greedy` is known to the host; it may save work and never changes a token."""

    temperature_R: torch.Tensor  # float32; 0: greedy
    seed_R: torch.Tensor  # int64, at least 0
    position_R: torch.Tensor  # int32: position of the token that is sampled, which is the context length so far
    all_greedy: bool = False
    filters: SamplingFilters | None = None  # None: no row has any


Sampler = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]


def make_sampler(impl: str) -> Sampler:
    """The function (logits_RV, batch) -> int32 token ids [R] that `sampler.impl` names; `auto` is none of them."""
    check_choice("sampler.impl", impl, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[impl]


def sample_by_seed(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Gumbel-max with noise that depends on (seed, position, token id) alone; rows of temperature 0 take the argmax."""
    greedy_R = logits_RV.argmax(-1)
    if batch.all_greedy:
        return greedy_R.int()
    logits_RV = filter_logits(logits_RV, batch)
    draw = _noise_of(logits_RV.device)
    noisy_RV = _scale(logits_RV, batch.temperature_R).add_(draw(batch.seed_R, batch.position_R, logits_RV.shape[1]))
    return torch.where(batch.temperature_R > 0, noisy_RV.argmax(-1), greedy_R).int()


def sample_in_one_pass(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The tokens of `sample_by_seed`, in Triton: the logits are read once, and no noise is written."""
    from engine.kernels import sample_triton  # needs Triton, which a CPU machine may lack

    return sample_triton.sample(filter_logits(logits_RV, batch), batch.temperature_R, batch.seed_R, batch.position_R)


def sample_by_race(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """nano-vllm's exponential race under torch.compile, drawing from the device's global generator.

    Its noise depends on the batch, so it is exempt from the promise that a seed fixes a request's tokens.
    """
    greedy_R = logits_RV.argmax(-1)
    if batch.all_greedy:
        return greedy_R.int()
    logits_RV = filter_logits(logits_RV, batch)
    return torch.where(batch.temperature_R > 0, _compiled_race()(logits_RV, batch.temperature_R), greedy_R).int()


IMPLEMENTATIONS: dict[str, Sampler] = {"torch": sample_by_seed, "triton": sample_in_one_pass,
                                       "compiled": sample_by_race}
SEEDED = ("torch", "triton")  # a request's tokens depend on its seed alone


def filter_logits(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The logits with -inf where top-k, then top-p, then min-p drop a token; the most likely one always stays."""
    if (filters := batch.filters) is None:
        return logits_RV
    columns = (logits_RV, batch.temperature_R, filters.top_k_R, filters.top_p_R, filters.min_p_R)
    return torch.cat([_filter_rows(*rows) for rows in zip(*(c.split(FILTER_ROWS) for c in columns), strict=True)])


def _filter_rows(logits_RV: torch.Tensor, temperature_R: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor,
                 min_p_R: torch.Tensor) -> torch.Tensor:
    scaled_RV = _scale(logits_RV, temperature_R)
    threshold_R1 = _threshold(scaled_RV, top_k_R, top_p_R, min_p_R)
    return logits_RV.masked_fill(scaled_RV < threshold_R1, float("-inf"))


def _threshold(scaled_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor,
               min_p_R: torch.Tensor) -> torch.Tensor:
    """The smallest scaled logit that all three filters keep, [R, 1]."""
    sorted_RV = _sort_descending(scaled_RV)
    last_R1 = torch.where(top_k_R > 0, top_k_R, sorted_RV.shape[1]).clamp(max=sorted_RV.shape[1])[:, None].long() - 1
    top_k_R1 = sorted_RV.gather(1, last_R1)
    # top-p weighs what top-k left: a token stays while the more likely ones hold less than p. At p = 1 nothing goes,
    # whatever the sum rounds to.
    probs_RV = sorted_RV.masked_fill(sorted_RV < top_k_R1, float("-inf")).softmax(-1)
    mass_before_RV = probs_RV.cumsum(-1) - probs_RV
    is_kept_RV = (mass_before_RV < top_p_R[:, None]) | (top_p_R[:, None] >= 1)
    top_p_R1 = sorted_RV.masked_fill(~is_kept_RV, float("inf")).amin(-1, keepdim=True)
    # A probability of at least min_p times the largest is a logit of at least the largest plus log(min_p).
    min_p_R1 = sorted_RV[:, :1] + min_p_R[:, None].log()
    return torch.maximum(torch.maximum(top_k_R1, top_p_R1), min_p_R1)


def _sort_descending(scaled_RV: torch.Tensor) -> torch.Tensor:
    if scaled_RV.is_cpu:  # numpy's vectorised sort: measured 25 times as fast as torch's for 49,152 floats
        return torch.from_numpy(np.sort(scaled_RV.numpy(), axis=-1)).flip(-1)
    return scaled_RV.sort(-1, descending=True).values


def _scale(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """float32 logits over temperature; rows of temperature 0 (their result is not used) are left as they are."""
    return logits_RV.float() / torch.where(temperature_R > 0, temperature_R, 1.0)[:, None]


@cache
def _compiled_race() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    # Not a decorator: naming the compiler at import costs every run seconds, whichever sampler it uses.
    return torch.compile(_race, dynamic=True)


def _race(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    probs_RV = _scale(logits_RV, temperature_R).softmax(-1)
    return (probs_RV / torch.empty_like(probs_RV).exponential_(1).clamp_min_(1e-10)).argmax(-1)


def _noise_of(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    if device.type == "cpu":
        return reference_noise.noise
    from engine.kernels import noise_triton  # needs Triton, which a CPU machine may lack
    return noise_triton.noise
