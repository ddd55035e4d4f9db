"""Feeding an engine: how much is in work, what is run again, and when a run ends early."""

from __future__ import annotations

import io
import json
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cluster import batch_run
from cluster.batch_input import scan
from cluster.batch_lines import split_lines
from cluster.batch_output import BatchOutput, Manifest
from cluster.batch_parts import Tally
from cluster.batch_progress import Progress
from cluster.batch_run import OPEN_PARTS, WRITTEN_TOGETHER, WRITTEN_WITHIN, BatchRun, End
from cluster.batch_storage import open_storage
from cluster.engine_session import EngineSession
from cluster.interrupts import StopSignals
from protocol.config import parse_configuration
from protocol.errors import LoopmeshError, WorkerLostError
from protocol.scripted_executor import ScriptedExecutor, scripted_hazard, scripted_token
from tests.scheduler.bench import make_model, make_profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from protocol.executor import Submission
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan

MODEL = make_model()
LIMIT = 1000
PART = 4


def hazard(key: RequestKey, position: int, depth: int) -> float:
    """The gate of a line, whichever time it is run."""
    return scripted_hazard(key_of_line(key), position, depth)


def token(key: RequestKey, output_index: int) -> int:
    return scripted_token(MODEL)(key_of_line(key), output_index)


def key_of_line(key: RequestKey) -> RequestKey:
    return type(key)(key.request_id.partition(".")[0], key.generation)


class Dying(ScriptedExecutor):
    """A worker that dies with a plan. Owner: one test. Mutated only by: its methods."""

    def __init__(self, plans: int | None) -> None:
        super().__init__(make_profile(model=MODEL), hazard=hazard, token=token)
        self._plans = plans

    def submit(self, plan: ExecutionPlan) -> Submission:
        if self._plans is not None and self.last_seq >= self._plans:
            self.lose("killed")
        return super().submit(plan)


class ScriptedWorkers:
    """Workers that die after so many plans, None never. Owner: one test. Never changes."""

    def __init__(self, *plans: int | None) -> None:
        self.executors: Mapping[str, ScriptedExecutor] = {
            f"lane-{index}": Dying(count) for index, count in enumerate(plans)
        }
        self.pids: Mapping[str, int] = {}

    def close(self) -> None:
        for executor in self.executors.values():
            executor.shutdown(1.0)


def line(name: str, **body: Any) -> bytes:  # noqa: ANN401
    fields = {"model": "ouro-tiny", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
    value = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": fields | body}
    return json.dumps(value).encode() + b"\n"


class Bench:
    """One batch over scripted workers. Owner: one test."""

    def __init__(
        self,
        path: Path,
        data: bytes,
        *plans: int | None,
        max_errors: int | None = None,
        **batch: int,
    ) -> None:
        self.configuration = parse_configuration({"batch": {"part_lines": PART, **batch}})
        self.session = EngineSession(self.configuration, ScriptedWorkers(*plans))
        self.data = data
        self.scan = scan([data], LIMIT)
        manifest = Manifest(
            input_sha256=self.scan.sha256,
            input_lines=self.scan.num_lines,
            model_name="m",
            model_fingerprint="f",
            dtype="float32",
            layout="last_exited",
            exit_policy="ouro",
            max_line_bytes=LIMIT,
            part_lines=PART,
        )
        self.output = BatchOutput(open_storage(str(path)), manifest)
        self.batch = BatchRun(
            self.session,
            self.scan,
            self.output,
            self.configuration.batch,
            "ouro-tiny",
            max_errors,
        )
        self.stop = StopSignals()
        self.taken = 0

    def run(self) -> End:
        progress = Progress(io.StringIO(), self.scan.num_lines, Tally(), 10.0, 0.0)
        try:
            return self.batch.run(self._lines(), progress, self.stop)
        finally:
            self.output.close()
            self.session.close()

    def _lines(self) -> Iterator[Any]:
        for raw in split_lines([self.data], LIMIT):
            self.taken += 1
            yield raw

    def answers(self, path: Path) -> list[dict[str, Any]]:
        self.output.finish({})
        return [json.loads(text) for text in path.read_text().splitlines()]


MANY = b"".join(line(f"r{index}", max_tokens=1 + index % 7) for index in range(40))


@pytest.mark.parametrize("plans", [(None,), (None, None, None), (3, None), (None, 9, 4)])
def test_the_same_bytes_however_many_workers_there_are_and_die(
    tmp_path: Path, plans: tuple[int | None, ...]
) -> None:
    path, alone = tmp_path / "out", tmp_path / "alone"
    bench = Bench(path, MANY, *plans)
    assert bench.run() is End.ALL_LINES
    assert bench.batch.retries > 0 or all(count is None for count in plans)
    reference = Bench(alone, MANY, None)
    reference.run()
    assert bench.answers(path) == reference.answers(alone)
    assert path.read_bytes() == alone.read_bytes()


def test_no_worker_left_is_an_error_and_what_ended_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "out", MANY, 12, 15)
    with pytest.raises(WorkerLostError, match=r"no worker is left .*killed.*start the job again"):
        bench.run()
    assert 0 < bench.output.tally.lines < 40
    assert bench.output.tally.failed == 0
    again = Bench(tmp_path / "out", MANY, None)
    assert again.output.before == bench.output.tally
    assert again.run() is End.ALL_LINES
    assert len(again.answers(tmp_path / "out")) == 40


