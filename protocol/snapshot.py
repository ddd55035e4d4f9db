"""What a suspended request leaves behind: a handle for the scheduler, bytes for the worker.

A snapshot is everything of a request but its slot and its blocks. It stays in the worker's host
memory, within a bound; what crosses to the scheduler is a handle, or the news that it is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from protocol.identity import RequestKey

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SnapshotHandle:
    """A request was suspended in `epoch`, and its worker holds this much of it.

    `bytes` counts against the worker's bound until the request is resumed or released; `planes`
    are the planes whose KV it has; `checksum` is a CRC-32 over all of it, verified on resume.
    """

    key: RequestKey
    epoch: int
    bytes: int
    planes: int
    checksum: int

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.planes < 1:
            raise ValueError(f"snapshot of {self.key}: epoch and planes count from 1")
        if self.bytes < 0 or not 0 <= self.checksum < 2**32:
            raise ValueError(f"snapshot of {self.key}: bytes or checksum out of range")


class LossReason(Enum):
    """Why a worker has no snapshot to resume from.

    OVER_BOUND  it would not have fitted into what is free of the bound when it was suspended
    MISSING     the worker has none: released, of an earlier epoch, or never suspended
    CORRUPT     its bytes are not the ones that were stored
    """

    OVER_BOUND = "over_bound"
    MISSING = "missing"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class SnapshotLoss:
    """Nothing is left of a request on its worker but its failure, until it is released."""

    key: RequestKey
    reason: LossReason
    message: str


@dataclass(frozen=True, slots=True)
class SnapshotRoom:
    """A worker's memory for snapshots, and what one takes of it.

    `limit` bounds all snapshots together; `row_bytes` is what every request takes, `prompt_bytes`
    more for each token of its prompt, `token_bytes` more for each token with KV, over all planes.
    """

    limit: int = 0
    row_bytes: int = 0
    prompt_bytes: int = 0
    token_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.limit, self.row_bytes, self.prompt_bytes, self.token_bytes) < 0:
            raise ValueError("snapshot room: a number of bytes is negative")

    def size(self, prompt_length: int, written: int) -> int:
        """Exact bytes of a snapshot.

        Example: row 1,000, prompt 8, token 32,768; a prompt of 5 with 6 tokens written ->
        1,000 + 40 + 196,608.
        """
        return self.row_bytes + self.prompt_bytes * prompt_length + self.token_bytes * written


NO_SNAPSHOTS = SnapshotRoom()
"""The room of a worker about whose snapshots nothing is known."""


class SnapshotStore(Generic[T]):
    """The snapshots of one worker, of whatever kind it keeps, and the bytes that they take.

    Owner: whoever runs the worker's plans. Mutated only by: put, drop and clear.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._kept: dict[RequestKey, tuple[int, T]] = {}

    def __repr__(self) -> str:
        return f"<SnapshotStore {len(self._kept)} kept, {self.used} of {self.limit} bytes>"

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._kept

    def keys(self) -> tuple[RequestKey, ...]:
        """The suspended requests."""
        return tuple(self._kept)

    def refuse(self, key: RequestKey, size: int) -> SnapshotLoss | None:
        """The loss of a snapshot of `size` bytes that does not fit; None for one that does."""
        if self.used + size <= self.limit:
            return None
        return SnapshotLoss(
            key,
            LossReason.OVER_BOUND,
            f"request {key}: a snapshot of {size} bytes beside {self.used} exceeds the "
            f"{self.limit} of worker.snapshot_bytes",
        )

    def put(self, key: RequestKey, size: int, snapshot: T) -> None:
        """Keep a snapshot that `refuse` did not refuse."""
        self.drop(key)
        self._kept[key] = (size, snapshot)
        self.used += size

    def get(self, key: RequestKey) -> T | None:
        """The snapshot of a request; it stays until it is dropped."""
        entry = self._kept.get(key)
        return None if entry is None else entry[1]

    def drop(self, key: RequestKey) -> None:
        """Give a snapshot's memory back; a request without one is ignored."""
        size, _ = self._kept.pop(key, (0, None))
        self.used -= size

    def clear(self) -> None:
        """Give all of it back."""
        self._kept.clear()
        self.used = 0


def missing_snapshot(key: RequestKey) -> SnapshotLoss:
    """The answer to a resume of a request that the worker has no snapshot of."""
    return SnapshotLoss(
        key,
        LossReason.MISSING,
        f"request {key} has no snapshot: it was released, is of an earlier epoch, or was never "
        "suspended",
    )
