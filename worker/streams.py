"""The device's streams: who runs where, and what has to be over before.

Prompts, loops and ticks run on the core stream, what lies between two tokens (PRELUDE, CODA) on the
boundary stream, and values leave on the copy stream. They meet in slots alone, so a step waits,
on the device, for the last step on any of its slots; nothing else orders the streams. All three may
be one stream, where order is for nothing.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Lane(IntEnum):
    """Where a step runs."""

    CORE = 0
    BOUNDARY = 1


class Mark(Protocol):
    """A point that the device comes to."""

    def wait(self) -> None:
        """Return once the device has come to it; raise what it failed with."""

    def passed(self) -> bool:
        """Whether it has."""


class Span(Protocol):
    """One step on the device."""

    def wait(self) -> None:
        """Return once the step is over; raise what the device failed with."""

    def microseconds(self) -> int:
        """How long the device had it in work. Ask when it is over."""


class Streams(Protocol):
    """Owner: ModelRunner. Mutated only by: the device thread."""

    @property
    def asynchronous(self) -> bool:
        """Whether steps are enqueued; else they are over when their code has run."""

    def step(self, lane: Lane, slots: Sequence[int]) -> AbstractContextManager[Span]:
        """Run what is enqueued within on a lane, after all earlier steps on these slots.

        Within it, `slots` may grow by those that nothing is to be waited for.
        """

    def piece(self) -> AbstractContextManager[Span]:
        """Within a step: a part of it that is measured of its own."""

    def copies(self, lane: Lane) -> AbstractContextManager[None]:
        """Within a step: what is enqueued within copies what the step has come to so far.

        Whatever is copied has to be kept until the copy is over.
        """

    def mark(self) -> Mark:
        """A point after all that is enqueued."""


class Parts:
    """A step that ran in pieces. Owner: one plan's outcome; mutated only while it is enqueued."""

    def __init__(self) -> None:
        self.pieces: list[Span] = []

    def wait(self) -> None:
        """See Span."""
        for piece in self.pieces:
            piece.wait()

    def microseconds(self) -> int:
        """See Span."""
        return sum(piece.microseconds() for piece in self.pieces)


class Without:
    """A step with pieces of another one in it, which are not its own."""

    def __init__(self, whole: Span, others: Parts) -> None:
        self._whole = whole
        self._others = others

    def wait(self) -> None:
        """See Span."""
        self._whole.wait()

    def microseconds(self) -> int:
        """See Span."""
        return max(self._whole.microseconds() - self._others.microseconds(), 0)


class _Passed:
    def wait(self) -> None:
        pass

    def passed(self) -> bool:
        return True


PASSED: Mark = _Passed()
"""Where the device has been already."""


class _HostSpan(_Passed):
    def __init__(self) -> None:
        self.seconds = 0.0

    def microseconds(self) -> int:
        return round(self.seconds * 1e6)


class HostStreams:
    """The streams of a CPU: there are none, and every step is over when its code has run."""

    asynchronous = False

    @contextmanager
    def step(self, lane: Lane, slots: Sequence[int]) -> Iterator[Span]:
        """See Streams."""
        del lane, slots
        with self.piece() as span:
            yield span

    @contextmanager
    def piece(self) -> Iterator[Span]:
        """See Streams."""
        span, start = _HostSpan(), time.perf_counter()
        try:
            yield span
        finally:
            span.seconds = time.perf_counter() - start

    def copies(self, lane: Lane) -> AbstractContextManager[None]:
        """See Streams."""
        del lane
        return nullcontext()

    def mark(self) -> Mark:
        """See Streams."""
        return PASSED


class _CudaMark:
    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def passed(self) -> bool:
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]


class _CudaSpan:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._first, self.last = (_event(timing=True) for _ in range(2))
        self._first.record(stream)

    def wait(self) -> None:
        self.last.synchronize()

    def microseconds(self) -> int:
        return round(float(self._first.elapsed_time(self.last)) * 1e3)


_Step: TypeAlias = "tuple[int, torch.cuda.Event | None]"
_NO_STEP: _Step = (0, None)


class CudaStreams:
    """The streams of a GPU: three of them, or one for all.

    Example: a loop of slots 1 and 2 on the core stream, then a CODA of slot 2 on the boundary
    stream: the latter waits for the loop's event. A loop of slot 1 that follows waits for nothing.
    """

    asynchronous = True

    def __init__(self, device: torch.device, count: int, slots: int) -> None:
        """`count` is 1 or 3, `slots` how many there are. The stream in use is the core stream."""
        core = torch.cuda.current_stream(device)
        one = count == 1
        boundary, self._copy = (core, core) if one else (_stream(device), _stream(device))
        self._lanes = {Lane.CORE: core, Lane.BOUNDARY: boundary}
        self._other = {} if one else {Lane.CORE: Lane.BOUNDARY, Lane.BOUNDARY: Lane.CORE}
        self._steps = dict.fromkeys(Lane, 0)
        # The last step of a lane on each slot, and that which the other lane has waited for.
        self._last: dict[Lane, list[_Step]] = {lane: [_NO_STEP] * slots for lane in Lane}
        self._seen = dict.fromkeys(Lane, 0)

    @contextmanager
    def step(self, lane: Lane, slots: Sequence[int]) -> Iterator[Span]:
        """See Streams."""
        stream = self._lanes[lane]
        other = self._other.get(lane)
        if other is not None:
            self._wait_for_slots(lane, other, slots)
        with torch.cuda.stream(stream), self._measured(stream) as span:
            yield span
        if other is not None:
            self._steps[lane] += 1
            for slot in slots:
                self._last[lane][slot] = (self._steps[lane], span.last)

    @contextmanager
    def piece(self) -> Iterator[Span]:
        """See Streams."""
        with self._measured(torch.cuda.current_stream()) as span:
            yield span

    @contextmanager
    def copies(self, lane: Lane) -> Iterator[None]:
        """See Streams."""
        stream = self._lanes[lane]
        if self._copy is stream:
            yield
            return
        self._copy.wait_event(stream.record_event(_event()))
        with torch.cuda.stream(self._copy):
            yield

    def mark(self) -> Mark:
        """See Streams."""
        return _CudaMark([stream.record_event(_event()) for stream in self._apart()])

    @contextmanager
    def _measured(self, stream: torch.cuda.Stream) -> Iterator[_CudaSpan]:
        span = _CudaSpan(stream)
        try:
            yield span
        finally:
            span.last.record(stream)

    def _apart(self) -> tuple[torch.cuda.Stream, ...]:
        return tuple(dict.fromkeys((*self._lanes.values(), self._copy)))

    def _wait_for_slots(self, lane: Lane, other: Lane, slots: Sequence[int]) -> None:
        """Let a lane wait for the last step of the other one on any of these slots."""
        steps = (self._last[other][slot] for slot in slots)
        number, end = max(steps, key=lambda step: step[0], default=_NO_STEP)
        if end is not None and number > self._seen[other]:
            self._lanes[lane].wait_event(end)
            self._seen[other] = number


def open_streams(device: torch.device, count: int, slots: int) -> Streams:
    """The streams of a device; a CPU has none, whatever their number."""
    return CudaStreams(device, count, slots) if device.type == "cuda" else HostStreams()


def here(device: torch.device) -> Mark:
    """A point after all that is enqueued on the stream in use."""
    return _CudaMark([torch.cuda.current_stream(device).record_event(_event())])


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event(*, timing: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
