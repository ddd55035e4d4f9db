"""What a loop and a token leave in the slots, for float32 on a CPU.

Everything is one call, where torch takes ten to thirty of a few microseconds each. Too little for
a team of threads, but for the KV that finalize copies. Each function has a definition in torch that
it equals bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.cpu_kernels import compiled_slots
from worker.cpu_kernels.team import Kernel

if TYPE_CHECKING:
    from torch import Tensor

_GATHER = Kernel(compiled_slots.gather, exact=True)
_COMMIT_LOOP = Kernel(compiled_slots.commit_loop, exact=True)
_LEAVE = Kernel(compiled_slots.leave, exact=True)
_FINALIZE = Kernel(compiled_slots.finalize, exact=True)
_COMMIT_TOKEN = Kernel(compiled_slots.commit_token, exact=True)


def gather(
    seats: Tensor, hidden: Tensor, position: Tensor, loops: Tensor, planes: int, trash: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """seats.gather_seats: hidden [N, H], and positions, lengths and table rows int64 [N].

    hidden, position and loops are columns of the slots.
    """
    gathered = torch.empty(len(seats), hidden.shape[1])
    positions, lengths, table_rows = (torch.empty_like(seats) for _ in range(3))
    numbers = (len(seats), hidden.shape[1], planes, trash)
    tensors = (seats, hidden, position, loops, gathered, positions, lengths, table_rows)
    _GATHER(numbers, tensors, alone=True)
    return gathered, positions, lengths, table_rows


def commit_loop(
    seats: Tensor,
    hidden: Tensor,
    hazards: Tensor,
    slot_hidden: Tensor,
    survival: Tensor,
    loops: Tensor,
    trash: int,
) -> Tensor:
    """seats.commit_seats: survivals float32 [N] of the slots int64 [N]."""
    survivals = torch.empty_like(hazards)
    tensors = (seats, hidden.contiguous(), hazards, slot_hidden, survival, loops, survivals)
    _COMMIT_LOOP((len(seats), hidden.shape[1], trash), tensors, alone=True)
    return survivals


def leave(
    seats: Tensor,
    loops: Tensor,
    outputs: Tensor,
    survival: Tensor,
    bound: Tensor,
    bounds: tuple[Tensor, Tensor],
    forced: Tensor,
) -> Tensor:
    """boundary.leaves: whether the token of each slot leaves, bool [N]; `bounds` on its loops."""
    leaves = torch.empty(len(seats), dtype=torch.bool)
    tensors = (seats, loops, outputs, survival, bound, *bounds, forced, leaves)
    _LEAVE((len(seats), forced.shape[1]), tensors, alone=True)
    return leaves


def finalize(
    seats: Tensor, position: Tensor, loops: Tensor, tables: Tensor, pages: Tensor, trash: int
) -> None:
    """stages.finalize: the KV of each slot's token from its exit plane to all deeper ones."""
    _, planes, width = tables.shape
    _, layers, parts, kv_heads, block_size, head_dim = pages.shape
    numbers = (len(seats), trash, planes, width, block_size, head_dim)
    strides = (pages.stride(0), layers * parts * kv_heads)
    _FINALIZE((*numbers, *strides), (seats, position, loops, tables, pages))


def commit_token(
    seats: Tensor,
    tokens: Tensor,
    broken: Tensor,
    embedded: Tensor,
    columns: tuple[Tensor, ...],
    trash: int,
    states: tuple[int, int, int],
) -> Tensor:
    """boundary.commit: whether the request of each slot int64 [N] has ended, bool [N].

    `columns` are hidden, token, survival, position, loops, state, outputs, max_tokens, granted and
    ending; `states` READY, PARKED and FINISHED.
    """
    ends = torch.empty(len(seats), dtype=torch.bool)
    numbers = (len(seats), embedded.shape[1], trash, columns[-1].shape[1], *states)
    _COMMIT_TOKEN(numbers, (seats, tokens, broken, embedded, *columns, ends), alone=True)
    return ends
