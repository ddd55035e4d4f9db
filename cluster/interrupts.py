"""Ctrl-C between two steps of an engine, never inside one, and the wish to stop a job cleanly."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while the block runs, and raise KeyboardInterrupt at its end.

    A KeyboardInterrupt in the middle of a step would leave a plan that the engine waits for and
    nobody collects. A second Ctrl-C gets through at once, for a step that hangs. Does nothing
    outside the main thread, and where the program handles the signal in a way of its own.
    """
    usual = signal.default_int_handler
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    held = False

    def hold(_signal: int, _frame: FrameType | None) -> None:
        nonlocal held
        held = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if held:
            raise KeyboardInterrupt


class StopSignals:
    """SIGINT and SIGTERM as the wish to stop. Owner: the main thread of one job.

    Mutated only by: the signals, and `listening`. Outside of `held` a signal raises
    KeyboardInterrupt; inside, the first one only sets `requested`, for whoever asks between two
    steps, and a second one gets through. A SIGINT that the process was started with ignored stays
    so.
    """

    def __init__(self) -> None:
        self.requested = False
        self._is_held = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over while the block runs; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Take the signals over once more: ray.init puts a handler of its own in place."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait for whoever asks for `requested` while the block runs."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_held and not self.requested:
            self.requested = True
        else:
            raise KeyboardInterrupt
