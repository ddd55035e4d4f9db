"""FutureSubmission: what a ticket shows, and whose TimeoutError it was."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from protocol.errors import DeadlineError, ExecutorClosedError
from protocol.result import PlanResult
from protocol.submission import FutureSubmission, wait


def test_a_ticket_says_where_it_stands_and_frees_once() -> None:
    future: Future[PlanResult] = Future()
    freed: list[int] = []
    ticket = FutureSubmission(3, future, lambda result: result, lambda: freed.append(3))
    assert repr(ticket) == "<Submission 3 pending>"
    with pytest.raises(DeadlineError, match="plan 3: no answer within 0 s"):
        ticket.collect(0.0)
    ticket.retire()
    assert freed == []
    future.set_result(PlanResult(1, 3))
    ticket.retire()
    assert freed == [3]
    assert repr(ticket) == "<Submission 3 retired>"
    with pytest.raises(ExecutorClosedError):
        ticket.collect(0.0)
    later = FutureSubmission(3, future, lambda result: result, lambda: None)
    assert repr(later) == "<Submission 3 ready>"
    assert later.collect(0.0).seq == 3


def test_a_timeout_of_the_work_itself_is_no_deadline() -> None:
    future: Future[None] = Future()
    future.set_exception(TimeoutError("the device"))
    with pytest.raises(TimeoutError, match="the device") as caught:
        wait(future, 0.0, "work")
    assert not isinstance(caught.value, DeadlineError)
