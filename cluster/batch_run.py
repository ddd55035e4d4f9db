"""BatchRun: lines into the engine, as many as keep it full, and answers out of it.

One thread: it checks lines while there is room, waits for the next result, and writes what has
ended. So what is in memory is bounded by what is in work.
"""

from __future__ import annotations

import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from cluster.batch_lines import (
    LineError,
    call_of,
    custom_id_of,
    error_line,
    parse_line,
    rejected,
)
from cluster.batch_work import LineWork
from protocol.errors import LoopmeshError, RequestError, WorkerLostError
from protocol.exit_rule import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.api_calls import Call
    from cluster.batch_input import Scan
    from cluster.batch_lines import BatchLine, RawLine
    from cluster.batch_output import BatchOutput
    from cluster.batch_progress import Progress
    from cluster.engine_session import EngineSession
    from cluster.interrupts import StopSignals
    from protocol.config import BatchSettings
    from scheduler.output import RequestOutput

OPEN_PARTS = 4
"""Parts that may lack lines while a later one is begun, beside what is in work at once."""


class End(Enum):
    """Why a run came to its end."""

    ALL_LINES = "all lines"
    STOPPED = "told to stop"
    ERRORS = "too many errors"


WRITTEN_TOGETHER = 8
"""Answers that wait for each other. Alone between two plans, each would take three times as long:
nothing of what makes it is in a cache then."""
WRITTEN_WITHIN = 1.0
"""Seconds that an answer waits for others at most."""


