"""BlockPool: which KV blocks of a lane are free, and how many hold each of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockPool:
    """References to the blocks of one lane. Owner: KVManager. Mutated only by: claim, share, free.

    Blocks are 0..num_blocks-1, last freed first claimed, block 0 at the start. A block is claimed
    with one reference, and free again once all its references are gone. Each call is all or
    nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.free_count}/{self.total} free>"

    @property
    def free_count(self) -> int:
        """Blocks that a claim could take now."""
        return len(self._free)

    def references(self, block: int) -> int:
        """How many hold the block; 0 for a free one."""
        return self._references.get(block, 0)

    def claim(self, count: int) -> tuple[int, ...]:
        """`count` blocks, one reference each. Raises OverloadedError if fewer are free."""
        if count > len(self._free):
            raise OverloadedError(
                f"{count} blocks needed, {len(self._free)} of {self.total} free: "
                "wait until requests end"
            )
        blocks = tuple(self._free.pop() for _ in range(count))
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block. Raises ValueError if one was not claimed."""
        for block in self._claimed(blocks):
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each block. Raises ValueError if one was not claimed."""
        returned = self._claimed(blocks)
        for block in reversed(returned):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self._free.append(block)

    def _claimed(self, blocks: Iterable[int]) -> tuple[int, ...]:
        named = tuple(blocks)
        if len(set(named)) != len(named) or not self._references.keys() >= set(named):
            raise ValueError(f"blocks {named} are not all claimed, each once")
        return named
