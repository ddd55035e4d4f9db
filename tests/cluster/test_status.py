"""loopmesh status: on a real cluster with an engine and a worker that no node can hold."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from cluster.cli import main
from cluster.engine_directory import NAMESPACE, engine_actor, engine_name, engine_names
from cluster.engine_load import EngineLoad
from cluster.engine_replica import EngineActor, end_engine, remove_orphans
from cluster.placement_group import list_places, reserve_place
from cluster.status import ClusterStatus, EngineStatus, read_status, render
from protocol.config import ClusterSettings, parse_configuration
from protocol.exit_rule import FinishReason
from scheduler.kv_cost import KVStats
from scheduler.stats import EngineStats, LaneStats
from tests.ray_cluster import NUM_CPUS, eventually, live_placement_groups, local_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIGURATION = parse_configuration(
    {
        "worker": {"device": "cpu", "num_threads": 1, "cache": {"num_blocks": 64}},
        "cluster": {"beat_interval": 0.1},
    }
)
LANE = LaneStats("lane-0", 2, 3, 0, 5, KVStats(100, 75, 0, 0, 0, 0), 1200, 17, None, 1)
STATS = EngineStats(
    waiting=1,
    running=3,
    releasing=0,
    free_blocks=75,
    total_blocks=100,
    rng_keys=4,
    tokens=9,
    loops=20,
    loops_saved=3,
    finished={FinishReason.STOP: 1},
    stale_results=0,
    stale_rows=0,
    discarded_rows=0,
    last_applied=None,
    lanes=(LANE,),
    prefix_queries=0,
    prefix_hit_tokens=0,
    cached_blocks=0,
    evicted_blocks=0,
    preemptions=0,
    resumptions=0,
    suspended=0,
)
LOAD = EngineLoad(1500, 500.0, 400.0, 3, 1, 75, 100, workers=1)
NOTHING = ClusterStatus(1, {"CPU": 8, "GPU": 0}, {"CPU": 7.5, "GPU": 0}, (), (), ())


def test_each_engine_says_what_it_owes_and_how_long_that_takes() -> None:
    engines = (
        EngineStatus("a#1", STATS, LOAD),
        EngineStatus("a#2", STATS, replace(LOAD, loops_per_second=None, draining=True)),
        EngineStatus("a#3", replace(STATS, lanes=()), LOAD),
        EngineStatus("a#4", None, None, "does not answer within 5 s"),
    )
    lines = render(replace(NOTHING, engines=engines)).splitlines()
    lane = "  lane-0: epoch 2, 3 running, 5 slots free, owes 1200 loops, 17 plans, 1 in flight"
    assert lines == [
        "cluster: 1 nodes, 7.5 of 8 CPU free, 0 of 0 GPU free",
        "engine a#1: 3 running, 1 waiting, owes 1500 loops (3.0 s at 500 a second), "
        "75 % of KV free",
        lane,
        "engine a#2: 3 running, 1 waiting, owes 1500 loops (rate not known yet), "
        "75 % of KV free, draining",
        lane,
        "engine a#3: starting, no lane yet",
        "engine a#4: does not answer within 5 s",
        "no worker waits for a place",
    ]


def test_an_empty_cluster_says_so() -> None:
    assert render(NOTHING).splitlines()[1:] == [
        "no engine of an endpoint runs",
        "no worker waits for a place",
    ]


def test_a_cluster_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "127.0.0.1:1"]) == 2
    assert "no cluster answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    name = engine_name("app", "r1")
    remote: Any = ray.remote(EngineActor)
    with local_ray():
        actor = remote.options(name=name, namespace=NAMESPACE, num_cpus=0).remote(
            CONFIGURATION.model_dump_json(), name
        )
        ray.get(actor.open.remote(), timeout=60)
        yield name
        ray.get(actor.close.remote(), timeout=20)
        ray.kill(actor)


@pytest.mark.ray
def test_a_worker_that_waits_is_shown_with_what_it_asked_and_what_there_is(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert f"engine {engine}: 0 running, 0 waiting, owes 0 loops" in shown
    assert "lane-0: epoch 1" in shown
    assert f"{NUM_CPUS - 1} of {NUM_CPUS} CPU free" in shown
    asked = reserve_place(ClusterSettings(num_cpus=1000.0), "3f2a9c01", "lane-7")
    try:
        assert eventually(lambda: any(place.infeasible for place in list_places()))
        assert main(["status"]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "WAITING" in line]
        assert "s: lane-7 of engine 3f2a9c01: no node can hold a worker that needs" in line
        assert "'CPU': 1000.0" in line
        assert f"the cluster has {{'CPU': {NUM_CPUS}.0, 'GPU': 0.0}}" in line
        assert main(["status", "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["waiting"][0]["place"]["engine"] == "3f2a9c01"
        assert told["engines"][0]["stats"]["lanes"][0]["name"] == "lane-0"
        (item,) = read_status(told["waiting"][0]["place"]["asked"] + 40.0).waiting
        assert item.seconds == 40.0
    finally:
        remove_placement_group(asked)
    assert eventually(lambda: main(["status"]) == 0)


@ray.remote(num_cpus=0)
class Stuck:
    """An engine that never ends by itself."""

    async def drain(self, patience: float) -> None:
        assert patience == 0.0
        await asyncio.Event().wait()

    async def answers(self) -> bool:
        return True


@pytest.mark.ray
@pytest.mark.usefixtures("engine")
def test_an_engine_that_does_not_end_is_ended() -> None:
    actor: Any = Stuck.remote()  # type: ignore[attr-defined]
    assert ray.get(actor.answers.remote(), timeout=20)
    asyncio.run(end_engine(actor, 0.0, 0.1))
    assert eventually(lambda: not is_there(actor))


def is_there(actor: Any) -> bool:  # noqa: ANN401 - a handle of Ray's
    try:
        return bool(ray.get(actor.answers.remote(), timeout=20))
    except ray.exceptions.RayActorError:
        return False


@pytest.mark.ray
def test_names_of_applications_may_have_any_sign(engine: str) -> None:
    assert engine_names() == engine_names("app") == [engine]
    assert engine_names("ap") == []
    name = engine_name("a#b|c", "r2")
    place = reserve_place(ClusterSettings(), name, "lane-1")
    (found,) = [place for place in list_places() if place.engine == name]
    assert (found.lane, found.bundle) == ("lane-1", {"CPU": 1.0})
    assert ray.util.get_placement_group(found.name).id == place.id
    remove_placement_group(place)
    assert eventually(lambda: [place.engine for place in list_places()] == [engine])
    kept: Any = Stuck.options(name=name, namespace=NAMESPACE).remote()  # type: ignore[attr-defined]
    assert ray.get(kept.answers.remote(), timeout=20)
    assert engine_names("a#b|c") == [name]
    ray.kill(kept)
    assert eventually(lambda: engine_names() == [engine])


@pytest.mark.ray
def test_places_of_dead_engines_are_given_back_and_no_others(engine: str) -> None:
    for owner in ("app#dead", "3f2a9c01"):
        reserve_place(ClusterSettings(), owner, "lane-0")
    remove_orphans()
    assert eventually(
        lambda: sorted(place.engine for place in list_places()) == ["3f2a9c01", engine]
    )
    remove_orphans(engine)
    assert eventually(lambda: [place.engine for place in list_places()] == ["3f2a9c01"])
    (left,) = list_places()
    assert live_placement_groups() == [left.name]
    remove_placement_group(ray.util.get_placement_group(left.name))
    assert ray.get(engine_actor(engine).worker_pids.remote(), timeout=20)
