"""KV layouts: which plane a loop depth writes and reads."""

from __future__ import annotations

from enum import Enum


class Layout(Enum):
    """How the KV of a token's loops is kept.

    LAST_EXITED  one plane a depth, as the model was trained; a token that exits early has the KV of
                 its exit depth copied into the deeper planes.
    SHARED       one plane for all depths: each loop overwrites the token's KV, and later tokens see
                 what its last loop left. A quarter of the memory at four loops, and another model
                 function: fit only for a checkpoint that was trained for it.
    """

    LAST_EXITED = "last_exited"
    SHARED = "shared"

    def planes(self, max_loops: int) -> int:
        """Planes of a model with `max_loops` loops."""
        return max_loops if self is Layout.LAST_EXITED else 1
