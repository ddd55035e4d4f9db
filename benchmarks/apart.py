"""A baseline in a process of its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
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
        """`make` is pickled; the other process has as many threads as this one."""
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(make, torch.get_num_threads()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        """The outputs of all requests, in batches of `size`."""
        return self._pool.submit(_run, asks, size).result(TIMEOUT)


_batches: list[Batches] = []


def _begin(make: Callable[[], Batches], threads: int) -> None:
    torch.set_num_threads(threads)
    _batches.append(make())


def _run(asks: Sequence[Ask], size: int) -> list[list[int]]:
    return _batches[0].run(asks, size)
