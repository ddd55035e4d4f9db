"""A batch job on a cluster without workers: nodes come for it, and go after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import ray

from cluster.placement_group import list_places
from cluster.ray_workers import RayWorkers
from cluster.status import read_status, render
from protocol.config import CacheSettings, ClusterSettings, Configuration, WorkerSettings
from protocol.errors import ConfigError
from tests.growing_cluster import growing_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.autoscaler, pytest.mark.timeout(300)]

PATIENCE = 120.0
LINES = 40
ASKED = "both workers have asked"


def configuration(num_cpus: float, place_timeout: float) -> Configuration:
    return Configuration(
        worker=WorkerSettings(
            cache=CacheSettings(num_blocks=256), device="cpu", num_slots=4, num_threads=1
        ),
        cluster=ClusterSettings(num_cpus=num_cpus, grows=True, place_timeout=place_timeout),
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with growing_cluster(max_nodes=2, cpus=1) as there:
        yield there


@contextmanager
def batch_job(folder: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    """A job of LINES lines on two workers, in a process of its own."""
    body = {"model": "ouro-tiny", "prompt": "Once upon a time", "max_tokens": 8}
    wish = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = (json.dumps(wish | {"custom_id": f"r{i}"}) for i in range(LINES))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(configuration(1.0, PATIENCE).model_dump_json())
    files = {"input": "in.jsonl", "output": "out.jsonl", "config": "config.json"}
    flags = [f"--{name}={folder / file}" for name, file in files.items()]
    with subprocess.Popen(
        [sys.executable, "-m", "cluster.batch_job", "--workers=2", *flags],
        env={**os.environ, "RAY_ADDRESS": address},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.kill()


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


def test_nodes_come_for_the_workers_of_a_batch_and_go_after_it(
    address: str, tmp_path: Path
) -> None:
    diary = Diary()
    assert nodes() == 1
    assert ray.cluster_resources().get("CPU", 0) == 0  # type: ignore[no-untyped-call]
    diary.look()
    with batch_job(tmp_path, address) as job:
        diary.until(lambda: len([place for place in list_places() if place.infeasible]) == 2, ASKED)
        status = render(read_status(time.time()))
        assert status.count("no node can hold a worker that needs {'CPU': 1.0}") == 2
        diary.say(status.splitlines()[-1])
        diary.until(lambda: nodes() == 3, "a node for each worker")
        diary.until(lambda: job.poll() is not None, "the job is over")
        told, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, told
    answers = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(answers) == LINES
    assert {json.loads(answer)["response"]["status_code"] for answer in answers} == {200}
    diary.say(told.strip().splitlines()[-1])
    assert list_places() == []
    diary.until(lambda: nodes() == 1, "the nodes are gone")


@pytest.mark.usefixtures("address")
def test_what_no_node_of_it_could_hold_fails_in_time_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'CPU': 5.*cluster has .*waited 4 s for one"):
        RayWorkers.open(configuration(5.0, 4.0), 1)
    assert list_places() == []
