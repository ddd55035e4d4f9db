"""Attention in plain torch: runs on any device, and is what faster backends must equal."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from worker.attention.backend import Abilities, PackedChunks
from worker.kv_storage import KEYS, VALUES

if TYPE_CHECKING:
    from torch import Tensor

    from worker.attention.backend import PagedRows
    from worker.kv_storage import KVStorage
    from worker.models.layers import Rotary


class TorchAttention:
    """Gathers the pages of each row or chunk, then attends densely under a mask. Stateless."""

    name = "torch"
    workspace_bytes = 0
    abilities = Abilities(device_metadata=False, float32=True, packed_prefill=False)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Rotary,
        storage: KVStorage,
        metadata: PagedRows | PackedChunks,
    ) -> Tensor:
        """Rotate, write the rows' KV, attend: qkv [N, heads + 2 kv_heads, D] -> [N, heads, D]."""
        kv_heads = storage.layer(layer).shape[2]
        parts = [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
        query, key, value = torch.split(qkv, parts, dim=1)
        storage.write(layer, metadata.blocks, metadata.offsets, rotary(key), value)
        if isinstance(metadata, PackedChunks):
            return self.prefill(rotary(query), storage, layer, metadata)
        return self.decode(rotary(query), storage, layer, metadata)

    def decode(self, query: Tensor, storage: KVStorage, layer: int, rows: PagedRows) -> Tensor:
        """query [N, heads, head_dim] -> [N, heads, head_dim]; a padding row yields zeros."""
        key, value = _gather(storage.layer(layer), rows.own_tables)
        seen = _columns(key) < rows.lengths[:, None]
        return _attend(query[:, None], key, value, seen[:, None])[:, 0]

    def prefill(
        self, query: Tensor, storage: KVStorage, layer: int, chunks: PackedChunks
    ) -> Tensor:
        """query [T, heads, head_dim] -> [T, heads, head_dim], one chunk after the other."""
        pages, tables = storage.layer(layer), chunks.tables[chunks.chunk_rows]
        outputs = [torch.empty_like(query[:0])]
        for chunk, (first, end) in enumerate(pairwise(chunks.bounds)):
            key, value = _gather(pages, tables[chunk : chunk + 1])
            seen = _columns(key) <= chunks.positions[first:end, None]
            outputs.append(_attend(query[None, first:end], key, value, seen[None])[0])
        return torch.cat(outputs)


def _gather(pages: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, kv_heads, W * block_size, head_dim] of tables [B, W], copied."""
    kv_heads, block_size, head_dim = pages.shape[2:]
    # Indexing head by head makes the copy come out in the order that the products want.
    heads = torch.arange(kv_heads, device=pages.device)[:, None]
    shape = (tables.shape[0], kv_heads, tables.shape[1] * block_size, head_dim)
    key = pages[tables[:, None], KEYS, heads]
    value = pages[tables[:, None], VALUES, heads]
    return key.reshape(shape), value.reshape(shape)


def _columns(key: Tensor) -> Tensor:
    """Token positions of the gathered keys, [W * block_size]."""
    return torch.arange(key.shape[2], device=key.device)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Masked attention in float32: query [B, Q, heads, head_dim] -> the same shape and dtype.

    key, value [B, kv_heads, L, head_dim]; seen [B, Q, L] bool. Query head h reads KV head
    h // (heads / kv_heads). `value` must be the caller's own copy: it is changed.
    """
    batch, queries, heads, head_dim = query.shape
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    grouped = (query.float() * head_dim**-0.5).transpose(1, 2)
    grouped = grouped.reshape(batch, kv_heads, group * queries, head_dim)
    scores = grouped @ key.float().transpose(2, 3)
    scores = scores.view(batch, kv_heads, group, queries, length)
    hidden = ~seen[:, None, None]
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    # The second fill turns the 0/0 of a row that sees nothing into zeros.
    weights = weights.masked_fill_(hidden, 0.0).view(batch, kv_heads, group * queries, length)
    # A page holds whatever was there before beyond a row's length, and 0 * NaN is NaN.
    value = value.masked_fill_(~seen.any(1)[:, None, :, None], 0.0)
    output: Tensor = (weights @ value.float()).view(batch, heads, queries, head_dim)
    return output.transpose(1, 2).to(query.dtype)
