"""BlockPool: which KV blocks of a lane are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockPool:
    """Free block numbers of one lane. Owner: KVManager. Mutated only by: claim and free.

    Blocks are 0..num_blocks-1, last freed first claimed, block 0 at the start. A claim is all or
    nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    def __repr__(self) -> str:
        return f"<BlockPool {self.free_count}/{self.total} free>"

    @property
    def free_count(self) -> int:
        """Blocks that a claim could take now."""
        return len(self._free)

    def claim(self, count: int) -> tuple[int, ...]:
        """`count` blocks. Raises OverloadedError, and claims none, if fewer are free."""
        if count > len(self._free):
            raise OverloadedError(
                f"{count} blocks needed, {len(self._free)} of {self.total} free: "
                "wait until requests end"
            )
        blocks = tuple(self._free.pop() for _ in range(count))
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Take blocks back. Raises ValueError, and takes none, if one was not claimed."""
        returned = tuple(blocks)
        if len(set(returned)) != len(returned) or not self._used.issuperset(returned):
            raise ValueError(f"blocks {returned} are not all claimed, each once")
        self._used.difference_update(returned)
        self._free.extend(reversed(returned))
