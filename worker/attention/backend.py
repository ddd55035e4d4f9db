"""What an attention backend reads, and how a model's layers reach it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from worker.kv_storage import KVStorage
    from worker.models.base import LayerAttention
    from worker.models.layers import Rotary


@dataclass(frozen=True, eq=False)
class Paged:
    """N rows of KV in pages, equal to itself alone. All tensors int64.

    `positions` [N]; `tables` [T, W] block tables and `table_rows` [N] which of them is the one of
    the row's own request and plane. What a table names beyond a length is never seen.
    """

    positions: Tensor
    tables: Tensor
    table_rows: Tensor
    block_size: int

    @cached_property
    def blocks(self) -> Tensor:
        """Where each row's KV is written, [N]."""
        return self.tables[self.table_rows, self.positions // self.block_size]

    @cached_property
    def offsets(self) -> Tensor:
        """The place of each row's KV in its block, [N]."""
        return self.positions % self.block_size


@dataclass(frozen=True, eq=False)
class PagedRows(Paged):
    """N single-token rows, each of its own request, depth and length.

    `lengths` [N] tokens that the row sees, itself included (position + 1), 0 for a padding row.
    """

    lengths: Tensor

    @cached_property
    def seen_tables(self) -> Tensor:
        """The block table of each row, [N, W], as far as it sees; see seen_blocks."""
        return seen_blocks(self.tables[self.table_rows], self.lengths, self.block_size)


@dataclass(frozen=True, eq=False)
class PackedChunks(Paged):
    """C prompt chunks of consecutive positions, N rows in all, at one depth.

    Chunk c has the rows edges[c] .. edges[c + 1] - 1, [C + 1], the table chunk_rows[c], [C], and
    lengths[c], its last position + 1, [C]. A row sees the history before its chunk and the chunk
    up to itself. `bounds` are the edges on the host. Rows behind the last edge are padding: their
    KV goes where their table says, and what comes out for them means nothing.
    """

    chunk_rows: Tensor
    lengths: Tensor
    edges: Tensor
    bounds: tuple[int, ...]

    @cached_property
    def seen_tables(self) -> Tensor:
        """The block table of each chunk, [C, W], as far as it sees; see seen_blocks."""
        return seen_blocks(self.tables[self.chunk_rows], self.lengths, self.block_size)


def seen_blocks(tables: Tensor, lengths: Tensor, block_size: int) -> Tensor:
    """Tables [B, W] in which the first block stands for all that lie behind `lengths` [B] tokens.

    A block behind what is seen belongs to nobody or is yet to be written, so it may hold anything;
    the first one holds numbers if anything of the request does, but for what it has behind
    `lengths` itself.

    Example: blocks of 4 tokens, 5 are seen: (7, 3, 9, 9) -> (7, 3, 7, 7).
    """
    block = torch.arange(tables.shape[1], device=tables.device)
    return tables.where(block * block_size < lengths[:, None], tables[:, :1])


class AttentionBackend(Protocol):
    """Causal attention over paged KV, with grouped query heads.

    Scores and softmax are float32, scaled by head_dim^-0.5. Nothing is read back to the host.
    """

    @property
    def name(self) -> str: ...

    @property
    def abilities(self) -> Abilities: ...

    @property
    def workspace_bytes(self) -> int:
        """Device memory that it holds for good."""
        ...

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Rotary,
        storage: KVStorage,
        metadata: PagedRows | PackedChunks,
    ) -> Tensor:
        """Rotate, write the rows' KV, attend: qkv [N, heads + 2 kv_heads, D] -> [N, heads, D]."""
        ...

    def decode(self, query: Tensor, storage: KVStorage, layer: int, rows: PagedRows) -> Tensor:
        """Attend with rotated queries [N, heads, head_dim], their KV being written already.

        A padding row yields zeros.
        """
        ...

    def prefill(
        self, query: Tensor, storage: KVStorage, layer: int, chunks: PackedChunks
    ) -> Tensor:
        """The same for the rows [T, heads, head_dim] of prompt chunks."""
        ...


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can do.

    `device_metadata`: it reads tables and lengths on the device at the cost of what is seen, so a
    captured decode serves any rows; `float32` as well as bfloat16; `packed_prefill`: all chunks of
    a batch in one launch.
    """

    device_metadata: bool
    float32: bool
    packed_prefill: bool


def paged_attention(
    backend: AttentionBackend, storage: KVStorage, metadata: PagedRows | PackedChunks
) -> LayerAttention:
    """The attention of one batch: its backend over `storage`."""

    # No function of its own: a frame that an error keeps would keep what such a one closes over.
    return partial(backend.attend, storage=storage, metadata=metadata)
