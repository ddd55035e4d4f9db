from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from cluster.interrupts import StopSignals, interrupts_held
from tests.cluster.signals import usual_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _usual_interrupts() -> Iterator[None]:
    with usual_interrupts():
        yield


def interrupted(times: int, done: list[str], error: Exception | None = None) -> None:
    with interrupts_held():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
        if error is not None:
            raise error


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(1, done)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_gets_through_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, done)
    assert not done


def test_an_interrupt_is_not_lost_behind_an_error() -> None:
    error = ValueError("first")
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(1, [], error)
    assert caught.value.__context__ is error


def test_a_block_without_an_interrupt_changes_nothing() -> None:
    with interrupts_held():
        pass
    with pytest.raises(ValueError, match="own"), interrupts_held():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_left_alone() -> None:
    seen = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [signal.SIGINT]


def test_another_thread_may_use_it() -> None:
    done = []

    def work() -> None:
        with interrupts_held():
            done.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10.0)
    assert done == ["worked"]


def test_the_wish_to_stop_waits_for_whoever_asks() -> None:
    stop = StopSignals()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop.listening(), stop.held():
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_nothing_is_held_a_stop_is_an_interrupt(number: signal.Signals) -> None:
    stop = StopSignals()
    with stop.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert not stop.requested


def test_another_handler_is_taken_over_again_and_an_ignored_interrupt_stays_ignored() -> None:
    stop = StopSignals()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop.listening(), stop.held():
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            stop.listen()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        stop = StopSignals()
        with stop.listening():
            stop.listen()
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
