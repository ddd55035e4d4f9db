"""Ctrl-C in tests."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def usual_interrupts() -> Iterator[None]:
    """Python's own handling of Ctrl-C, for this process and for children started inside.

    A shell starts its background jobs with Ctrl-C ignored, and the tests may be one.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
