"""What requests cost in KV blocks, and what a lane has of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCost:
    """What a number of tokens costs: `blocks_per_plane` blocks in each of `planes` planes.

    The first `cached` of them are in the prefix cache, under the first of `digests`, which are
    those of the whole prompt. `others` blocks go to choices that fork from it.
    """

    planes: int
    blocks_per_plane: int
    cached: int = 0
    digests: tuple[bytes, ...] = ()
    others: int = 0

    @property
    def blocks(self) -> int:
        """Blocks over all planes, but for those of others."""
        return self.planes * self.blocks_per_plane

    @property
    def new_blocks(self) -> int:
        """Blocks over all planes that are not cached, for all of them."""
        return self.planes * (self.blocks_per_plane - self.cached) + self.others


@dataclass(frozen=True, slots=True)
class KVStats:
    """Blocks of one lane, over all planes, and the requests that hold some.

    `free_blocks` counts cached ones that no request holds, since a claim evicts them; of the free
    blocks, `promised_blocks` are kept for live requests that will grow into them. `cached_blocks`
    are all that the prefix cache has, `evicted_blocks` all that it gave up for room
    since the lane was opened.
    """

    total_blocks: int
    free_blocks: int
    tables: int
    promised_blocks: int = 0
    cached_blocks: int = 0
    evicted_blocks: int = 0
