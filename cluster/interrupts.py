"""Ctrl-C between two steps of an engine, never inside one."""

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
