"""FutureSubmission: the ticket that every executor hands out, over a standard Future.

Whoever holds a ticket retires it. A net below catches those that were dropped instead.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from protocol.errors import DeadlineError, ExecutorClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from protocol.result import PlanResult

    _Dropped: TypeAlias = tuple[int, Future[Any], Callable[[], None]]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TicketNet:
    """Tickets that were dropped without being retired. Owner: an executor.

    Mutated only by: its tickets as they vanish, and reclaim. A ticket may vanish on any thread in
    the middle of anything, also of a block that holds the executor's lock. So there it is only put
    into a queue, whose put needs no lock that it could wait for; the rest is done by reclaim.
    """

    def __init__(self) -> None:
        self._dropped: queue.SimpleQueue[_Dropped] = queue.SimpleQueue()

    def catch(self, seq: int, future: Future[Any], on_retire: Callable[[], None]) -> None:
        """Keep what a vanished ticket held. Never waits."""
        self._dropped.put((seq, future, on_retire))

    def reclaim(self) -> None:
        """Warn of each ticket that was caught and retire it in its owner's place.

        The executor calls this before it counts what is in flight, without holding its lock. Nobody
        is told of tickets that vanish after the last call; there is nothing left to free then.
        """
        for seq, future, on_retire in self._take():
            logger.warning(
                "the ticket of plan %d was dropped without being retired: what it holds is free "
                "once the plan has run; call retire() on every ticket, collected or not",
                seq,
            )
            _when_done(future, on_retire)

    def _take(self) -> Iterator[_Dropped]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._dropped.get_nowait()


class FutureSubmission(Generic[T]):
    """One submitted plan. Owner: its executor. Mutated only by: retire.

    The executor sets the future's value T or exception; `read` turns T into the result, in the
    thread of whoever collects. `on_retire` runs once, when the ticket is retired and the future
    done, so nothing that the plan still writes to is freed under it. A ticket that is dropped
    unretired falls into `net`.
    """

    def __init__(
        self,
        seq: int,
        future: Future[T],
        read: Callable[[T], PlanResult],
        on_retire: Callable[[], None],
        net: TicketNet,
    ) -> None:
        self._seq = seq
        self._future = future
        self._read = read
        self._on_retire = on_retire
        self._net = net
        self._retired = False

    def __del__(self) -> None:
        if not self._retired:
            self._net.catch(self._seq, self._future, self._on_retire)

    def __repr__(self) -> str:
        state = "retired" if self._retired else "ready" if self.ready() else "pending"
        return f"<Submission {self._seq} {state}>"

    @property
    def seq(self) -> int:
        """The plan's sequence number."""
        return self._seq

    def ready(self) -> bool:
        """Whether collect would return, or raise, without waiting."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once ready; at once if it is already. It runs on any thread."""
        self._future.add_done_callback(lambda _: callback())

    def collect(self, timeout: float) -> PlanResult:
        """The result, waited for at most `timeout` seconds; see protocol.executor.Submission."""
        if self._retired:
            raise ExecutorClosedError(f"plan {self._seq}: collected after it was retired")
        return self._read(wait(self._future, timeout, f"plan {self._seq}"))

    def retire(self) -> None:
        """Give up the ticket and, as soon as the plan has run, free what it holds."""
        if not self._retired:
            self._retired = True
            _when_done(self._future, self._on_retire)


def _when_done(future: Future[Any], call: Callable[[], None]) -> None:
    future.add_done_callback(lambda _: call())


def wait(future: Future[T], timeout: float, what: str) -> T:
    """The future's value, or its exception; DeadlineError after `timeout` seconds."""
    try:
        return future.result(timeout)
    except TimeoutError as error:
        if future.done():  # the work itself raised a TimeoutError
            raise
        raise DeadlineError(f"{what}: no answer within {timeout:g} s") from error
