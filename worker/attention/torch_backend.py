"""Attention in plain torch: runs on any device, and is what faster backends must equal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary

import torch

from worker.attention.backend import Abilities, PackedChunks
from worker.kv_storage import KEYS, VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from worker.attention.backend import PagedRows
    from worker.kv_storage import KVStorage
    from worker.models.layers import Rotary


GROUP_ROWS = 16
"""Rows that are attended together on a CPU, those of like lengths: few pages are for nobody."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What some rows of a batch see, or all, or those of a chunk; the same in every layer.

    rows int64 [B], which of the batch, None for all; numbers [B, kv_heads, W] of their pages;
    hidden bool [B, Q, L]: not seen; partial [P] the pages with tokens that nobody sees, counted
    over all of them, and behind bool [P, block_size, 1] these tokens.
    """

    rows: Tensor | None
    numbers: Tensor
    hidden: Tensor
    partial: Tensor
    behind: Tensor

    @classmethod
    def of(
        cls,
        storage: KVStorage,
        tables: Tensor,
        lengths: Tensor,
        ends: Tensor,
        rows: Tensor | None = None,
    ) -> Self:
        """Of tables [B, W] that are seen up to `lengths` [B], each query up to `ends` [B, Q]."""
        numbers, size = storage.page_numbers(tables), storage.block_size
        batch, heads, width = numbers.shape
        tokens = torch.arange(width * size, device=tables.device)
        behind = (tokens >= lengths[:, None]).view(batch, 1, width, size).expand(-1, heads, -1, -1)
        behind = behind.reshape(-1, size, 1)
        return cls(
            rows=rows,
            numbers=numbers,
            hidden=tokens >= ends[:, :, None],
            partial=(pages := _partial_pages(lengths, heads, width, size)),
            behind=behind[pages],
        )


def _partial_pages(lengths: Tensor, heads: int, width: int, size: int) -> Tensor:
    """The pages int64 [P] of sequences [B] whose values have to be cleared behind `lengths` [B].

    The last page that is seen may end in what was there before, and 0 * NaN is NaN. Those behind it
    are copies of the first one (seen_blocks), which is the last one itself in a short sequence. On
    a GPU, where picking them would mean waiting for it, they are all of them.
    """
    if lengths.is_cuda:
        return torch.arange(len(lengths) * heads * width, device=lengths.device)
    page, last = torch.arange(width), ((lengths - 1).clamp(min=0) // size)[:, None]
    is_partial = (page == last) | (page > last) & (last == 0)
    return is_partial[:, None].expand(-1, heads, -1).flatten().nonzero()[:, 0]


class TorchAttention:
    """Gathers the pages of each row or chunk, then attends densely under a mask.

    Owner: Device. Mutated only by: the device thread. On a CPU the pages go into one buffer, as
    large as any batch has needed: memory that is new to a process costs more than the copy.
    """

    name = "torch"
    workspace_bytes = 0
    abilities = Abilities(device_metadata=False, float32=True, packed_prefill=False)

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._seen_by: WeakKeyDictionary[PagedRows | PackedChunks, list[_Seen]]
        self._seen_by = WeakKeyDictionary()

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
        first, *others = self._seen(storage, rows)
        if first.rows is None:
            output = self._attend(query[:, None], storage, layer, first)[:, 0]
        else:
            output = torch.empty_like(query)
            for seen in (first, *others):
                one = self._attend(query[seen.rows, None], storage, layer, seen)[:, 0]
                output[seen.rows] = one
        return output.masked_fill_((rows.lengths == 0)[:, None, None], 0.0)

    def prefill(
        self, query: Tensor, storage: KVStorage, layer: int, chunks: PackedChunks
    ) -> Tensor:
        """query [T, heads, head_dim] -> [T, heads, head_dim], one chunk after the other."""
        outputs = [torch.empty_like(query[:0])]
        for (first, end), seen in zip(
            pairwise(chunks.bounds), self._seen(storage, chunks), strict=True
        ):
            outputs.append(self._attend(query[None, first:end], storage, layer, seen)[0])
        return torch.cat(outputs)

    def _seen(self, storage: KVStorage, metadata: PagedRows | PackedChunks) -> list[_Seen]:
        """What each part of a batch sees, worked out once for all layers, kept while it lives."""
        seen = self._seen_by.get(metadata)
        if seen is None:
            seen = self._seen_by[metadata] = _parts(storage, metadata)
        return seen

    def _attend(self, query: Tensor, storage: KVStorage, layer: int, seen: _Seen) -> Tensor:
        """query [B, Q, heads, head_dim] -> the same shape."""
        key_buffer, value_buffer = self._buffers(storage, seen.numbers)
        key = storage.gather(layer, KEYS, seen.numbers, key_buffer)
        value = storage.gather(layer, VALUES, seen.numbers, value_buffer)
        pages = value.flatten(0, 2)
        pages.index_copy_(0, seen.partial, pages[seen.partial].masked_fill_(seen.behind, 0.0))
        return _attend(query, key.flatten(2, 3), value.flatten(2, 3), seen.hidden)

    def _buffers(self, storage: KVStorage, numbers: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Room for the keys and the values of these pages; on a GPU torch has some by itself."""
        if numbers.is_cuda:
            return None, None
        count = numbers.numel() * storage.pages[0, 0, 0, 0].numel()
        if self._buffer is None or self._buffer.numel() < 2 * count:
            self._buffer = torch.empty(2 * count, dtype=storage.pages.dtype)
        return self._buffer[:count], self._buffer[count : 2 * count]


