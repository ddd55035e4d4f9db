"""Output tokens a second of a batch job against those of the engine that it drives.

The same requests run through one engine and one worker twice: fed as a batch job feeds them, with
its lines read, checked, told and written to a file, and added to the engine by hand at the same
concurrency. Runs take turns; the figure is the ratio of each pair, and the middle one counts.

python -m benchmarks.batch --json FILE
"""

from __future__ import annotations

import io
import json
import random
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import command_line, finish, positive
from benchmarks.report import Figure, progress, table
from cluster.batch_input import scan
from cluster.batch_lines import call_of, parse_line, split_lines
from cluster.batch_output import BatchOutput, Manifest
from cluster.batch_progress import Progress
from cluster.batch_run import BatchRun, End
from cluster.batch_storage import open_storage
from cluster.engine_session import EngineSession
from cluster.interrupts import StopSignals
from protocol.config import Configuration, parse_configuration

if TYPE_CHECKING:
    from collections.abc import Sequence

GOAL = 0.95
"""Of the engine's own speed, at least."""

DRAIN_TIMEOUT = 60.0

MODEL = "ouro-tiny"
WORDS = ("once", "upon", "a", "time", "there", "was", "small", "boy", "sun", "dog")


def write_input(path: Path, lines: int, outputs: int) -> None:
    """Seeded lines of a few dozen words and so many outputs each; each third one is a chat."""
    pick = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(lines):
            text = " ".join(pick.choices(WORDS, k=pick.randint(8, 40)))
            body: dict[str, object] = {"model": MODEL, "max_tokens": outputs, "ignore_eos": True}
            body |= {"exit_threshold": 0.9}
            kind = "chat/completions" if index % 3 == 0 else "completions"
            message = {"role": "user", "content": text}
            body |= {"messages": [message]} if index % 3 == 0 else {"prompt": text}
            line = {"custom_id": f"r{index}", "method": "POST", "url": f"/v1/{kind}", "body": body}
            file.write(json.dumps(line) + "\n")


def run_batch(session: EngineSession, source: Path, target: Path, settings: Configuration) -> float:
    """Seconds of a batch job over an open engine, from its first line to its whole output."""
    limit = settings.batch.max_line_bytes
    chunks = open_storage(str(source))
    started = time.perf_counter()
    counted = scan(chunks.chunks(), limit)
    manifest = Manifest(
        input_sha256=counted.sha256,
        input_lines=counted.num_lines,
        model_name=MODEL,
        model_fingerprint=session.profile.model.fingerprint,
        dtype=session.profile.dtype,
        layout=session.profile.layout.value,
        exit_policy=settings.scheduler.exit_policy,
        max_line_bytes=limit,
        part_lines=settings.batch.part_lines,
    )
    output = BatchOutput(open_storage(str(target)), manifest)
    run = BatchRun(session, counted, output, settings.batch, MODEL, max_errors=0)
    bar = Progress(io.StringIO(), counted.num_lines, output.before, 10.0, time.monotonic())
    if run.run(split_lines(chunks.chunks(), limit), bar, StopSignals()) is not End.ALL_LINES:
        raise RuntimeError("a line of the benchmark has failed")
    output.finish({})
    return time.perf_counter() - started


def run_engine(session: EngineSession, source: Path, limit: int, concurrency: int) -> float:
    """Seconds of the same requests added by hand, as one ends the next."""
    calls = deque(
        call_of(parse_line(raw, limit), MODEL, session.tokenizer)
        for raw in split_lines(open_storage(str(source)).chunks(), limit)
    )
    total, ended = len(calls), 0
    started = time.perf_counter()
    while ended < total:
        while calls and total - len(calls) - ended < concurrency:
            call = calls.popleft()
            session.engine.add(f"e{len(calls)}", call.prompt, call.params, call.seed)
        for output in session.driver.step():
            output.raise_error()
            ended += output.finish_reason is not None
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = command_line("batch", __doc__, device=True, quick=True)
    parser.add_argument("--rounds", type=positive, default=5, help="runs of each kind (default 5)")
    arguments = parser.parse_args(argv)
    # Cached prompts would make whichever runs second the faster.
    settings = parse_configuration(
        {"worker": {"device": arguments.device}, "scheduler": {"prefix_caching": False}}
    )
    lines, outputs = (9, 3) if arguments.quick else (256, 32)
    tokens = lines * outputs
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "in.jsonl"
        write_input(source, lines, outputs)
        session = EngineSession.open(settings, "local", 1)
        try:
            limit = settings.batch.max_line_bytes
            concurrency = settings.batch.requests_per_slot * session.profile.num_slots
            run_engine(session, source, limit, concurrency)  # the first pays for what is compiled
            session.driver.drain(DRAIN_TIMEOUT)
            for number in range(arguments.rounds):
                progress(f"batch: round {number + 1} of {arguments.rounds}")
                target = Path(directory) / f"out{number}.jsonl"
                measured: dict[str, float] = {}
                # In turns, so that neither kind always runs first.
                for kind in ("batch", "engine") if number % 2 else ("engine", "batch"):
                    if kind == "batch":
                        measured[kind] = run_batch(session, source, target, settings)
                    else:
                        measured[kind] = run_engine(session, source, limit, concurrency)
                    session.driver.drain(DRAIN_TIMEOUT)
                pairs.append((measured["batch"], measured["engine"]))
        finally:
            session.close()
    ratios = [engine / batch for batch, engine in pairs]
    figures = [
        Figure("batch job", statistics.median(tokens / batch for batch, _ in pairs), "tok/s"),
        Figure("engine by itself", statistics.median(tokens / own for _, own in pairs), "tok/s"),
        Figure(
            "batch job of the engine's speed",
            100 * statistics.median(ratios),
            "%",
            100 * GOAL,
            at_least=True,
        ),
        Figure("least of the rounds", 100 * min(ratios), "%"),
        Figure("most of the rounds", 100 * max(ratios), "%"),
    ]
    finish("batch", figures, table(figures), arguments)


if __name__ == "__main__":
    main()