class BatchRun:
    """Owner: one job. Mutated only by: run.

    `capacity` bounds the choices in work at once, `retries` counts the lines that were run again.
    """

    def __init__(
        self,
        session: EngineSession,
        scan: Scan,
        output: BatchOutput,
        settings: BatchSettings,
        model_name: str,
        max_errors: int | None,
    ) -> None:
        self._session = session
        self._engine = session.engine
        self._scan = scan
        self._output = output
        self._settings = settings
        self._model_name = model_name
        self._max_errors = max_errors
        self._max_loops = session.profile.model.max_loops
        slots = sum(profile.num_slots for profile in session.profiles)
        self.capacity = settings.requests_per_slot * slots
        # Several lines one after the other cost a third of as many between two plans. Half of what
        # waits for a slot stays.
        self._refill = max(min(slots // 4, (self.capacity - slots) // 2), 1)
        self._parts_ahead = OPEN_PARTS + self.capacity // settings.part_lines
        self._work: dict[str, LineWork] = {}
        self._choices = 0
        self._ended: deque[LineWork] = deque()
        self._held: RawLine | None = None
        self.retries = 0

    def run(self, lines: Iterator[RawLine], progress: Progress, stop: StopSignals) -> End:
        """Run every line that has no output yet; returns early when told to stop.

        What is in work then is aborted. Raises WorkerLostError when no worker is left; everything
        that ended before is written.
        """
        flushed = written = time.monotonic()
        try:
            while True:
                end = self._feed(lines, stop)
                if end is None and not self._work and self._ended:
                    self._write_ended()  # a line may wait for the part that these are of
                    continue
                if end is not None or not self._work:
                    return end or End.ALL_LINES
                for output in self._session.driver.step():
                    self._take(output)
                now = time.monotonic()
                if len(self._ended) >= WRITTEN_TOGETHER or now - written >= WRITTEN_WITHIN:
                    written = now
                    self._write_ended()
                progress.update(self._output.tally, now)
                if now - flushed >= self._settings.flush_interval:
                    flushed = now
                    self._output.flush()
        finally:
            for request_id in self._work:
                self._engine.abort(request_id)
            self._work.clear()
            self._choices = 0
            self._write_ended()

    def _feed(self, lines: Iterator[RawLine], stop: StopSignals) -> End | None:
        """Start lines when there is room for several; why the run ends early, if it does."""
        room = self._refill
        while True:
            if stop.requested:
                return End.STOPPED
            if self._max_errors is not None and self._output.tally.failed > self._max_errors:
                return End.ERRORS
            if self._choices + room > self.capacity:
                return None
            room = 1
            raw = self._next(lines)
            if raw is None:
                return None
            self._start(raw)

    def _next(self, lines: Iterator[RawLine]) -> RawLine | None:
        """The next line without an output, unless it is too far ahead of the oldest one in work."""
        if self._held is None:
            self._held = next((raw for raw in lines if not self._is_written(raw)), None)
        raw = self._held
        if raw is None:
            return None
        if self._output.part_of(raw.index) >= self._output.first_open + self._parts_ahead:
            return None
        self._held = None
        return raw

    def _is_written(self, raw: RawLine) -> bool:
        if raw.index >= self._scan.num_lines:
            raise LoopmeshError("the input has grown since it was counted: start again")
        return self._output.is_written(raw.index)

    def _start(self, raw: RawLine) -> None:
        """Give a line to the engine, or write what is wrong with it."""
        try:
            if self._scan.is_repeated(raw.index):
                message = f"line {raw.number}: an earlier line has this custom_id"
                raise LineError("duplicate_custom_id", message, custom_id_of(raw))
            line = parse_line(raw, self._settings.max_line_bytes)
            self._submit(raw, line, call_of(line, self._model_name, self._session.tokenizer), 0)
        except LineError as error:
            self._output.write(raw.index, error_line(raw, error))

    def _submit(self, raw: RawLine, line: BatchLine, call: Call, attempt: int) -> None:
        request_id = f"{raw.index}.{attempt}"
        try:
            self._engine.add(request_id, call.prompt, call.params, call.seed)
        except RequestError as error:
            raise rejected(line.custom_id, error) from error
        assembler = call.assembler(self._max_loops)
        self._work[request_id] = LineWork(raw, line, call, assembler, attempt, call.params.n)
        self._choices += call.params.n

    def _leave(self, request_id: str) -> None:
        """A line is in work no more."""
        self._choices -= self._work.pop(request_id).call.params.n

    def _take(self, output: RequestOutput) -> None:
        """Add an output to its answer; a line whose choices have all ended waits to be written."""
        request_id = output.key.request_id
        work = self._work.get(request_id)
        if work is None:  # the end of another choice of a line that is run again
            return
        if output.finish_reason is FinishReason.ERROR:
            self._run_again(request_id, work, output)
            return
        if work.call.body.stop:
            self._push(request_id, work, output)
        else:
            work.waiting.append(output)
            work.running -= output.finish_reason is not None
        if not work.running:
            self._leave(request_id)
            self._ended.append(work)

    def _push(self, request_id: str, work: LineWork, output: RequestOutput) -> None:
        """Look for the end of an answer in its text, and tell the engine."""
        if work.assembler.push(output) is None:
            return
        if (index := work.assembler.stop_index(output.choice)) is not None:
            self._engine.finish(request_id, index, output.choice)
        if work.assembler.finished:
            work.running = 0

    def _write_ended(self) -> None:
        """Write the answers of the lines that have ended."""
        while self._ended:
            work = self._ended.popleft()
            self._output.write(work.raw.index, work.answer())

    def _run_again(self, request_id: str, work: LineWork, output: RequestOutput) -> None:
        """Start a failed line anew, on a worker that is left; after some times it is an error."""
        self._leave(request_id)
        self._engine.abort(request_id)
        if not self._engine.lanes:
            raise WorkerLostError(
                f"no worker is left ({output.error}): start the job again, it goes on where it was"
            )
        try:
            if work.attempt == self._settings.max_retries:
                raise _error_of(work, output)
            self._submit(work.raw, work.line, work.call, work.attempt + 1)
            self.retries += 1
        except LineError as error:
            self._output.write(work.raw.index, error_line(work.raw, error))


def _error_of(work: LineWork, output: RequestOutput) -> LineError:
    try:
        output.raise_error()
    except LoopmeshError as error:
        return rejected(work.line.custom_id, error)
    raise AssertionError("an output that ends with an error has one")