def test_a_line_is_run_again_a_bounded_number_of_times(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "out", line("a"), 1, 1, None, max_retries=1)
    assert bench.run() is End.ALL_LINES
    (told,) = bench.answers(tmp_path / "out")
    assert bench.batch.retries == 1
    assert told["error"]["code"] == "unavailable"
    assert told["response"]["status_code"] == 503


def test_wrong_lines_stand_among_the_others_in_the_order_of_the_input(tmp_path: Path) -> None:
    data = b"".join(
        (
            line("a"),
            b"{\n",
            line("a"),
            b"\n",
            line("b", max_tokens=10**6),
            line("c", prompt=[10**6]),
            line("d", n=99),
            b"x" * (LIMIT + 1) + b"\n",
            line("e", n=2),
        )
    )
    bench = Bench(tmp_path / "out", data, None)
    assert bench.run() is End.ALL_LINES
    told = bench.answers(tmp_path / "out")
    assert [(entry["custom_id"], (entry["error"] or {}).get("code")) for entry in told] == [
        ("a", None),
        (None, "invalid_json"),
        ("a", "duplicate_custom_id"),
        ("b", "invalid_request"),
        ("c", "invalid_request"),
        ("d", "invalid_request"),
        (None, "line_too_long"),
        ("e", None),
    ]
    assert "positions" in told[3]["error"]["message"]
    assert len(told[7]["response"]["body"]["choices"]) == 2
    assert bench.output.tally.failed == 6


def test_too_many_errors_end_it_early_and_more_may_be_allowed_later(tmp_path: Path) -> None:
    data = b"".join(line(f"r{i}", model="other" if i % 2 else "ouro-tiny") for i in range(40))
    bench = Bench(tmp_path / "out", data, None, max_errors=2)
    assert bench.run() is End.ERRORS
    assert bench.output.tally.failed == 3
    assert bench.taken < 10
    later = Bench(tmp_path / "out", data, None, max_errors=20)
    assert later.run() is End.ALL_LINES
    assert later.output.tally.failed == 20


def test_no_error_is_too_many_where_none_is_allowed(tmp_path: Path) -> None:
    assert Bench(tmp_path / "out", b"{\n" + MANY, None, max_errors=0).run() is End.ERRORS


def test_it_stops_when_it_is_told_to(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "out", MANY, None)
    bench.stop.requested = True
    assert bench.run() is End.STOPPED
    assert bench.taken == 0


def test_what_is_in_work_is_bounded_and_keeps_the_slots_full(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "out", MANY, None, None, requests_per_slot=3)
    slots = 2 * make_profile().num_slots
    assert bench.batch.capacity == 3 * slots
    in_work: list[tuple[int, int]] = []
    step = bench.session.driver.step

    def watched() -> Any:  # noqa: ANN401
        stats = bench.session.engine.stats()
        in_work.append((bench.taken, stats.waiting + stats.running))
        return step()

    bench.session.driver.step = watched  # type: ignore[method-assign]
    assert bench.run() is End.ALL_LINES
    assert max(count for _, count in in_work) == 3 * slots
    fed = [(taken, count) for taken, count in in_work if taken < bench.scan.num_lines]
    assert min(count for _, count in fed) >= slots
    together = {later - taken for (taken, _), (later, _) in pairwise(fed)}
    assert len(fed) > 2
    assert together - {0}
    assert min(together - {0}) >= 2


@pytest.mark.parametrize("seconds", [0.0, WRITTEN_WITHIN])
def test_answers_are_written_several_together_and_none_waits_for_long(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=partial(next, count(0.0, seconds)))
    monkeypatch.setattr(batch_run, "time", clock)
    bench = Bench(tmp_path / "out", MANY, None)
    written: list[tuple[int, int]] = []
    step = bench.session.driver.step

    def watched() -> Any:  # noqa: ANN401
        stats = bench.session.engine.stats()
        ended = bench.taken - stats.waiting - stats.running
        written.append((ended, bench.output.tally.lines))
        return step()

    bench.session.driver.step = watched  # type: ignore[method-assign]
    assert bench.run() is End.ALL_LINES
    assert bench.output.tally.lines == bench.scan.num_lines
    waiting = [ended - lines for ended, lines in written]
    if seconds:
        assert not any(waiting)
    else:
        assert 0 < max(waiting) < WRITTEN_TOGETHER
        assert {later - lines for (_, lines), (_, later) in pairwise(written)} != {0}


def test_a_slow_line_holds_later_parts_back(tmp_path: Path) -> None:
    first = line("slow", max_tokens=60, exit_threshold=1.0)
    rest = b"".join(line(f"r{i}", max_tokens=1) for i in range(200))
    bench = Bench(tmp_path / "out", first + rest, None)
    ahead: list[int] = []
    step = bench.session.driver.step

    def watched() -> Any:  # noqa: ANN401
        if not bench.output.is_written(0):
            ahead.append(bench.taken)
        return step()

    bench.session.driver.step = watched  # type: ignore[method-assign]
    assert bench.run() is End.ALL_LINES
    parts = OPEN_PARTS + bench.batch.capacity // PART
    assert max(ahead) <= parts * PART + 1
    assert bench.output.tally.lines == 201


def test_an_input_that_grew_is_not_read_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "out", MANY, None)
    bench.data += line("late")
    with pytest.raises(LoopmeshError, match="has grown"):
        bench.run()
