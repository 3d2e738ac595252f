"""What the decoder needs to know of an architecture. Built from a Hugging Face config.json by `families`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary embedding and the scaling of its frequencies (see `gapless.models.rotary`)."""

    kind: RotaryKind = "default"
    theta: float = 10_000.0
    """Base of the wavelengths."""
    factor: float = 1.0
    """How much longer than trained the context may be (all kinds but default)."""
    trained_length: int = 0
    """Tokens of context the frequencies were trained for (dynamic, llama3, yarn)."""
    length: int = 0
    """dynamic: tokens of context to scale for, chosen once per run; never below `trained_length`."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths over trained_length / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under trained_length / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: rotations within the trained length from which a feature is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations up to which a feature is stretched by the whole factor."""
    truncate: bool = True
    """yarn: round the bounds of that range to whole features."""
    attention_factor: float = 1.0
    """yarn: factor on cosine and sine."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention and a gated MLP."""

    vocab: int
    """V, rows of the embedding and of the head."""
    hidden: int
    """H."""
    layers: int
    heads: int
    """N, query heads."""
    kv_heads: int
    """K, key and value heads; divides N."""
    head_dim: int
    """D; need not be H / N."""
    ffn: int
    """F, features of the MLP."""
    norm_eps: float
    rotary: RotaryConfig
    windows: tuple[int | None, ...]
    """Per layer the keys a token sees, itself included; None for all."""
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    tied: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key-value heads do not divide {self.heads} attention heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        if len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} attention windows for {self.layers} layers")
