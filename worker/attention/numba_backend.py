"""Attention by compiled code over the pages where they lie: the default on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.attention.backend import Abilities, PackedChunks
from worker.cpu_kernels.attention import Places, attend, write

if TYPE_CHECKING:
    from torch import Tensor

    from worker.attention.backend import Paged, PagedRows
    from worker.kv_storage import KVStorage
    from worker.models.layers import Rotary


class NumbaAttention:
    """Paged attention without a copy of the pages. Stateless.

    Each row is computed as if it were alone, whether it decodes or is one of a prompt's: its bits
    do not depend on the batch that it is in.
    """

    name = "numba"
    workspace_bytes = 0
    abilities = Abilities(device_metadata=True, float32=True, packed_prefill=True)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Rotary,
        storage: KVStorage,
        metadata: PagedRows | PackedChunks,
    ) -> Tensor:
        """Rotate, write the rows' KV, attend: qkv [N, heads + 2 kv_heads, D] -> [N, heads, D]."""
        rotations, pages = (rotary.cosine, rotary.sine), storage.pages
        if isinstance(metadata, PackedChunks):
            # Rows of a chunk see each other: all must have been written before any is read.
            write(qkv, pages, layer, _places(metadata), rotations)
            lengths = metadata.positions + 1
            return attend(qkv, pages, layer, _places(metadata), lengths, rotations)
        lengths = metadata.lengths
        return attend(qkv, pages, layer, _places(metadata), lengths, rotations, writes=True)

    def decode(self, query: Tensor, storage: KVStorage, layer: int, rows: PagedRows) -> Tensor:
        """query [N, heads, head_dim] -> [N, heads, head_dim]; a padding row yields zeros."""
        return attend(query, storage.pages, layer, _places(rows), rows.lengths, None)

    def prefill(
        self, query: Tensor, storage: KVStorage, layer: int, chunks: PackedChunks
    ) -> Tensor:
        """query [T, heads, head_dim] -> [T, heads, head_dim], all chunks in one call."""
        lengths = chunks.positions + 1
        return attend(query, storage.pages, layer, _places(chunks), lengths, None)


def _places(rows: Paged) -> Places:
    tables = rows.tables
    if tables.stride(1) != 1:  # a table's entries are read one after the other
        tables = tables.contiguous()
    return Places(tables, rows.table_rows, rows.positions)