def _parts(storage: KVStorage, metadata: PagedRows | PackedChunks) -> list[_Seen]:
    tables, lengths = metadata.seen_tables, metadata.lengths
    if not isinstance(metadata, PackedChunks):
        return [
            _Seen.of(storage, tables[which, :width], lengths[which], lengths[which, None], rows)
            for which, width, rows in _groups(metadata)
        ]
    return [
        _Seen.of(
            storage,
            tables[chunk : chunk + 1],
            lengths[chunk : chunk + 1],
            metadata.positions[None, first:end] + 1,
        )
        for chunk, (first, end) in enumerate(pairwise(metadata.bounds))
    ]


def _groups(rows: PagedRows) -> Iterator[tuple[Tensor | slice, int, Tensor | None]]:
    """Rows that go together: an index of them, the blocks of the longest, and the rows themselves.

    On a CPU lengths are at hand; reading them from a GPU would mean waiting for it, so there all
    rows are one group, and where they are few.
    """
    lengths, width = rows.lengths, rows.tables.shape[1]
    if lengths.is_cuda or len(lengths) <= GROUP_ROWS:
        yield slice(None), width, None
        return
    for some in torch.split(lengths.argsort(stable=True), GROUP_ROWS):
        longest = int(lengths[some[-1]])
        yield some, max(-(-longest // rows.block_size), 1), some


def _attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """Masked attention in float32: query [B, Q, heads, head_dim] -> the same shape and dtype.

    key, value [B, kv_heads, L, head_dim]; hidden [B, Q, L] bool. Query head h reads KV head
    h // (heads / kv_heads). All values are numbers; a row that sees nothing means nothing.
    """
    batch, queries, heads, head_dim = query.shape
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    grouped = (query.float() * head_dim**-0.5).transpose(1, 2)
    grouped = grouped.reshape(batch, kv_heads, group * queries, head_dim)
    scores = grouped @ key.float().transpose(2, 3)
    scores = scores.view(batch, kv_heads, group, queries, length)
    weights = scores.masked_fill_(hidden[:, None, None], float("-inf")).softmax(-1)
    weights = weights.view(batch, kv_heads, group * queries, length)
    output: Tensor = (weights @ value.float()).view(batch, heads, queries, head_dim)
    return output.transpose(1, 2).to(query.dtype)
