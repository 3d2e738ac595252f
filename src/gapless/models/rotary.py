"""Frequencies of the rotary embedding, with the scalings Hugging Face models use to reach beyond the trained length.

Every function computes in float32 in the order Hugging Face does, so that the tables agree to the last bits.
"""

from __future__ import annotations

import math

import torch

from gapless.models.config import RotaryConfig


def rotary_frequencies(config: RotaryConfig, head_dim: int) -> torch.Tensor:
    """float32 [D/2] on the CPU: radians per position of each pair of features."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    if config.kind == "dynamic":
        return 1.0 / _dynamic_theta(config, head_dim) ** exponents
    wavelengths = config.theta**exponents
    frequencies = 1.0 / wavelengths
    match config.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(config, frequencies)
        case "yarn":
            return _yarn(config, wavelengths, head_dim)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor on cosine and sine (YaRN, Peng et al. 2023, section 3.4; DeepSeek's ratio if both scales are set)."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def _dynamic_theta(config: RotaryConfig, head_dim: int) -> float:
    """NTK-aware base for `config.length` tokens (bloc97 and emozilla 2023)."""
    stretch = config.factor * config.length / config.trained_length - (config.factor - 1)
    return config.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(config: RotaryConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves stretched, short ones kept, a linear blend between (Llama 3.1's release)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = (config.trained_length / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    scaled = torch.where(wavelengths > config.trained_length / low, frequencies / config.factor, blended)
    return torch.where(wavelengths < config.trained_length / high, frequencies, scaled)


def _yarn(config: RotaryConfig, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Interpolation blended in by the rotations a feature makes in the trained length (YaRN, section 3.2)."""

    def feature_of(rotations: float) -> float:
        ratio = config.trained_length / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = feature_of(config.beta_fast), feature_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
