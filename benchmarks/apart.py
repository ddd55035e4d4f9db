"""A baseline in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from benchmarks.workload import Ask

TIMEOUT = 1800.0


class Batches(Protocol):
    """What runs requests in batches."""

    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        """The outputs of all requests, in batches of `size`."""
        ...


class Apart:
    """Batches that another process makes and runs. Owner: one benchmark. Mutated only by: __exit__.

    On a CPU the engine computes on a thread of its own. As soon as a second one of its process
    computes as well, OpenMP counts more threads than cores and lets all of them sleep between two
    products, which nearly halves the speed of both.
    """

    def __init__(self, make: Callable[[], Batches]) -> None:
        """`make` is pickled; the other process has as many threads as this one.

        Raises BrokenProcessPool when the baseline cannot be made.
        """
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(make, torch.get_num_threads()),
        )
        try:
            self._pid = self._pool.submit(os.getpid).result(TIMEOUT)
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:  # perhaps that of waiting too long
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)

    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        """The outputs of all requests, in batches of `size`. Raises TimeoutError."""
        return self._pool.submit(_run, asks, size).result(TIMEOUT)


_batches: list[Batches] = []


def _begin(make: Callable[[], Batches], threads: int) -> None:
    torch.set_num_threads(threads)
    _batches.append(make())


def _run(asks: Sequence[Ask], size: int) -> list[list[int]]:
    return _batches[0].run(asks, size)
