"""KVManager: the logical KV of one lane, as tables of (plane, block)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import OverloadedError
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
    """Blocks of one lane, over all planes, and the requests that hold some.

    Of the free blocks, `promised_blocks` are kept for live requests that will grow into them.
    """

    total_blocks: int
    free_blocks: int
    tables: int
    promised_blocks: int = 0


class KVManager:
    """Block tables of one lane's requests. Owner: Lane.

    Mutated only by: commit, grow, forgo and release. Layout LAST_EXITED: one plane a depth. What a
    request may ever need is either in its table or promised to it, so that it never stops for lack
    of a block; there are never fewer free blocks than promised ones.
    """

    def __init__(self, profile: WorkerProfile) -> None:
        self._planes = profile.planes
        self._block_size = profile.block_size
        self._pool = BlockPool(profile.num_blocks)
        self._tables: dict[RequestKey, BlockTable] = {}
        self._promises: dict[RequestKey, int] = {}
        self._promised = 0

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
        return cost.blocks + headroom <= self._pool.free_count - self._promised

    def commit(self, key: RequestKey, cost: KVCost, first: KVCost | None = None) -> BlockTable:
        """Reserve the blocks of `cost` for `key`; the table is [planes][blocks_per_plane].

        With `first`, only its blocks are taken now, and the others promised. Raises OverloadedError
        when they are not free and ValueError for a key that has a table; either changes nothing.

        Example: 8 blocks free, cost 8, first 4 -> a table of 4; 4 are free, and promised.
        """
        if key in self._tables:
            raise ValueError(f"request {key} already has a block table")
        if not self.fits(cost):
            raise OverloadedError(
                f"request {key}: {cost.blocks} blocks needed, {self._pool.free_count} of "
                f"{self._pool.total} free and {self._promised} of them promised: "
                "wait until requests end"
            )
        taken = first or cost
        self._tables[key] = table = self._claim(taken)
        if promise := cost.blocks - taken.blocks:
            self._promises[key] = promise
            self._promised += promise
        return table

    def grow(self, key: RequestKey, num_tokens: int) -> BlockTable | None:
        """Blocks for `num_tokens` tokens, out of what is promised to `key`.

        The new blocks alone, to be appended to each plane; None when the table is long enough.
        """
        table = self._tables[key]
        missing = -(-num_tokens // self._block_size) - len(table[0])
        if missing <= 0:
            return None
        more = self._claim(KVCost(self._planes, missing))
        self._tables[key] = tuple(old + new for old, new in zip(table, more, strict=True))
        self._promises[key] -= missing * self._planes
        self._promised -= missing * self._planes
        return more

    def forgo(self, key: RequestKey) -> None:
        """A request that has ended grows no more: others may have what was promised to it."""
        self._promised -= self._promises.pop(key, 0)

    def table(self, key: RequestKey) -> BlockTable:
        """The blocks that a request holds, [planes][blocks]."""
        return self._tables[key]

    def release(self, key: RequestKey) -> None:
        """Return all blocks of a request to the pool."""
        self.forgo(key)
        table = self._tables.pop(key)
        self._pool.free(block for plane in table for block in plane)

    def stats(self) -> KVStats:
        """Blocks and tables now."""
        return KVStats(self._pool.total, self._pool.free_count, len(self._tables), self._promised)

    def _claim(self, cost: KVCost) -> BlockTable:
        blocks = self._pool.claim(cost.blocks)
        width = cost.blocks_per_plane
        return tuple(blocks[plane * width : (plane + 1) * width] for plane in range(cost.planes))
