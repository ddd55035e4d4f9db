"""What a closed worker leaves: nothing but what it was, also when opening it failed half-way."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch
from torch import Tensor

from protocol.config import CacheSettings, WorkerSettings
from protocol.errors import ConfigError, ExecutorClosedError
from protocol.identity import RequestKey
from tests.plans import TIMEOUT, PlanSender, admission, block_table, coda, prefill
from worker.device_memory import DeviceUsers, forget_frames
from worker.local_executor import LocalExecutor
from worker.worker import Worker, load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker.models.base import LoopedModel

A = RequestKey("a", 1)
CPU = torch.device("cpu")
PROMPT = (1648, 1424, 261, 658, 14)
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=4, num_threads=1
)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def by_reference_counts_alone() -> Iterator[None]:
    """Nothing may need the garbage collector to go."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Source:
    """Loads the model and remembers it and its weights weakly."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[object]] = []

    def __call__(self, settings: WorkerSettings, device: torch.device) -> LoopedModel:
        model = load_settings(settings, device)
        self.made.append(weakref.ref(model))
        return model

    @property
    def alive(self) -> bool:
        return any(made() is not None for made in self.made)


def objects(kind: type[T]) -> list[T]:
    """The live objects of a kind, the garbage collector's view."""
    return [found for found in gc.get_objects() if type(found) is kind]


def tensors() -> int:
    """Bytes of all tensors that are alive."""
    return sum(tensor.nbytes for tensor in objects(Tensor))


def refs_of(worker: Worker) -> list[weakref.ref[object]]:
    runner, storage, readback = worker.runner, worker.storage, worker.readback
    lease = readback.lease()
    readback.give_back(lease)
    return [weakref.ref(part) for part in (runner, runner.suspended, storage, readback, lease)]


def test_nothing_of_a_closed_worker_stays() -> None:
    before, source = tensors(), Source()
    worker = Worker.open(SETTINGS, source)
    refs = refs_of(worker)
    assert source.alive
    plan = worker.memory_plan
    # On a CPU ticks have no lines of their own between plans.
    held = plan.allocated - plan.footprint.ticks + plan.footprint.readback
    assert tensors() >= before + held
    worker.close()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert not source.alive
    assert tensors() == before
    assert worker.closed
    assert repr(worker) == "<Worker ouro-tiny on cpu, closed>"
    assert worker.memory_plan.num_blocks == worker.profile.num_blocks == 64


def test_a_second_close_does_nothing() -> None:
    worker, other = Worker.open(SETTINGS), Worker.open(SETTINGS)
    worker.close()
    worker.close()
    assert other.storage.pages.shape[0] == 65
    other.close()


def test_a_closed_worker_rejects_what_comes_later() -> None:
    worker = Worker.open(SETTINGS)
    lease = worker.readback.lease()
    worker.close()
    for part in ("runner", "readback", "storage"):
        with pytest.raises(ExecutorClosedError, match="the worker is closed; open a new one"):
            getattr(worker, part)
    worker.give_back(lease)
    assert worker.steps_done == 0


def test_an_executor_keeps_nothing_of_its_worker() -> None:
    before = tensors()
    executor = LocalExecutor.open(SETTINGS)
    sender = PlanSender(executor)
    admit = admission(A, PROMPT, block_table(executor.profile(), 8))
    sender.run(prefill(A, 0, 5), coda(A, 4, 4, 0), admits=(admit,))
    held = sender.submit()
    executor.shutdown(TIMEOUT)
    profile = executor.profile()
    assert profile.num_blocks == 64
    assert executor.progress()[1] == 2
    held.retire()
    del sender, held
    assert tensors() == before
    with pytest.raises(ExecutorClosedError):
        executor.synchronize(TIMEOUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "triton"}, "Triton runs on CUDA"),
        ({"cache": CacheSettings(num_blocks=3)}, "holds no request"),
        ({"cache": CacheSettings(num_blocks=10**11)}, "do not fit on cpu"),
    ],
    ids=["attention", "plan", "storage"],
)
def test_a_failure_half_way_leaves_nothing_and_says_why(
    changes: dict[str, object], message: str
) -> None:
    before, source = tensors(), Source()
    settings = SETTINGS.model_copy(update=changes)
    with pytest.raises(ConfigError, match=message) as caught:
        Worker.open(settings, source)
    assert len(source.made) == 1
    assert not source.alive
    assert tensors() == before
    assert caught.value.__traceback__ is not None


def test_an_executor_that_failed_to_open_keeps_nothing() -> None:
    before = tensors()
    settings = SETTINGS.model_copy(update={"cache": CacheSettings(num_blocks=10**11)})
    with pytest.raises(ConfigError, match="do not fit on cpu"):
        LocalExecutor.open(settings)
    assert tensors() == before


def test_frames_are_forgotten_along_causes_and_contexts() -> None:
    class Thing:
        pass

    things: list[weakref.ref[Thing]] = []

    def fail(text: str) -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise ValueError(text)

    def chain() -> None:
        try:
            fail("first")
        except ValueError as first:
            try:
                fail("second")
            except ValueError:
                raise KeyError("third") from first

    with pytest.raises(KeyError) as caught:
        chain()
    error = caught.value
    assert [thing() is None for thing in things] == [False, False]
    forget_frames(error)
    assert [thing() is None for thing in things] == [True, True]


def test_users_of_a_device_are_counted() -> None:
    users = DeviceUsers()
    users.enter()
    users.enter()
    users.leave(CPU)
    assert (users.count, repr(users)) == (1, "<DeviceUsers 1>")
