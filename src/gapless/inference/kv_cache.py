"""The keys and values of the sequences being generated: one span of fixed capacity each, in one stream per layer.

A span is a document of the key stream (`Segments.starts`), so that attention reads keys where they lie: nothing is
padded for it and nothing moves when a sequence grows. The used spans are always the first ones; a sequence that
leaves gives its span to the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gapless.batch import Segments, TileSpec, segments


class KVCache:
    """Keys and values of up to `sequences` sequences of up to `capacity` tokens.

    A forward pass is announced by `extend`, which gives the segments of its queries and fixes those of its keys;
    each layer then appends its part. `lengths` and `span` refer to a sequence by the number of its span.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        sequences: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tiles: Sequence[TileSpec] = (),
    ):
        """An empty cache; memory is taken at once.

        Args:
            layers: decoder layers.
            kv_heads: K.
            head_dim: D of the keys.
            v_head_dim: of the values; D by default.
            sequences: most sequences at a time.
            capacity: most tokens of a sequence.
            dtype: of the model's activations.
            device: the model's.
            tiles: tile tables that its attention needs (`Decoder.attention_tiles`).
        """
        self.capacity, self._tiles = capacity, tiles
        self.sequences = sequences
        self.lengths: list[int] = []
        """Tokens of each sequence (host), those of the announced forward included."""
        slots = sequences * capacity
        self._keys = [torch.zeros(slots, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [
            torch.zeros(slots, kv_heads, v_head_dim or head_dim, dtype=dtype, device=device) for _ in range(layers)
        ]
        self.device = device
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._segments: Segments | None = None

    @property
    def segments(self) -> Segments:
        """The key documents of the announced forward, in the order of its query documents."""
        assert self._segments is not None, "extend() announces a forward before it runs"
        return self._segments

    def add(self) -> int:
        """Opens an empty span and returns its number, which is the count of sequences before it."""
        assert len(self.lengths) < self.sequences, f"all {self.sequences} spans are in use"
        self.lengths.append(0)
        return len(self.lengths) - 1

    def remove(self, span: int) -> int:
        """Closes a span; the last sequence moves into it, and what nobody has any more is cleared.

        Returns:
            The number that the moved sequence had (the removed one's own number if it was the last).
        """
        last, size = len(self.lengths) - 1, self.capacity
        removed, used = self.lengths[span], self.lengths[last]
        for stream in (*self._keys, *self._values):
            if span != last:
                stream[span * size : span * size + used] = stream[last * size : last * size + used]
                stream[span * size + used : span * size + removed] = 0
            stream[last * size : last * size + used] = 0
        self.lengths[span] = used
        self.lengths.pop()
        return last

    def extend(self, spans: Sequence[int], counts: Sequence[int]) -> Segments:
        """Announces a forward of `counts[i]` new tokens of the sequence in `spans[i]`.

        Args:
            spans: ascending.
            counts: tokens per span, at least 1.

        Returns:
            The segments of the queries, each document's offset being the tokens its sequence had.

        Raises:
            ValueError: a sequence outgrows its span.
        """
        offsets = [self.lengths[span] for span in spans]
        for span, count in zip(spans, counts, strict=True):
            if self.lengths[span] + count > self.capacity:
                raise ValueError(f"{self.lengths[span] + count} tokens exceed the cache's capacity of {self.capacity}")
            self.lengths[span] += count
        starts = [span * self.capacity for span in spans]
        queries = segments(counts, offsets=offsets, tiles=self._tiles, device=self.device)
        keys = segments(
            [self.lengths[span] for span in spans],
            starts=starts,
            tokens=self.sequences * self.capacity,
            device=self.device,
        )
        self._segments = replace(keys, finite_gaps=True)
        shift = torch.tensor(starts, device=self.device).repeat_interleave(torch.tensor(counts, device=self.device))
        self._slots = queries.positions + shift
        return queries

    def append(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the announced tokens' keys and values of a layer.

        Args:
            layer_index: 0-based.
            k: [T, K, D], T the announced tokens.
            v: [T, K, Dv].

        Returns:
            The whole streams [sequences * capacity, K, D] and [sequences * capacity, K, Dv], to be read through
            `segments`; what lies outside them is finite (a masked read does no harm) but has no meaning.
        """
        keys, values = self._keys[layer_index], self._values[layer_index]
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)
        return keys, values
