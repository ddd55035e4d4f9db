"""One request planned by hand from its prompt to its last output, one stage a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.plan import Resume
from tests.plans import admission, block_table, coda, prefill, prelude, recurrent

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import Admission, Step
    from protocol.profile import WorkerProfile

ROOM = 12
"""Tokens that a course has blocks for."""


@dataclass(frozen=True, slots=True)
class Course:
    """A request of at most ROOM tokens; `depths` are the exit depths of all outputs but the last.

    Blocks come in areas, each with room for a course: area 2 is the third of the pool.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    depths: tuple[int, ...]
    temperature: float = 0.0

    def admit(self, profile: WorkerProfile, area: int) -> Admission:
        """Its admission over the blocks of an area."""
        return admission(self.key, self.prompt, _area(profile, area), self.temperature)

    def resume(self, profile: WorkerProfile, area: int) -> Resume:
        """Its way back over the blocks of an area."""
        return Resume(self.key, _area(profile, area))

    def steps(self, profile: WorkerProfile) -> tuple[Step, ...]:
        """The prompt in two chunks, then CODA and, for each output looped, PRELUDE and loops."""
        key, length = self.key, len(self.prompt)
        first = length // 2
        steps: list[Step] = [
            prefill(key, 0, first),
            prefill(key, first, length - first),
            coda(key, length - 1, profile.model.max_loops, 0),
        ]
        for output, depth in enumerate(self.depths):
            position = length + output
            steps.append(prelude(key, position))
            steps += [recurrent(key, position, loop) for loop in range(depth)]
            steps.append(coda(key, position, depth, output + 1))
        return tuple(steps)


def _area(profile: WorkerProfile, area: int) -> tuple[tuple[int, ...], ...]:
    width = -(-ROOM // profile.block_size)
    return block_table(profile, ROOM, first=area * width * profile.planes)
