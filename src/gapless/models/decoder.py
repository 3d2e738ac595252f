"""The decoder: tokens and their segments in, hidden states out, and the loss of a packed batch.

Shape letters here and in the modules it is made of: T tokens, H hidden, N heads, K kv heads, G = N / K, D head dim,
F ffn, V vocabulary, M rows that are trained.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from gapless.batch import BatchLayout, PackedBatch, Segments, TileSpec
from gapless.kernels.attention import attention_tiles, shared_tiles
from gapless.kernels.cross_entropy import VocabularyShard, linear_cross_entropy
from gapless.kernels.rope import RotaryTable, rotary_table
from gapless.models.attention import Attention, KeyValueCache
from gapless.models.config import DecoderConfig
from gapless.models.linear import Cut, Linear, plain_linear, random_weight
from gapless.models.mlp import MLP
from gapless.models.norm import RMSNorm
from gapless.models.rotary import rotary_frequencies


class Embedding(nn.Module):
    """Rows of a table."""

    cut: Cut | None = None
    """Which rows of a larger table they are."""

    def __init__(self, vocab: int, hidden: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = random_weight(vocab, hidden, dtype=dtype, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens int32 [T]: [T, H]."""
        return functional.embedding(tokens, self.weight)


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised copy and added to the stream in its last GEMM."""

    recorded: Callable[[DecoderLayer, torch.Tensor, Segments, RotaryTable], torch.Tensor] | None = None
    """What stands in for `compute` where a backward may follow; see `gapless.memory.checkpointing`."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, segments: Segments, rotary: RotaryTable, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        """Apply to the stream: x [T, H] -> [T, H]."""
        if self.recorded is not None and cache is None and torch.is_grad_enabled():
            return self.recorded(self, x, segments, rotary)
        return self.compute(x, segments, rotary, cache)

    def compute(
        self,
        x: torch.Tensor,
        segments: Segments,
        rotary: RotaryTable,
        cache: KeyValueCache | None = None,
        *,
        value: bool = True,
    ) -> torch.Tensor:
        """What the layer is: see `forward`; `value` as in `Linear.forward`."""
        spare = self.attention.qkv.spare
        norm = self.attention_norm
        x = self.attention(norm(x, spare), x, segments, rotary, cache, spare=spare, recipe=norm.recipe(x))
        spare, norm = self.mlp.gate_up.spare, self.mlp_norm
        return self.mlp(norm(x, spare), x, segments.dropout, spare=spare, value=value, recipe=norm.recipe(x))


class Decoder(nn.Module):
    """A causal language model on packed streams.

    `embed`, `norm` and `head` may be set to None where a pipeline stage has none. A tied head holds the embedding's
    parameter. Weights are random until `weights.load_weights` fills them.
    """

    embed: Embedding | None
    norm: RMSNorm | None
    head: Linear | None
    rotary_frequencies: torch.Tensor
    dtype: torch.dtype
    """Of weights and activations."""
    vocabulary: VocabularyShard | None = None
    """Of the head, where it is cut over tensor ranks."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Build the modules.

        Args:
            config: the architecture.
            dtype: of weights and activations.
            device: of the weights; "meta" allocates nothing.
        """
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = Embedding(config.vocab, config.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.layers)}
        )
        self.norm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype, device=device)
        head_device = "meta" if config.tied else device
        self.head = plain_linear("lm_head", config.hidden, config.vocab, dtype=dtype, device=head_device)
        if config.tied:
            self.head.weight = self.embed.weight
        # Computed, not loaded: real even where the weights are on the meta device.
        frequencies = rotary_frequencies(config.rotary, config.head_dim)
        real_device = "cpu" if torch.device(device or "cpu").type == "meta" else device
        self.register_buffer("rotary_frequencies", frequencies.to(real_device), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Decoder:
        frequencies = self.rotary_frequencies
        super()._apply(fn, recurse)
        # They go where the weights go, and stay float32 whatever those become, and real as when they were made.
        device = self.rotary_frequencies.device
        self.rotary_frequencies = frequencies if device.type == "meta" else frequencies.to(device)
        # Not asked of a weight: FSDP2 may hold it in float32 and gather it in this.
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def forward(self, tokens: torch.Tensor, segments: Segments, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: int32 [T], or the hidden states [T, H] of the stage before where `embed` is None.
            segments: their documents.
            cache: keys and values of earlier tokens, which it takes the new ones into.

        Returns:
            [T, H] in the model's dtype.

        Raises:
            ValueError: torch.autocast is on.
        """
        if not tokens.is_meta and torch.is_autocast_enabled(tokens.device.type):
            raise ValueError(f"a decoder computes in its own dtype, {self.dtype}: leave torch.autocast out")
        rotary = rotary_table(segments.positions, self.rotary_frequencies, self.config.rotary.attention_factor)
        x = tokens if self.embed is None else self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, segments, rotary, cache)
        return x if self.norm is None else self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden [M, H] on the vocabulary: float32 [M, V]."""
        assert self.head is not None
        return self.head(hidden).float()

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        """Sum of the losses of the micro-batch's trained tokens, 0-d float32; the caller divides by N."""
        return self.head_loss(*self.trained_hidden(batch))

    def head_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of hidden states [M, H] on labels [M]; -100 counts nothing."""
        assert self.head is not None
        return linear_cross_entropy(hidden, self.head.dequantize(), labels, vocabulary=self.vocabulary)

    def trained_hidden(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The trained tokens' hidden states [M, H] and labels int32 [M].

        M is the size of the batch's bucket; the rows that fill it up have label -100.
        """
        return self.select_trained(self(batch.tokens, batch.segments), batch)

    def select_trained(self, hidden: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`trained_hidden` of a forward that has been: hidden [T, H] -> [M, H] and labels [M]."""
        # The rows that fill up become the stream's last token, which has nothing to predict.
        rows = batch.trained.clamp(max=batch.segments.tokens - 1)
        return hidden.index_select(0, rows), batch.labels.index_select(0, rows)

    def batch_layout(self, *, rows: int, row_tokens: int, row_documents: int) -> BatchLayout:
        """The layout of this model's micro-batches, with the tile tables that its kernels need where it is."""
        tiles = self.attention_tiles()
        return BatchLayout(rows=rows, row_tokens=row_tokens, row_documents=row_documents, tiles=tiles)

    def attention_tiles(self) -> tuple[TileSpec, ...]:
        """The tile tables that the model's attention needs on its device; none for the reference."""
        return attention_tiles(*self._attention, groups=self.config.heads // self.config.kv_heads)

    def shared_tiles(self, segments: Segments) -> tuple[bool, ...]:
        """What the model's attention decides by the documents: see `gapless.kernels.attention.shared_tiles`."""
        return shared_tiles(*self._attention, segments, groups=self.config.heads // self.config.kv_heads)

    @property
    def _attention(self) -> tuple[int, int, tuple[int | None, ...], torch.dtype, torch.device]:
        """Head dims, windows, dtype and device."""
        config = self.config
        return config.head_dim, config.head_dim, config.windows, self.dtype, self.rotary_frequencies.device
