"""FutureSubmission: the ticket that every executor hands out, over a standard Future."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from protocol.errors import DeadlineError, ExecutorClosedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from protocol.result import PlanResult

T = TypeVar("T")


class FutureSubmission(Generic[T]):
    """One submitted plan. Owner: its executor. Mutated only by: retire.

    The executor sets the future's value T or exception; `read` turns T into the result, in the
    thread of whoever collects. `on_retire` runs once, when the ticket is retired and the future
    done, so nothing that the plan still writes to is freed under it.
    """

    def __init__(
        self,
        seq: int,
        future: Future[T],
        read: Callable[[T], PlanResult],
        on_retire: Callable[[], None],
    ) -> None:
        self._seq = seq
        self._future = future
        self._read = read
        self._on_retire = on_retire
        self._retired = False

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
            self._future.add_done_callback(lambda _: self._on_retire())


def wait(future: Future[T], timeout: float, what: str) -> T:
    """The future's value, or its exception; DeadlineError after `timeout` seconds."""
    try:
        return future.result(timeout)
    except TimeoutError as error:
        if future.done():  # the work itself raised a TimeoutError
            raise
        raise DeadlineError(f"{what}: no answer within {timeout:g} s") from error
