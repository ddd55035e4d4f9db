"""How long a worker on a CPU is in its model, and how long it moves pages of KV for it."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from worker.kv_storage import KVStorage
from worker.models.ouro import OuroModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = ("loop", "hazards", "logits")
"""Methods of OuroModel: layers with the final norm, gate, head. What embeds is a look-up."""

MOVES = ("gather", "write")
"""Methods of KVStorage that attention calls, in a loop of the model."""


class ModelClock:
    """Seconds in the model's methods, and of those the seconds in which KV was gathered or stored.

    Owner: one run. Mutated only by: the device thread of the worker that runs meanwhile, while
    `running`.
    """

    def __init__(self) -> None:
        self.total = self.pages = 0.0

    @property
    def model(self) -> float:
        """Seconds in the model, without what pages took."""
        return self.total - self.pages

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what any OuroModel of this process does in the block."""
        with ExitStack() as stack:
            for name in MODEL:
                counted = _counting(getattr(OuroModel, name), self._count_model)
                stack.enter_context(patch.object(OuroModel, name, counted))
            for name in MOVES:
                counted = _counting(getattr(KVStorage, name), self._count_pages)
                stack.enter_context(patch.object(KVStorage, name, counted))
            yield

    def _count_model(self, seconds: float) -> None:
        self.total += seconds

    def _count_pages(self, seconds: float) -> None:
        self.pages += seconds


def _counting(method: Callable[..., Any], count: Callable[[float], None]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (any method)
        started = time.perf_counter()
        value = method(*args, **kwargs)
        count(time.perf_counter() - started)
        return value

    return counted
