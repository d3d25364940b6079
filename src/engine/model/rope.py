"""Rotary position embedding: head dimensions i and i + D/2 form a pair that turns by position x frequency i.

Cosines and sines of all positions are computed once, in float32. The sine's first half is negated in the table, so that
turning a head is x * cos + swapped(x) * sin, with the halves swapped (`engine.kernels.ops.rotate`). Llama 3 (after its
release's `apply_scaling`) stretches long wavelengths by `factor`, keeps short ones, and blends those between.
"""

import math

import torch

from engine.config import Architecture


def inverse_frequencies(architecture: Architecture) -> torch.Tensor:
    """Radians per position of each pair, [D / 2] float32."""
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    if architecture.rope_scaling is None:
        return frequencies
    return llama3_scaled(frequencies, **{key: float(value) for key, value in architecture.rope_scaling.items()
                                         if key != "rope_type"})


def llama3_scaled(frequencies: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float,
                  original_max_position_embeddings: float) -> torch.Tensor:
    """Frequencies stretched for a context `factor` times as long, as Llama 3.1 does."""
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def rope_table(architecture: Architecture, max_positions: int, device: torch.device) -> torch.Tensor:
    """Cosine and signed sine of every position, [max_positions, 2, D] float32."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(architecture))
    cosine, sine = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)), 1).to(device)
