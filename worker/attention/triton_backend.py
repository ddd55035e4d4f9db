"""Attention by the kernels of this package: the default on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.attention.backend import Abilities, PackedChunks
from worker.device_memory import tensor_bytes
from worker.kernels.chunk_write import write
from worker.kernels.decode import DecodeWorkspace, decode
from worker.kernels.prefill import prefill, reads_dense_keys

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from worker.attention.backend import PagedRows
    from worker.kv_storage import KVStorage
    from worker.models.layers import Rotary

MAX_SPLITS = 32
PROGRAMS = 512
"""Decode programs that keep all of a device's memory busy when all run at once."""


class TritonAttention:
    """Paged attention without a copy of the pages. Owner: Device. Mutated only by: its kernels.

    One launch rotates, writes and attends for decode, two for prefill. The splits of a history
    depend on the number of rows alone, so equal batches give equal bits.
    """

    name = "triton"
    abilities = Abilities(device_metadata=True, float32=True, packed_prefill=True)

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, rows: int, device: torch.device
    ) -> None:
        """`rows` bounds the rows of a decode batch."""
        most = max(count * splits_of(count, kv_heads) for count in range(1, rows + 1))
        self._workspace = DecodeWorkspace(most, rows, heads, head_dim, device)
        self.workspace_bytes = tensor_bytes(self._workspace)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Rotary,
        storage: KVStorage,
        metadata: PagedRows | PackedChunks,
    ) -> Tensor:
        """Rotate, write the rows' KV, attend: qkv [N, heads + 2 kv_heads, D] -> [N, heads, D]."""
        rotations = (rotary.cosine, rotary.sine)
        if isinstance(metadata, PackedChunks):
            keys = write(
                qkv,
                storage.pages,
                layer,
                metadata.tables,
                metadata.table_rows,
                metadata.positions,
                rotations,
                keep_keys=reads_dense_keys(qkv, len(metadata.chunk_rows)),
            )
            return self._prefill(qkv, storage, layer, metadata, rotations, keys)
        return self._decode(qkv, storage, layer, metadata, rotations)

    def decode(self, query: Tensor, storage: KVStorage, layer: int, rows: PagedRows) -> Tensor:
        """query [N, heads, head_dim] -> [N, heads, head_dim]; a padding row yields zeros."""
        return self._decode(query, storage, layer, rows, None)

    def prefill(
        self, query: Tensor, storage: KVStorage, layer: int, chunks: PackedChunks
    ) -> Tensor:
        """query [T, heads, head_dim] -> [T, heads, head_dim], all chunks in one launch."""
        return self._prefill(query, storage, layer, chunks, None, None)

    def _prefill(
        self,
        query: Tensor,
        storage: KVStorage,
        layer: int,
        chunks: PackedChunks,
        rotary: tuple[Tensor, Tensor] | None,
        keys: Tensor | None,
    ) -> Tensor:
        return prefill(
            query,
            storage.pages,
            layer,
            chunks.tables,
            chunks.chunk_rows,
            chunks.lengths,
            chunks.edges,
            rotary,
            keys,
        )

    def _decode(
        self,
        query: Tensor,
        storage: KVStorage,
        layer: int,
        rows: PagedRows,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        return decode(
            query,
            storage.pages,
            layer,
            rows.tables,
            rows.table_rows,
            rows.lengths,
            rotary,
            self._workspace,
            splits=splits_of(len(rows.lengths), storage.layer(layer).shape[2]),
        )


def splits_of(rows: int, kv_heads: int) -> int:
    """Into how many splits a history goes at most, a power of two.

    Few rows are split until there are PROGRAMS of them. Where somewhat more than can run at once
    are there, halves let the last ones end together.
    Example: 16 heads: 1 row -> 32, 32 rows -> 1, 128 rows -> 2, 256 rows -> 1.
    """
    programs = max(rows * kv_heads, 1)
    if 2 * PROGRAMS <= programs < 8 * PROGRAMS:
        return 2
    return min(1 << (max(PROGRAMS // programs, 1).bit_length() - 1), MAX_SPLITS)
