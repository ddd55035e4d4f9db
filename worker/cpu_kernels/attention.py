"""Attention of single rows over paged KV, read where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from worker.cpu_kernels import compiled_layers
from worker.cpu_kernels.team import Kernel

if TYPE_CHECKING:
    from torch import Tensor

ROWS_A_THREAD = 4
"""So many keep all threads busy; of fewer rows, the KV heads are dealt out one by one."""

_WRITE = Kernel(compiled_layers.write)
_ATTEND = Kernel(compiled_layers.attend)


class Places(NamedTuple):
    """Where N rows stand, all int64: tables [T, W], table_rows [N] and positions [N]."""

    tables: Tensor
    table_rows: Tensor
    positions: Tensor


def write(
    qkv: Tensor, pages: Tensor, layer: int, rows: Places, rotary: tuple[Tensor, Tensor]
) -> None:
    """Rotate keys, and store them and values, of qkv [N, heads + 2 kv_heads, D], float32.

    `pages` as KVStorage has them; `rotary` cosines and sines [N, 1, D / 2].
    """
    heads = qkv.shape[1] - 2 * pages.shape[3]
    _WRITE(_geometry(qkv, heads, pages, layer, rows), _tensors(qkv, pages, rows, rotary))


def attend(
    qkv: Tensor,
    pages: Tensor,
    layer: int,
    rows: Places,
    lengths: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    *,
    writes: bool = False,
) -> Tensor:
    """Rotate queries and attend: qkv [N, heads + 2 kv_heads, D] -> [N, heads, D], float32.

    Row n sees lengths[n] tokens, int64 [N]; one that sees none gives zeros. Without `rotary`, qkv
    are rotated queries [N, heads, D] alone. `writes` first does what `write` does, for rows that
    do not see each other.
    """
    rotates = rotary is not None
    count, width, head_dim = qkv.shape
    kv_heads = pages.shape[3]
    heads = width - 2 * kv_heads if rotates else width
    output = torch.empty(count, heads, head_dim)
    shares = kv_heads if count < ROWS_A_THREAD * torch.get_num_threads() else 1
    _ATTEND(
        _geometry(qkv, heads, pages, layer, rows),
        (*_tensors(qkv, pages, rows, rotary or (qkv, qkv)), lengths.contiguous(), output),
        (rotates, writes, shares),
    )
    return output


def _geometry(qkv: Tensor, heads: int, pages: Tensor, layer: int, rows: Places) -> tuple[int, ...]:
    """Counts and strides, as compiled_layers.write and compiled_layers.attend unpack them."""
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    block, of_layer, values, *_ = pages.stride()
    width = rows.tables.stride(0)
    return len(qkv), heads, kv_heads, block_size, head_dim, width, block, layer * of_layer, values


def _tensors(
    qkv: Tensor, pages: Tensor, rows: Places, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    cosine, sine = rotary
    dense = (qkv.contiguous(), cosine.contiguous(), sine.contiguous(), pages)
    return *dense, rows.tables, rows.table_rows.contiguous(), rows.positions.contiguous()
