"""Plans that are enqueued before the last ones are over, on streams of which one is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from cluster.drivers import SyncDriver
from protocol.config import CacheSettings, SchedulerSettings, WorkerSettings
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from tests.plans import TIMEOUT
from tests.scheduler.bench import texts
from worker import model_runner
from worker.local_executor import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scheduler.output import RequestOutput

pytestmark = pytest.mark.gpu

Answers = dict[str, tuple[list[int], list[int]]]

SLOW = {
    "core": ("run_recurrent",),
    "boundary": ("run_prelude", "run_coda"),
    "prompts": ("run_prefill",),
}
CYCLES = 2_000_000
"""Some milliseconds, where a step of this model takes a fraction of one."""
NAMES = [f"request-{index}" for index in range(6)]


def rounds(worker: Mapping[str, object], scheduler: Mapping[str, object]) -> list[Answers]:
    """Six requests over two slots and blocks for little more, then once more with the same ids."""
    settings = WorkerSettings.model_validate(
        {
            "cache": CacheSettings(block_size=4, num_blocks=2 * 4 * 8),
            "num_slots": 2,
            "num_threads": 1,
            **worker,
        }
    )
    engine = Engine(SchedulerSettings.model_validate({"prefix_caching": False, **scheduler}))
    found = []
    with LocalExecutor.open(settings) as executor:
        driver = SyncDriver(engine, {"lane-0": executor}, TIMEOUT)
        for first in (0, 3):
            done: list[RequestOutput] = []
            for index, name in enumerate(NAMES):
                prompt = [1648 + 7 * (first + index), 1424, 261, 658, 14][: 5 - index % 3]
                params = SamplingParams(
                    max_tokens=12 + index,
                    exit_threshold=0.7,
                    ignore_eos=True,
                    temperature=0.7 * (index % 2),
                )
                engine.add(name, prompt, params, index)
            while engine.has_work():
                done += driver.step()
            found.append(texts(done))
    return found


def sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no other name


def slowed(work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: object) -> object:
        sleep(CYCLES)
        done = work(*args)
        sleep(CYCLES)
        return done

    return run


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("policy", ["ouro", "ouro_delayed"])
def test_a_slow_stream_changes_no_answer(
    policy: str, streams: int, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = {"exit_policy": policy, "plans_in_flight": 3, "resident": False}
    expected = rounds({"device": "cpu"}, scheduler)
    for name in SLOW[slow]:
        monkeypatch.setattr(model_runner, name, slowed(getattr(model_runner, name)))
    assert rounds({"device": "cuda", "streams": streams}, scheduler) == expected
    assert [len(each) for each in expected] == [len(NAMES)] * 2


@pytest.mark.parametrize("slow", [(), SLOW["prompts"]])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_ticks_that_are_enqueued_before_the_last_ones_are_read(
    in_flight: int, slow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = {"plans_in_flight": in_flight, "max_ticks": 3}
    expected = rounds({"device": "cpu"}, {"resident": False})
    for name in slow:
        monkeypatch.setattr(model_runner, name, slowed(getattr(model_runner, name)))
    assert rounds({"device": "cuda"}, scheduler) == expected


@pytest.mark.parametrize("in_flight", [1, 3])
def test_ticks_of_requests_that_are_suspended_meanwhile(in_flight: int) -> None:
    scheduler = {"plans_in_flight": in_flight, "max_ticks": 3, "reservation": "overcommit"}
    cache = CacheSettings(block_size=4, num_blocks=40)
    expected = rounds({"device": "cpu"}, {"resident": False})
    assert rounds({"device": "cuda", "cache": cache}, scheduler) == expected
