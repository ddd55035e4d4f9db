"""SuspendedRequests: what one lane's worker keeps of requests that gave up their slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.plan import Resume

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.identity import RequestKey
    from protocol.plan import BlockTable
    from protocol.snapshot import SnapshotRoom
    from scheduler.request import Request


class SuspendedRequests:
    """Suspended requests of a lane and the bytes of their snapshots. Owner: Lane.

    Mutated only by: its methods. The bytes of a snapshot count from the suspend that asks for it to
    the plan that resumes it or the answer to its release, so that the worker never has less room.
    Those of a loose request count from its placement on, at the most that they may ever be.
    """

    def __init__(self, room: SnapshotRoom) -> None:
        self.requests: dict[RequestKey, Request] = {}
        self._room = room
        self._bytes: dict[RequestKey, int] = {}
        self._resumes: dict[RequestKey, Resume] = {}

    def __repr__(self) -> str:
        return f"<SuspendedRequests {len(self.requests)}, {self.free_bytes} bytes free>"

    def __bool__(self) -> bool:
        """Whether there is a snapshot, or one is or may be asked for."""
        return bool(self._bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that snapshots can still take."""
        return self._room.limit - sum(self._bytes.values())

    def size(self, request: Request) -> int:
        """Bytes that a snapshot of the request would take; no row of it is in flight."""
        return self._room.size(len(request.prompt), request.written)

    def size_at_most(self, request: Request) -> int:
        """Bytes of the largest snapshot that the request may ever leave."""
        return self._room.size(len(request.prompt), request.capacity_tokens)

    def takes(self, request: Request) -> int:
        """Bytes that a snapshot of the request would take of those that are free."""
        return 0 if request.key in self._bytes else self.size(request)

    def set_aside(self, request: Request) -> None:
        """Keep room for any snapshot of a request that is placed as a loose one."""
        self._bytes[request.key] = self.size_at_most(request)

    def reserve(self, request: Request) -> None:
        """The next plan asks for a snapshot."""
        self._bytes[request.key] = self.size(request)

    def keep(self, request: Request) -> None:
        """The worker has taken the snapshot."""
        self.requests[request.key] = request

    def wake(self, key: RequestKey, tables: BlockTable) -> None:
        """A request has slot and blocks again; the plan of its next row carries the resume."""
        del self.requests[key]
        self._resumes[key] = Resume(key, tables)

    def is_waking(self, key: RequestKey) -> bool:
        """Whether a request's resume was not sent yet."""
        return key in self._resumes

    def resume_of(self, key: RequestKey) -> Resume | None:
        """A request's resume that was not sent yet; None if there is none."""
        return self._resumes.get(key)

    def send(self, keys: Iterable[RequestKey]) -> tuple[Resume, ...]:
        """The resumes of those among `keys` that have one to be sent; each is sent once."""
        if not self._resumes:
            return ()
        # A key has rows in several steps of a plan.
        due = dict.fromkeys(key for key in keys if key in self._resumes)
        for key in due:
            del self._bytes[key]
        return tuple(self._resumes.pop(key) for key in due)

    def forget(self, key: RequestKey) -> None:
        """The worker has nothing of the request any more; one that is not here is ignored."""
        self.requests.pop(key, None)
        self._bytes.pop(key, None)
        self._resumes.pop(key, None)
