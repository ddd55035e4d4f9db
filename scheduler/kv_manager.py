"""KVManager: the logical KV of one lane, as tables of (plane, block)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from protocol.errors import OverloadedError
from scheduler.block_pool import BlockPool
from scheduler.kv_cost import KVCost, KVStats
from scheduler.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Collection

    from protocol.identity import RequestKey
    from protocol.plan import BlockTable
    from protocol.profile import WorkerProfile


@dataclass(slots=True)
class _Holding:
    """What one request holds. Owner: KVManager, which alone mutates it.

    The first `published` columns of the table came from the cache or went into it, under the first
    of `digests`.
    """

    table: BlockTable
    digests: tuple[bytes, ...]
    published: int

    def column(self, index: int) -> tuple[int, ...]:
        return tuple(plane[index] for plane in self.table)


class KVManager:
    """Block tables of one lane's requests. Owner: Lane.

    Mutated only by: commit, reserve, fork, grow, forgo, publish, distrust and release. What a
    request was sure to get when it was placed is either in its table or promised to it; there are
    never fewer free blocks than promised ones. Beyond that it may grow while others are free.
    Full-depth prompt blocks are shared once they are complete, and nobody writes to them again.
    """

    def __init__(self, profile: WorkerProfile) -> None:
        self._planes = profile.planes
        self._block_size = profile.block_size
        self._pool = BlockPool(profile.num_blocks)
        self._cache = PrefixCache()
        self._held: dict[RequestKey, _Holding] = {}
        self._evicted_blocks = 0
        self._promises: dict[RequestKey, int] = {}
        self._promised = 0

    def __repr__(self) -> str:
        free = f"{self.free_blocks}/{self.total_blocks} blocks free"
        return f"<KVManager {len(self._held)} tables, {free}>"

    @property
    def total_blocks(self) -> int:
        """Blocks of the lane, free or not."""
        return self._pool.total

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds, cached or not."""
        return self._pool.free_count + self._planes * self._cache.idle_count

    @property
    def unpromised_blocks(self) -> int:
        """Free blocks that nobody is promised."""
        return self.free_blocks - self._promised

    def cost(self, num_tokens: int, digests: tuple[bytes, ...] = (), others: int = 0) -> KVCost:
        """What `num_tokens` tokens would cost, whose prompt has `digests`; changes nothing.

        `others` blocks go to choices that fork from it.

        Example: 17 tokens, block size 16, 4 planes -> 2 blocks a plane, 8 in all.
        """
        blocks_per_plane = -(-num_tokens // self._block_size)
        return KVCost(self._planes, blocks_per_plane, self._cache.match(digests), digests, others)

    def own_blocks(self, num_tokens: int, num_prompt: int) -> int:
        """Blocks, over all planes, of a choice that shares the complete blocks of its prompt.

        Example: 10 of 13 tokens are prompt, block size 4, 4 planes -> (4 - 2) * 4 = 8 blocks.
        """
        width = -(-num_tokens // self._block_size) - num_prompt // self._block_size
        return self._planes * width

    def fits(self, cost: KVCost, headroom: int = 0, leaving: Collection[RequestKey] = ()) -> bool:
        """Whether commit would succeed, were `leaving` gone, and leave `headroom` blocks free.

        Cached blocks that no request holds are free, and charged like new ones.

        Example: 8 free, 4 of them cached; 12 needed, those 4 among them -> 8 + 4 = 12 do not fit.
        """
        idle = self._cache.idle_within(cost.digests, cost.cached)
        free = self.unpromised_blocks
        if leaving:
            gone = self._left_by(leaving)
            shared = map(self._cache.blocks, cost.digests[: cost.cached])
            # What a request shares with those that leave is free then, and charged like new ones.
            idle += sum(blocks is not None and blocks[0] in gone for blocks in shared)
            free += len(gone) + sum(self._promises.get(key, 0) for key in leaving)
        return cost.new_blocks + self._planes * idle + headroom <= free

    def commit(self, key: RequestKey, cost: KVCost, first: KVCost | None = None) -> BlockTable:
        """Reserve the blocks of `cost` for `key`; the table is [planes][blocks_per_plane].

        With `first`, only its blocks, the cached ones among them, are taken now, and the others
        promised. Raises OverloadedError when they are not free, ValueError for a key that has a
        table and for a cost whose cached blocks are gone; each changes nothing, and evicts nothing.

        Example: 8 blocks free, cost 8, first 4 -> a table of 4; 4 are free, and promised.
        """
        if key in self._held:
            raise ValueError(f"request {key} already has a block table")
        if self._cache.match(cost.digests) < cost.cached:
            raise ValueError(f"cached blocks of {key} are gone: ask for the cost again")
        if not self.fits(cost):
            raise OverloadedError(
                f"request {key}: {cost.blocks + cost.others} blocks needed, {self.free_blocks} of "
                f"{self.total_blocks} free and {self._promised} of them promised: "
                "wait until requests end"
            )
        taken = first or cost
        shared = [self._take(digest) for digest in cost.digests[: cost.cached]]
        new = self._claim(taken.blocks_per_plane - cost.cached)
        table = tuple(
            (*(column[plane] for column in shared), *blocks) for plane, blocks in enumerate(new)
        )
        self._held[key] = _Holding(table, cost.digests, cost.cached)
        if promise := cost.blocks - taken.blocks:
            self._promises[key] = promise
            self._promised += promise
        return table

    def lack(self, key: RequestKey, num_tokens: int) -> int:
        """Blocks, over all planes, that `num_tokens` tokens need beyond table and promise.

        Example: 4 planes, blocks of 4 tokens, a table of 1 block a plane, promised 4: 9 tokens
        need 12 blocks, so 4 are lacking.
        """
        return max(self._missing(key, num_tokens) - self._promises.get(key, 0), 0)

    def affordable(self, key: RequestKey, num_tokens: int, kept: int) -> int:
        """The most of `num_tokens` tokens that `key` can grow to and leave `kept` blocks to others.

        Example: 4 planes, blocks of 4 tokens, a table of 1 block a plane, 10 blocks unpromised, 4
        kept: 13 tokens need 12 blocks more, and 8 tokens are what there is room for.
        """
        lack = self.lack(key, num_tokens) - max(self.unpromised_blocks - kept, 0)
        columns = -(-max(lack, 0) // self._planes)
        return min(num_tokens, (-(-num_tokens // self._block_size) - columns) * self._block_size)

    def reserve(self, key: RequestKey, blocks: int) -> None:
        """Promise blocks to a choice without a table; `others` of a commit has left them free."""
        self._held[key] = _Holding(((),) * self._planes, (), 0)
        self._promises[key] = blocks
        self._promised += blocks

    def fork(
        self, key: RequestKey, parent: RequestKey, num_prompt: int, num_tokens: int
    ) -> BlockTable:
        """The table of a choice for `num_tokens` tokens, which holds the parent's prompt.

        The complete blocks of its prompt are the parent's, and held by one more; the others come
        out of what is promised.
        """
        held, source = self._held[key], self._held[parent]
        shared = num_prompt // self._block_size
        held.table = tuple(plane[:shared] for plane in source.table)
        held.digests = source.digests
        self._pool.share(block for plane in held.table for block in plane)
        self.grow(key, num_tokens)
        return held.table

    def grow(self, key: RequestKey, num_tokens: int) -> BlockTable | None:
        """Blocks for `num_tokens` tokens, first of those that are promised to `key`.

        The new blocks alone, to be appended to each plane; None when the table is long enough.
        Raises OverloadedError, and changes nothing, when more are lacking than nobody is promised.
        """
        held = self._held[key]
        missing = self._missing(key, num_tokens)
        if missing <= 0:
            return None
        kept = min(missing, self._promises.get(key, 0))
        if missing - kept > self.unpromised_blocks:
            raise OverloadedError(
                f"request {key}: {missing - kept} blocks more than promised, "
                f"{self.unpromised_blocks} to be had: suspend a request first"
            )
        more = self._claim(missing // self._planes)
        held.table = tuple(old + new for old, new in zip(held.table, more, strict=True))
        if kept:
            self._promises[key] -= kept
            self._promised -= kept
        return more

    def freed_by(self, leaving: Collection[RequestKey]) -> int:
        """Blocks that were neither held nor promised any more, were these requests gone."""
        return len(self._left_by(leaving)) + sum(self._promises.get(key, 0) for key in leaving)

    def forgo(self, key: RequestKey) -> None:
        """A request that leaves grows no more: others may have what was promised to it."""
        self._promised -= self._promises.pop(key, 0)

    def held(self, key: RequestKey) -> int:
        """Blocks of a request's table and promise, shared or not."""
        return sum(map(len, self.table(key))) + self._promises.get(key, 0)

    def table(self, key: RequestKey) -> BlockTable:
        """The blocks that a request holds, [planes][blocks]."""
        return self._held[key].table

    def publish(self, key: RequestKey, num_tokens: int) -> None:
        """Cache a request's complete blocks, whose first `num_tokens` prompt tokens have full KV.

        What is cached already stays as it is, and then the request's own next blocks are not
        cached: their parent would be a block that it does not hold.
        """
        held = self._held[key]
        complete = min(num_tokens // self._block_size, len(held.digests))
        while held.published < complete and self._may_publish(held):
            index = held.published
            parent = held.digests[index - 1] if index else None
            self._pool.share(held.column(index))
            self._cache.add(held.digests[index], parent, held.column(index))
            held.published += 1

    def distrust(self, key: RequestKey) -> None:
        """Forget the cached blocks that a failed request has read or written, and all after them.

        Its KV may be what it failed of, and every later request would read the same bytes again.
        """
        held = self._held[key]
        if self._num_cached(held):
            for blocks in self._cache.drop(held.digests[0]):
                self._pool.free(blocks)

    def release(self, key: RequestKey) -> None:
        """Return a request's blocks, last first; those that are cached stay until evicted."""
        self.forgo(key)
        held = self._held.pop(key)
        self._pool.free(block for plane in held.table for block in plane)
        for index in reversed(range(self._num_cached(held))):
            if self._pool.references(held.table[0][index]) == 1:
                self._cache.rest(held.digests[index])

    def stats(self) -> KVStats:
        """Blocks and tables now."""
        return KVStats(
            total_blocks=self.total_blocks,
            free_blocks=self.free_blocks,
            tables=len(self._held),
            promised_blocks=self._promised,
            cached_blocks=self._planes * len(self._cache),
            evicted_blocks=self._evicted_blocks,
        )

    def _missing(self, key: RequestKey, num_tokens: int) -> int:
        """Blocks, over all planes, that the table of `key` is short of (below 0: over)."""
        columns = -(-num_tokens // self._block_size) - len(self._held[key].table[0])
        return self._planes * columns

    def _left_by(self, keys: Collection[RequestKey]) -> set[int]:
        """The blocks that nobody but these requests holds."""
        holders: Counter[int] = Counter()
        for key in keys:
            held = self._held[key]
            holders.update(block for plane in held.table for block in plane)
        for entry in {digest for key in keys for digest in self._held[key].digests}:
            blocks = self._cache.blocks(entry) or ()
            # The cache's own reference is nobody's.
            holders.update(block for block in blocks if block in holders)
        return {block for block, n in holders.items() if self._pool.references(block) == n}

    def _num_cached(self, held: _Holding) -> int:
        """How many columns of a table are in the cache; a choice's were published by another."""
        columns = zip(held.digests, zip(*held.table, strict=True), strict=False)
        entries = takewhile(lambda entry: self._cache.blocks(entry[0]) == entry[1], columns)
        return sum(1 for _ in entries)

    def _may_publish(self, held: _Holding) -> bool:
        index = held.published
        if self._cache.blocks(held.digests[index]) is not None:
            return False
        return not index or self._cache.blocks(held.digests[index - 1]) == held.column(index - 1)

    def _take(self, digest: bytes) -> tuple[int, ...]:
        """One more request holds a cached entry's blocks."""
        blocks = self._cache.hold(digest)
        self._pool.share(blocks)
        return blocks

    def _claim(self, width: int) -> BlockTable:
        """`width` blocks in each plane, after evicting as many as that takes."""
        count = self._planes * width
        while self._pool.free_count < count:
            self._pool.free(self._cache.evict())
            self._evicted_blocks += self._planes
        blocks = self._pool.claim(count)
        return tuple(blocks[plane * width : (plane + 1) * width] for plane in range(self._planes))
