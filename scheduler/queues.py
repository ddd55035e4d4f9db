"""WaitingQueue: who is placed next, who may pass whom, and for how long."""

from __future__ import annotations

from bisect import insort_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protocol.config import SchedulerSettings
    from scheduler.request import Request


class WaitingQueue:
    """Requests without a slot, next one first. Owner: Engine. Mutated only by: its methods.

    Policy "fcfs" keeps the order of arrival; "priority" puts lower `SamplingParams.priority` first
    and keeps the order of arrival among equals. A suspended request keeps its own place.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._order = order_of(settings)
        self._scan_limit = settings.admission_scan_limit
        self._max_bypasses = settings.max_admission_bypasses
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __repr__(self) -> str:
        return f"<WaitingQueue {len(self._requests)} requests>"

    def add(self, request: Request) -> None:
        """Queue a request behind all that come before it."""
        insort_right(self._requests, request, key=self._order)

    def remove(self, request: Request) -> None:
        """A waiting request is waiting no more."""
        self._requests.remove(request)

    def place(self, try_place: Callable[[Request], bool]) -> None:
        """Offer the first requests to `try_place`; those that it takes leave the queue.

        A request that does not fit is passed by those behind it that do, until it has been passed
        `max_admission_bypasses` times: then nobody behind it is placed before it.

        Example: limit 1, 8 blocks free, waiting A (12), B (4), C (4): B is placed and A was passed
        once, so C waits although it would fit; the queue is A, C.
        """
        passed: list[Request] = []
        for _ in range(min(len(self._requests), self._scan_limit)):
            request = self._requests[len(passed)]
            if try_place(request):
                del self._requests[len(passed)]
                for other in passed:
                    other.pass_over()
                if any(other.bypasses >= self._max_bypasses for other in passed):
                    return
            elif request.bypasses >= self._max_bypasses:
                return
            else:
                passed.append(request)


def order_of(settings: SchedulerSettings) -> Callable[[Request], tuple[int, int]]:
    """The order of all requests, waiting or running: a total one, and fixed for each of them."""
    return by_priority if settings.policy == "priority" else by_arrival


def by_priority(request: Request) -> tuple[int, int]:
    """By (priority, arrival), lower sooner."""
    return request.params.priority, request.key.generation


def by_arrival(request: Request) -> tuple[int, int]:
    """By arrival alone, whatever the priority."""
    return 0, request.key.generation
