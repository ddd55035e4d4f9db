"""FutureSubmission: what a ticket shows, what catches it, and whose TimeoutError it was."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import pytest

from protocol.errors import DeadlineError, ExecutorClosedError
from protocol.result import PlanResult
from protocol.submission import FutureSubmission, TicketNet, wait


def test_a_ticket_says_where_it_stands_and_frees_once() -> None:
    future: Future[PlanResult] = Future()
    freed: list[int] = []
    net = TicketNet()
    ticket = FutureSubmission(3, future, lambda result: result, lambda: freed.append(3), net)
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
    later = FutureSubmission(3, future, lambda result: result, lambda: None, net)
    assert repr(later) == "<Submission 3 ready>"
    assert later.collect(0.0).seq == 3


def test_a_dropped_ticket_frees_what_it_holds_once_its_plan_has_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: Future[PlanResult] = Future()
    freed: list[int] = []
    net = TicketNet()
    for seq in (3, 4):
        FutureSubmission(seq, future, lambda result: result, partial(freed.append, seq), net)
    assert caplog.text == ""
    net.reclaim()
    assert [record.args for record in caplog.records] == [(3,), (4,)]
    assert freed == []
    future.set_result(PlanResult(1, 3))
    assert freed == [3, 4]
    net.reclaim()
    assert len(caplog.records) == 2


def test_what_vanishes_while_the_net_frees_is_caught_as_well() -> None:
    future: Future[PlanResult] = Future()
    future.set_result(PlanResult(1, 3))
    freed: list[str] = []
    net = TicketNet()

    def free_and_drop() -> None:
        freed.append("first")
        FutureSubmission(4, future, lambda result: result, lambda: freed.append("second"), net)

    FutureSubmission(3, future, lambda result: result, free_and_drop, net)
    net.reclaim()
    assert freed == ["first", "second"]


def test_a_timeout_of_the_work_itself_is_no_deadline() -> None:
    future: Future[None] = Future()
    future.set_exception(TimeoutError("the device"))
    with pytest.raises(TimeoutError, match="the device") as caught:
        wait(future, 0.0, "work")
    assert not isinstance(caught.value, DeadlineError)
