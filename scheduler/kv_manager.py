"""KVManager: the logical KV of one lane, as tables of (plane, block)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.block_pool import BlockPool

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import BlockTable
    from protocol.profile import WorkerProfile


@dataclass(frozen=True, slots=True)
class KVCost:
    """What a number of tokens costs: `blocks_per_plane` blocks in each of `planes` planes."""

    planes: int
    blocks_per_plane: int

    @property
    def blocks(self) -> int:
        """Blocks over all planes."""
        return self.planes * self.blocks_per_plane


@dataclass(frozen=True, slots=True)
class KVStats:
    """Blocks of one lane, over all planes, and the requests that hold some."""

    total_blocks: int
    free_blocks: int
    tables: int


class KVManager:
    """Block tables of one lane's requests. Owner: Lane. Mutated only by: commit and release.

    Layout LAST_EXITED: one plane a depth. A request's whole table is reserved when it is placed,
    so that it never stops for lack of a block.
    """

    def __init__(self, profile: WorkerProfile) -> None:
        self._planes = profile.planes
        self._block_size = profile.block_size
        self._pool = BlockPool(profile.num_blocks)
        self._tables: dict[RequestKey, BlockTable] = {}

    def __repr__(self) -> str:
        return (
            f"<KVManager {len(self._tables)} tables, "
            f"{self._pool.free_count}/{self._pool.total} blocks free>"
        )

    @property
    def total_blocks(self) -> int:
        """Blocks of the lane, free or not."""
        return self._pool.total

    def cost(self, num_tokens: int) -> KVCost:
        """What `num_tokens` tokens would cost; reserves nothing.

        Example: 17 tokens, block size 16, 4 planes -> 2 blocks a plane, 8 in all.
        """
        return KVCost(self._planes, -(-num_tokens // self._block_size))

    def fits(self, cost: KVCost, headroom: int = 0) -> bool:
        """Whether commit would succeed now and leave `headroom` blocks free."""
        return cost.blocks + headroom <= self._pool.free_count

    def commit(self, key: RequestKey, cost: KVCost) -> BlockTable:
        """Reserve the blocks of `cost` for `key`; the table is [planes][blocks_per_plane].

        Raises OverloadedError when they are not free and ValueError for a key that has a table;
        either changes nothing.
        """
        if key in self._tables:
            raise ValueError(f"request {key} already has a block table")
        blocks = self._pool.claim(cost.blocks)
        width = cost.blocks_per_plane
        table = tuple(blocks[plane * width : (plane + 1) * width] for plane in range(cost.planes))
        self._tables[key] = table
        return table

    def table(self, key: RequestKey) -> BlockTable:
        """The blocks that a request holds, [planes][blocks]."""
        return self._tables[key]

    def release(self, key: RequestKey) -> None:
        """Return all blocks of a request to the pool."""
        table = self._tables.pop(key)
        self._pool.free(block for plane in table for block in plane)

    def stats(self) -> KVStats:
        """Blocks and tables now."""
        return KVStats(self._pool.total, self._pool.free_count, len(self._tables))
