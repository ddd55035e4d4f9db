"""Randomness as counters: nothing on a worker holds a generator's state.

One uniform is `philox(key, purpose, index)`. Two workers, two slots or two batches that draw for
the same (key, purpose, index) draw the same number, so preemption and migration change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_SEED = 2**63 - 1
MASK32 = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for; keeps draws of different kinds apart under one key."""

    SAMPLE = 0


@dataclass(frozen=True, slots=True)
class RngKey:
    """The randomness of one public request.

    `seed` is the request's resolved seed, `stream` the index of one of its choices.
    """

    seed: int
    stream: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed {self.seed} is not in [0, 2**63)")
        if not 0 <= self.stream <= MASK32:
            raise ValueError(f"stream {self.stream} is not in [0, 2**32)")

    def philox_key(self) -> tuple[int, int]:
        """The two 32-bit key words of Philox4x32: the seed, low word first."""
        return self.seed & MASK32, self.seed >> 32


def philox_counter(key: RngKey, purpose: Purpose, index: int) -> tuple[int, int, int, int]:
    """The four 32-bit counter words of one draw.

    Example: stream 3, SAMPLE, output index 7 -> (7, 0, 0, 3).
    """
    return index & MASK32, index >> 32, int(purpose), key.stream
