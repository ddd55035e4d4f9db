"""The bytes of the KV cache: one tensor of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protocol.errors import ExecutorClosedError

if TYPE_CHECKING:
    from torch import Tensor

KEYS, VALUES = 0, 1
"""Index of keys and of values in the third dimension of the pages."""


class KVStorage:
    """Owner: the model runner. Mutated only by: write, write_tokens, copy_tokens and close.

    Pages are [num_blocks + 1, layers, 2, kv_heads, block_size, head_dim], so a block holds all
    layers of `block_size` tokens of one plane, and one head's page is contiguous. Which block
    belongs to whom is not known here. The last block is the scratch block, where padding rows
    write: no table of a request ever names it.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks + 1, num_layers, 2, kv_heads, block_size, head_dim)
        self._pages: Tensor | None = torch.zeros(shape, dtype=dtype, device=device)

    def __repr__(self) -> str:
        state = "closed" if self._pages is None else f"{tuple(self._pages.shape)}"
        return f"KVStorage({state})"

    @staticmethod
    def bytes_per_block(
        num_layers: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one block. Example: 4 layers, 4 heads, 16 tokens, 64, float32 -> 131,072."""
        return num_layers * 2 * kv_heads * block_size * head_dim * dtype.itemsize

    @property
    def scratch_block(self) -> int:
        """The block that takes what padding rows write."""
        return self.num_blocks

    @property
    def pages(self) -> Tensor:
        """All pages. Raises ExecutorClosedError once the storage is closed."""
        if self._pages is None:
            raise ExecutorClosedError("the KV storage is closed; open a new worker")
        return self._pages

    def page_numbers(self, tables: Tensor) -> Tensor:
        """Numbers int64 [B, kv_heads, W] for `gather` of the blocks int64 [B, W]."""
        _, layers, parts, kv_heads, _, _ = self.pages.shape
        heads = torch.arange(kv_heads, device=tables.device)[:, None]
        return tables[:, None] * (layers * parts * kv_heads) + heads

    def gather(self, layer: int, part: int, numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """Keys or values [B, kv_heads, W, block_size, head_dim] of these pages, copied.

        Pages are picked from a list of all of them, in which that of a head of a part of a layer of
        a block is number ((block * layers + layer) * 2 + part) * kv_heads + head. On a CPU this is
        nine times as fast as indexing all dimensions. The copy is made at the start of `out`, if
        that is given.
        """
        _, _, parts, kv_heads, block_size, head_dim = self.pages.shape
        size, count = block_size * head_dim, numbers.numel()
        which = (numbers + (layer * parts + part) * kv_heads).flatten()
        target = None if out is None else out[: count * size].view(count, size)
        copied = torch.index_select(self.pages.view(-1, size), 0, which, out=target)
        return copied.view(*numbers.shape, block_size, head_dim)

    def layer(self, index: int) -> Tensor:
        """The pages of one layer, a view [blocks, 2, kv_heads, block_size, head_dim]."""
        return self.pages[:, index]

    def write(
        self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Store key and value [N, kv_heads, head_dim] at (blocks [N], offsets [N]), int64.

        Addresses outside the scratch block are distinct; in it, any row may win.
        """
        pages = self.layer(layer)
        pages[blocks, KEYS, :, offsets] = key
        pages[blocks, VALUES, :, offsets] = value

    def read_tokens(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """K and V of single tokens in every layer, [N, layers, 2, kv_heads, head_dim], copied."""
        return self.pages[blocks, :, :, :, offsets]

    def write_tokens(self, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Store what `read_tokens` gave at other addresses, bit for bit; only these tokens."""
        self.pages[blocks, :, :, :, offsets] = values

    def copy_tokens(self, source_blocks: Tensor, target_blocks: Tensor, offsets: Tensor) -> None:
        """Copy K and V of single tokens in every layer, between blocks at the same offset.

        All arguments int64 [M]. Only these tokens are touched, never the rest of a page. Sources
        are read before any target is written.
        """
        pages = self.pages
        pages[target_blocks, :, :, :, offsets] = pages[source_blocks, :, :, :, offsets]

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        self._pages = None
