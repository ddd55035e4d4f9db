"""Workers on Ray: placed, found wanting with the reason, and gone without a trace."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray

from cluster.ray_workers import RayWorkers
from protocol.config import Configuration, parse_configuration
from protocol.errors import ConfigError, DeadlineError, ModelError, WorkerLostError
from tests.plans import TIMEOUT, PlanSender
from tests.ray_cluster import NUM_CPUS, eventually, live_placement_groups, local_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ray


def configuration(**cluster: Any) -> Configuration:  # noqa: ANN401 (any setting)
    worker = {"device": "cpu", "num_threads": 1, "cache": {"num_blocks": 64}}
    return parse_configuration({"worker": worker, "cluster": {"beat_interval": 0.1, **cluster}})


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert live_placement_groups() == []
    assert eventually(lambda: ray.available_resources().get("CPU") == NUM_CPUS)  # type: ignore[no-untyped-call]


def test_each_worker_is_a_process_in_a_place_of_its_own() -> None:
    with RayWorkers.open(configuration(), 2) as workers:
        assert list(workers.executors) == ["lane-0", "lane-1"]
        assert len({os.getpid(), *workers.pids.values()}) == 3
        assert len(live_placement_groups()) == 2
        for executor in workers.executors.values():
            assert PlanSender(executor).run().seq == 1
        processes = [psutil.Process(pid) for pid in workers.pids.values()]
    assert not psutil.wait_procs(processes, timeout=TIMEOUT)[1]
    workers.close()
    assert ray.is_initialized()


def test_two_engines_share_a_cluster() -> None:
    with RayWorkers.open(configuration(), 1) as one, RayWorkers.open(configuration(), 1) as other:
        assert set(one.pids.values()).isdisjoint(other.pids.values())


def test_closing_is_complete_when_a_worker_is_already_dead() -> None:
    with RayWorkers.open(configuration(), 2) as workers:
        os.kill(workers.pids["lane-0"], signal.SIGKILL)
        executor = workers.executors["lane-0"]
        assert eventually(lambda: executor.lost() is not None)
        with pytest.raises(WorkerLostError):
            executor.synchronize(TIMEOUT)


def test_a_worker_that_no_node_can_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=rf"'CPU': 1000.*cluster has .*'CPU': {NUM_CPUS}"):
        RayWorkers.open(configuration(num_cpus=1000), 1)
    with pytest.raises(ConfigError, match="'GPU': 1"):
        RayWorkers.open(configuration(num_gpus=1), 1)


def test_a_cluster_that_grows_is_given_time_to_and_no_longer_than_told() -> None:
    wide = configuration(num_cpus=1000, grows=True, place_timeout=1.0)
    with pytest.raises(ConfigError, match=r"'CPU': 1000.*cluster has .*waited 1 s for one"):
        RayWorkers.open(wide, 1)


def test_a_place_that_is_taken_is_waited_for_and_no_longer_than_told() -> None:
    wide = configuration(num_cpus=NUM_CPUS, place_timeout=1.0)
    with RayWorkers.open(wide, 1), pytest.raises(DeadlineError, match="within 1 s"):
        RayWorkers.open(wide, 1)


def test_a_worker_without_demand_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither CPU nor GPU"):
        RayWorkers.open(configuration(num_cpus=0), 1)


def test_the_worker_s_own_error_comes_back_and_the_others_are_taken_down() -> None:
    wrong = configuration()
    model = wrong.worker.model.model_copy(update={"model": "/no/such/model"})
    wrong = wrong.model_copy(update={"worker": wrong.worker.model_copy(update={"model": model})})
    with pytest.raises(ModelError, match=r"^/no/such/model") as caught:
        RayWorkers.open(wrong, 2)
    assert "Traceback" not in str(caught.value)


def test_a_start_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(DeadlineError, match=r"within 0\.01 s"):
        RayWorkers.open(configuration(start_timeout=0.01), 1)
