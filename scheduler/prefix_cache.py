"""PrefixCache: which complete prompt blocks a lane still has, by a digest of all up to them.

Equal digests mean equal KV. The digest of block k is SHA-256(digest of block k - 1, the block's
token ids as little-endian int64); the one before block 0 stands for all else that KV depends on,
and for the tenant. Only complete blocks of prompt[:-1] have one: the last prompt token is always
run, because its CODA needs the hidden state, which is not KV.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.layout import Layout


def root_digest(fingerprint: str, layout: Layout, block_size: int, tenant: str) -> bytes:
    """What a chain starts from. Each part goes in with its length, so that none runs into the next.

    `tenant` is a salt: without the same one, nobody finds a prompt, or sees by the time that it
    takes whether somebody else has sent it.
    """
    parts = (fingerprint, layout.value, str(block_size), tenant)
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in encoded)).digest()


class PromptDigests:
    """Digests of one prompt, hashed once a lane kind. Owner: its Request. Mutated only by: of."""

    def __init__(self, prompt: tuple[int, ...], fingerprint: str, tenant: str) -> None:
        self._prompt = prompt
        self._fingerprint = fingerprint
        self._tenant = tenant
        self._chains: dict[tuple[int, Layout], tuple[bytes, ...]] = {}

    def __repr__(self) -> str:
        return f"<PromptDigests of {len(self._prompt)} tokens>"

    def of(self, block_size: int, layout: Layout) -> tuple[bytes, ...]:
        """One digest for each complete block of prompt[:-1], as a lane keeps them.

        Example: block size 4 -> 1 digest for a prompt of 5 to 8 tokens, none for one of 4.
        """
        kind = (block_size, layout)
        if kind not in self._chains:
            self._chains[kind] = tuple(self._chain(*kind))
        return self._chains[kind]

    def _chain(self, block_size: int, layout: Layout) -> list[bytes]:
        digest = root_digest(self._fingerprint, layout, block_size, self._tenant)
        column = struct.Struct(f"<{block_size}q")
        chain = []
        for start in range(0, len(self._prompt) - block_size, block_size):
            tokens = column.pack(*self._prompt[start : start + block_size])
            digest = sha256(digest + tokens).digest()
            chain.append(digest)
        return chain


@dataclass(slots=True)
class _Entry:
    """One block of each plane. Owner: PrefixCache, which alone mutates it."""

    blocks: tuple[int, ...]
    parent: bytes | None
    children: set[bytes] = field(default_factory=set)


class PrefixCache:
    """Cached blocks of one lane. Owner: KVManager. Mutated only by: add, hold, rest, evict, drop.

    An entry is one block a plane. It is idle while no request holds its blocks. Two things hold of
    every chain: an entry's parent is cached too, and whoever holds an entry's blocks holds its
    parent's. So idle entries have idle children alone; and since requests let go of their last
    block first, the entry that has been idle longest has none: it is a leaf.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self._entries)} entries, {len(self._idle)} idle>"

    @property
    def idle_count(self) -> int:
        """Entries that can be evicted."""
        return len(self._idle)

    def match(self, digests: Sequence[bytes]) -> int:
        """How many entries, from the first digest on, are cached."""
        return bisect_left(digests, True, key=lambda digest: digest not in self._entries)

    def idle_within(self, digests: Sequence[bytes], count: int) -> int:
        """How many of the first `count` entries, all cached, are idle."""
        return count - bisect_left(digests, True, hi=count, key=lambda d: d in self._idle)

    def blocks(self, digest: bytes) -> tuple[int, ...] | None:
        """The blocks of an entry, one a plane; None if it is not cached."""
        entry = self._entries.get(digest)
        return entry.blocks if entry is not None else None

    def add(self, digest: bytes, parent: bytes | None, blocks: tuple[int, ...]) -> None:
        """A new entry, whose blocks a request holds; its parent is cached."""
        self._entries[digest] = _Entry(blocks, parent)
        if parent is not None:
            self._entries[parent].children.add(digest)

    def hold(self, digest: bytes) -> tuple[int, ...]:
        """The blocks of a cached entry, which a request holds from now on."""
        self._idle.pop(digest, None)
        return self._entries[digest].blocks

    def rest(self, digest: bytes) -> None:
        """No request holds the entry's blocks any more: it is the last to be evicted."""
        self._idle[digest] = None
        self._idle.move_to_end(digest)

    def evict(self) -> tuple[int, ...]:
        """Drop the leaf that has been idle longest; its blocks."""
        (blocks,) = self.drop(next(iter(self._idle)))
        return blocks

    def drop(self, digest: bytes) -> list[tuple[int, ...]]:
        """Drop an entry with all that follow it, held or not; the blocks of each."""
        if digest not in self._entries:
            return []
        parent = self._entries[digest].parent
        if parent is not None:
            self._entries[parent].children.discard(digest)
        dropped, left = [], [digest]
        while left:
            entry = self._entries.pop(last := left.pop())
            self._idle.pop(last, None)
            dropped.append(entry.blocks)
            left.extend(entry.children)
        return dropped
