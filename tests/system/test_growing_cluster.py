"""A batch engine on a cluster without workers: nodes come for it, and go after it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest
import ray

from cluster.llm import LLM
from cluster.placement_group import list_places
from cluster.ray_workers import RayWorkers
from cluster.status import read_status, render
from protocol.config import CacheSettings, ClusterSettings, Configuration, WorkerSettings
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams
from tests.growing_cluster import growing_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.autoscaler, pytest.mark.timeout(300)]

PATIENCE = 120.0


def configuration(num_cpus: float, place_timeout: float) -> Configuration:
    return Configuration(
        worker=WorkerSettings(
            cache=CacheSettings(num_blocks=256), device="cpu", num_slots=4, num_threads=1
        ),
        cluster=ClusterSettings(num_cpus=num_cpus, grows=True, place_timeout=place_timeout),
    )


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    with growing_cluster(max_nodes=2, cpus=1):
        yield


class Diary:
    """Prints how many nodes and waiting workers there are whenever that changes. Owner: a test."""

    def __init__(self) -> None:
        self._started = os.times().elapsed
        self._last: object = None

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Look every half second until it holds; fails after PATIENCE."""
        waiter, began = psutil.Process(), os.times().elapsed
        while not holds():
            assert os.times().elapsed - began < PATIENCE, f"not {what}: {self.look()}"
            self.look()
            waiter.cpu_percent(interval=0.5)
        self.look()
        self.say(what)

    def look(self) -> str:
        places = list_places()
        waiting = sum(place.waits for place in places)
        now = f"{nodes()} nodes, {len(places)} places asked for, {waiting} of them waiting"
        if now != self._last:
            self._last = now
            self.say(now)
        return now

    def say(self, line: str) -> None:
        print(f"{os.times().elapsed - self._started:6.1f} s  {line}")


def nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("_cluster")
def test_nodes_come_for_the_workers_of_a_batch_and_go_after_it() -> None:
    diary = Diary()
    assert nodes() == 1
    assert ray.cluster_resources().get("CPU", 0) == 0  # type: ignore[no-untyped-call]
    diary.look()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            LLM, executor="ray", workers=2, configuration=configuration(1.0, PATIENCE)
        )
        diary.until(lambda: any(place.infeasible for place in list_places()), "demand is there")
        status = read_status(os.times().elapsed)
        assert len(status.waiting) == 2
        assert "no node can hold a worker that needs {'CPU': 1.0}" in render(status)
        diary.say(render(status).splitlines()[-1])
        diary.until(lambda: nodes() == 3, "a node for each worker")
        diary.until(opening.done, "the workers have started")
    with opening.result() as llm:
        prompts = ["Once upon a time", "One day"]
        answers = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, seed=1))
        assert [len(answer.choices[0].token_ids) for answer in answers] == [8, 8]
        lanes = llm.stats().lanes
        assert all(lane.plans for lane in lanes)
        diary.say(f"{len(answers)} prompts answered on {len(lanes)} lanes")
    assert list_places() == []
    diary.until(lambda: nodes() == 1, "the nodes are gone")


@pytest.mark.usefixtures("_cluster")
def test_what_no_node_of_it_could_hold_fails_in_time_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'CPU': 5.*cluster has .*waited 4 s for one"):
        RayWorkers.open(configuration(5.0, 4.0), 1)
    assert list_places() == []
