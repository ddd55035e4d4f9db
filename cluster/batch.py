"""One batch job, from its files to its exit code.

0     every line has an answer
1     it could not go on: no worker, no room, a file that fails; started again, it resumes
2     it was not begun: a wrong flag, input, model, or an output of something else
3     it is complete, and some lines are error lines
4     it was stopped since more lines failed than --max-errors allows
130   it was told to stop (SIGINT, SIGTERM); started again, it resumes
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.batch_input import HashedChunks, scan
from cluster.batch_lines import split_lines
from cluster.batch_output import (
    DIRECTORY,
    LOCK,
    BatchOutput,
    Manifest,
    finished_summary,
    remove_parts,
    write_summary,
)
from cluster.batch_progress import Progress, duration
from cluster.batch_run import BatchRun, End
from cluster.batch_storage import open_storage
from cluster.engine_session import EngineSession
from cluster.interrupts import StopSignals
from cluster.terminal import progress as tell
from protocol.errors import ConfigError, LoopmeshError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.batch_input import Scan
    from cluster.batch_storage import Storage
    from cluster.workers import ExecutorKind
    from protocol.config import Configuration

ANSWERED, FAILED, ERROR_LINES, TOO_MANY_ERRORS, INTERRUPTED = 0, 1, 3, 4, 130


@dataclass(frozen=True, slots=True)
class BatchTask:
    """What a job is to do.

    `max_errors` None bears any number of error lines; `is_submitted` says that Ray started it.
    """

    input: str
    output: str
    executor: ExecutorKind
    workers: int
    max_errors: int | None
    is_submitted: bool = False


def run_batch(task: BatchTask, configuration: Configuration) -> int:
    """Run a job; its exit code, as above. Raises ConfigError or ModelError for code 2."""
    stop = StopSignals()
    try:
        with stop.listening():
            return _run(task, configuration, stop)
    except (KeyboardInterrupt, SystemExit):  # Ray answers SIGTERM with SystemExit while it starts
        tell("interrupted; start it again to go on", sys.stderr)
        return INTERRUPTED
    except (ConfigError, ModelError):
        raise
    except (LoopmeshError, OSError) as error:
        tell(f"error: {' '.join(str(error).split())}", sys.stderr)
        return FAILED


def _run(task: BatchTask, configuration: Configuration, stop: StopSignals) -> int:
    if task.input == task.output:
        raise ConfigError(f"--output {task.output} is the input: give another file")
    source, storage = open_storage(task.input), open_storage(task.output)
    if task.is_submitted and "://" not in task.output and not Path(task.output).is_absolute():
        tell(
            f"warning: --output {task.output} is in this job's copy of the working directory, "
            "which Ray removes: give an absolute path or a URI",
            sys.stderr,
        )
    limit = configuration.batch.max_line_bytes
    with _locked(storage):
        tell(f"counting the lines of {task.input}", sys.stderr)
        try:
            counted = scan(source.chunks(), limit)
        except OSError as error:
            raise ConfigError(f"--input {task.input}: {error}") from error
        tell(f"loading {configuration.worker.model.model}", sys.stderr)
        with closing(EngineSession.open(configuration, task.executor, task.workers)) as session:
            stop.listen()
            manifest = manifest_of(counted, configuration, session)
            done = finished_summary(storage, manifest)
            if done is not None:
                tell(f"{task.output} is complete already; nothing to do", sys.stderr)
                remove_parts(storage)
                return _exit_code(End.ALL_LINES, int(done["failed"]))
            with stop.held(), closing(BatchOutput(storage, manifest)) as output:
                job = _Job(task, configuration, storage, manifest, session)
                return job.run(source, counted, output, stop)


@contextmanager
def _locked(storage: Storage) -> Iterator[None]:
    """Keep other jobs off the output; a job that began nothing leaves nothing."""
    with ExitStack() as held:
        try:
            held.enter_context(storage.lock(LOCK))
        except OSError as error:
            raise ConfigError(f"--output: {error}") from error
        try:
            yield
        finally:
            if storage.names(DIRECTORY) == [LOCK.rpartition("/")[2]]:
                remove_parts(storage)


def manifest_of(counted: Scan, configuration: Configuration, session: EngineSession) -> Manifest:
    """All that decides the bytes of an output."""
    profile = session.profile
    return Manifest(
        input_sha256=counted.sha256,
        input_lines=counted.num_lines,
        model_name=_model_name(configuration),
        model_fingerprint=profile.model.fingerprint,
        dtype=profile.dtype,
        layout=profile.layout.value,
        exit_policy=configuration.scheduler.exit_policy,
        max_line_bytes=configuration.batch.max_line_bytes,
        part_lines=configuration.batch.part_lines,
    )


def _model_name(configuration: Configuration) -> str:
    return configuration.api.served_model_name or configuration.worker.model.model


class _Job:
    """The part of a job that has a model and an output. Owner: run_batch. Used once."""

    def __init__(
        self,
        task: BatchTask,
        configuration: Configuration,
        storage: Storage,
        manifest: Manifest,
        session: EngineSession,
    ) -> None:
        self._task = task
        self._configuration = configuration
        self._storage = storage
        self._manifest = manifest
        self._session = session

    def run(self, source: Storage, counted: Scan, output: BatchOutput, stop: StopSignals) -> int:
        """Run all lines that are left, and put the output together if there are none left then."""
        settings = self._configuration.batch
        before, started = output.before, time.monotonic()
        if before.lines:
            tell(f"{before.lines} lines are there already", sys.stderr)
        run = BatchRun(
            self._session,
            counted,
            output,
            settings,
            _model_name(self._configuration),
            self._task.max_errors,
        )
        bar = Progress(sys.stderr, counted.num_lines, before, settings.progress_interval, started)
        chunks = HashedChunks(source.chunks())
        state = "failed"
        try:
            end = run.run(split_lines(chunks, settings.max_line_bytes), bar, stop)
            state = _STATES[end]
            if end is End.ALL_LINES and chunks.sha256 != counted.sha256:
                state = "failed"
                output.discard()  # nobody knows which lines are of which input
                raise LoopmeshError("the input has changed since it was counted: start again")
        finally:
            bar.close()
            output.flush()
            summary = self._summary(output, run, time.monotonic() - started)
            if state != _STATES[End.ALL_LINES]:
                write_summary(self._storage, self._manifest, state, summary)
        if end is End.ALL_LINES:
            output.finish(summary)
        print(summary_text(state, summary))
        return _exit_code(end, output.tally.failed)

    def _summary(self, output: BatchOutput, run: BatchRun, seconds: float) -> dict[str, Any]:
        tally = output.tally
        full = tally.loops_run + tally.loops_saved
        tokens = tally.completion_tokens - output.before.completion_tokens
        return {
            "input": self._task.input,
            "output": self._task.output,
            "input_lines": self._manifest.input_lines,
            **tally.as_dict(),
            "loops_per_token": _ratio(tally.loops_run, tally.completion_tokens),
            "loops_saved_share": _ratio(tally.loops_saved, full),
            "this_job": {
                "lines": tally.lines - output.before.lines,
                "lines_before": output.before.lines,
                "retries": run.retries,
                "workers": len(self._session.profiles),
                "requests_in_work": run.capacity,
                "seconds": round(seconds, 3),
                "completion_tokens": tokens,
                "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else 0.0,
            },
        }


_STATES = {End.ALL_LINES: "complete", End.STOPPED: "interrupted", End.ERRORS: "too many errors"}


def _exit_code(end: End, failed: int) -> int:
    if end is End.STOPPED:
        return INTERRUPTED
    if end is End.ERRORS:
        return TOO_MANY_ERRORS
    return ERROR_LINES if failed else ANSWERED


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def summary_text(state: str, summary: dict[str, Any]) -> str:
    """A summary for people, a few lines."""
    job = summary["this_job"]
    told = [
        f"{state}: {summary['lines']} of {summary['input_lines']} lines, {summary['failed']} of "
        f"them error lines ({job['lines']} in this job, {job['lines_before']} before, "
        f"{job['retries']} run again)",
        f"tokens: {summary['prompt_tokens']} in, {summary['completion_tokens']} out",
    ]
    if summary["loops_saved_share"] is not None:
        told.append(
            f"loops: {summary['loops_run']} run, {summary['loops_per_token']:.2f} a token, "
            f"{100 * summary['loops_saved_share']:.1f} % of full depth saved"
        )
    told.append(
        f"speed: {job['tokens_per_second']:.1f} tok/s on {job['workers']} workers, "
        f"{duration(job['seconds'])} in all"
    )
    told += [f"errors: {count} x {code}" for code, count in summary["errors"].items()]
    return "\n".join(told)
