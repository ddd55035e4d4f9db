"""What an attention backend reads, and how a model's layers reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from worker.kv_storage import KVStorage
    from worker.models.base import LayerAttention


@dataclass(frozen=True, slots=True)
class PagedRows:
    """N single-token rows, each of its own request, depth and length. All tensors int64.

    `positions` [N]; `blocks`, `offsets` [N] where the row's KV is written; `tables` [N, W] the
    block table of the row's own plane, padded with the scratch block; `lengths` [N] tokens that
    the row sees, itself included (position + 1), 0 for a padding row. What a table names beyond
    the length is never seen.
    """

    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    tables: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """C prompt chunks of consecutive positions, T rows in all, at one depth.

    `positions`, `blocks`, `offsets` int64 [T]; `tables` int64 [C, W], one a chunk; `lengths`
    int64 [C], the chunk's last position + 1; `bounds` C + 1 host integers: chunk c has the rows
    bounds[c] .. bounds[c + 1] - 1. A row sees the history before its chunk and the chunk up to
    itself.
    """

    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    tables: Tensor
    lengths: Tensor
    bounds: tuple[int, ...]


class AttentionBackend(Protocol):
    """Causal attention over paged KV, with grouped query heads.

    Scores and softmax are float32, scaled by head_dim^-0.5. The KV of the rows themselves is
    already written when a backend is called. Nothing is read back to the host.
    """

    @property
    def name(self) -> str: ...

    def decode(self, query: Tensor, storage: KVStorage, layer: int, rows: PagedRows) -> Tensor:
        """query [N, heads, head_dim] -> [N, heads, head_dim]; a padding row yields zeros."""
        ...

    def prefill(
        self, query: Tensor, storage: KVStorage, layer: int, chunks: PackedChunks
    ) -> Tensor:
        """query [T, heads, head_dim] -> [T, heads, head_dim]."""
        ...


def paged_attention(
    backend: AttentionBackend, storage: KVStorage, metadata: PagedRows | PackedChunks
) -> LayerAttention:
    """The attention of one batch: writes the rows' KV, then runs the backend over `storage`."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        storage.write(layer, metadata.blocks, metadata.offsets, key, value)
        if isinstance(metadata, PackedChunks):
            return backend.prefill(query, storage, layer, metadata)
        return backend.decode(query, storage, layer, metadata)

    return attend
