"""A closed loop over an engine: as one request ends, the next begins."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.drivers import SyncDriver
from protocol.result import ResidentResult
from scheduler.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.workload import Ask
    from protocol.config import SchedulerSettings
    from protocol.executor import Executor, Submission
    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult

TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `loops` are those of all outputs, the full pass of a first one included.

    `steady` is outputs a second from when all of the first ones have given an output, and one of
    them has ended, to the last arrival: so long as many give outputs as there may be, while others
    come one by one; 0 if nothing is in between. `tick_us` is what the device had to do for
    `ticks`, `device_us` for all steps.
    """

    seconds: float
    steady: float
    outputs: int
    loops: int
    prompt_tokens: int
    first_ms: float
    ticks: int
    tick_us: int
    device_us: int

    @property
    def rate(self) -> float:
        """Outputs a second."""
        return self.outputs / self.seconds

    @property
    def depth(self) -> float:
        """Loops an output."""
        return self.loops / self.outputs

    @property
    def tick_ms(self) -> float:
        """What a tick takes; 0 where there was none."""
        return self.tick_us / max(self.ticks, 1) / 1e3


class ClosedLoop:
    """An engine over executors that begin an epoch. Owner: a benchmark. Mutated only by: run."""

    def __init__(self, executors: Mapping[str, Executor], settings: SchedulerSettings) -> None:
        self._watched = {lane: WatchedExecutor(executor) for lane, executor in executors.items()}
        self._engine = Engine(settings)
        self._driver = SyncDriver(self._engine, self._watched, TIMEOUT)

    def run(self, asks: Sequence[Ask], concurrency: int, threshold: float) -> Outcome:
        """Run all requests, `concurrency` at a time."""
        engine = self._engine
        before = self._device_work()
        started = time.perf_counter()
        added: list[float] = []
        firsts: list[float] = []
        outputs = loops = begun = 0
        all_in = first_end = last_arrival = (0.0, 0)

        def add() -> None:
            ask = asks[len(added)]
            engine.add(str(len(added)), ask.prompt, ask.params(threshold), 0)
            added.append(time.perf_counter())

        for _ in range(min(concurrency, len(asks))):
            add()
        while engine.has_work():
            for output in self._driver.step():
                output.raise_error()
                if output.start_index == 0 and output.tokens:
                    number = int(output.key.request_id)
                    firsts.append(time.perf_counter() - added[number])
                    begun += number < concurrency
                outputs += len(output.tokens)
                loops += sum(output.exit_depths)
                if begun == concurrency and not all_in[1]:
                    all_in = (time.perf_counter(), outputs)
                if output.finish_reason is not None and not first_end[1]:
                    first_end = (time.perf_counter(), outputs)
                if output.finish_reason is not None and len(added) < len(asks):
                    add()
                    last_arrival = (added[-1], outputs)
        seconds = time.perf_counter() - started
        ticks, tick_us, device_us = (
            now - then for now, then in zip(self._device_work(), before, strict=True)
        )
        return Outcome(
            seconds=seconds,
            steady=rate_between(max(all_in, first_end), last_arrival),
            outputs=outputs,
            loops=loops,
            prompt_tokens=sum(len(ask.prompt) for ask in asks),
            first_ms=sum(firsts) / len(firsts) * 1e3,
            ticks=ticks,
            tick_us=tick_us,
            device_us=device_us,
        )

    def _device_work(self) -> tuple[int, int, int]:
        watched = self._watched.values()
        return (
            sum(one.ticks for one in watched),
            sum(one.tick_us for one in watched),
            sum(one.device_us for one in watched),
        )


def rate_between(first: tuple[float, int], last: tuple[float, int]) -> float:
    """Of two moments, each with what there was until then."""
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > 0 else 0.0


class WatchedExecutor:
    """An executor whose results are looked at. Owner: one run. Mutated only by: its results."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.ticks = self.tick_us = self.device_us = 0

    @property
    def epoch(self) -> int:
        """The epoch that every plan carries."""
        return self._executor.epoch

    def profile(self) -> WorkerProfile:
        """Device, model and room of the worker."""
        return self._executor.profile()

    def lost(self) -> str | None:
        """Why the worker is gone, or None."""
        return self._executor.lost()

    def submit(self, plan: ExecutionPlan) -> Submission:
        """Enqueue a plan; its result is looked at when it is collected."""
        return _WatchedSubmission(self._executor.submit(plan), self._note)

    def synchronize(self, timeout: float) -> None:
        """Return once every submitted plan has run."""
        self._executor.synchronize(timeout)

    def shutdown(self, timeout: float) -> None:
        """Shut the executor down."""
        self._executor.shutdown(timeout)

    def _note(self, result: PlanResult) -> None:
        self.device_us += sum(result.device_us)
        for step, device_us in zip(result.steps, result.device_us, strict=True):
            if isinstance(step, ResidentResult):
                self.ticks += step.ticks
                self.tick_us += device_us


class _WatchedSubmission:
    """A submission that shows its result to `note`. Owner: WatchedExecutor. Never mutated."""

    def __init__(self, submission: Submission, note: Callable[[PlanResult], None]) -> None:
        self._submission = submission
        self._note = note

    @property
    def seq(self) -> int:
        return self._submission.seq

    def ready(self) -> bool:
        return self._submission.ready()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._submission.add_done_callback(callback)

    def collect(self, timeout: float) -> PlanResult:
        result = self._submission.collect(timeout)
        self._note(result)
        return result

    def retire(self) -> None:
        self._submission.retire()
