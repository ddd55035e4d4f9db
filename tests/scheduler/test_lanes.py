"""Several lanes, a lost one, and what the statistics say."""

from __future__ import annotations

import pytest

from protocol.config import SchedulerSettings
from protocol.errors import OverloadedError
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from protocol.rng import RngKey
from protocol.sampling import SamplingParams
from scheduler.lane import Lane
from scheduler.request import Request
from scheduler.states import State
from tests.scheduler.bench import Bench, make_profile, reasons, texts


def test_a_lost_lane_ends_its_requests_and_the_others_go_on() -> None:
    bench = Bench(make_profile(), make_profile())
    for request_id in "abcd":
        bench.add(request_id, max_tokens=3)
    bench.step()
    bench.step()
    flying = dict(bench.plan())
    bench.engine.abort("c")  # on lane-0, and now releasing
    ends = bench.engine.close_lane("lane-0", "the process died")
    assert [(e.key.request_id, e.start_index, e.tokens) for e in ends] == [("a", 1, ())]
    assert ends[0].finish_reason is FinishReason.ERROR
    assert ends[0].error == "lane-0 was closed: the process died"
    assert bench.engine.lanes == ("lane-1",)
    late = bench.run("lane-0", flying["lane-0"])
    assert bench.apply("lane-0", late) == []
    assert bench.engine.stats().stale_results == 1
    bench.apply("lane-1", bench.run("lane-1", flying["lane-1"]))
    bench.add("a", max_tokens=3)
    bench.finish()
    assert reasons(bench.outputs) == dict.fromkeys("abd", FinishReason.LENGTH)
    stats = bench.engine.stats()
    assert stats.total_blocks == stats.free_blocks == 256
    assert stats.finished == {FinishReason.LENGTH: 3, FinishReason.ERROR: 1, FinishReason.ABORT: 1}
    assert stats.rng_keys == 0


def test_waiting_requests_move_to_the_lane_that_is_left() -> None:
    bench = Bench(make_profile(num_slots=1), make_profile(num_slots=1))
    for request_id in "abc":
        bench.add(request_id, max_tokens=2)
    bench.step()
    (end,) = bench.engine.close_lane("lane-0", "gone")
    assert end.key.request_id == "a"
    bench.finish()
    assert reasons(bench.outputs) == dict.fromkeys("bc", FinishReason.LENGTH)


def test_without_a_lane_left_waiting_requests_end() -> None:
    bench = Bench(make_profile(num_slots=1))
    for request_id in "ab":
        bench.add(request_id)
    bench.step()
    ends = bench.engine.close_lane("lane-0", "gone")
    assert reasons(ends) == dict.fromkeys("ab", FinishReason.ERROR)
    assert ends[1].error == (
        "lane-0 was closed: gone; no worker is left that could run this request"
    )
    assert bench.engine.close_lane("lane-0", "again") == []
    assert not bench.engine.has_work()
    assert bench.engine.stats().rng_keys == 0


def test_a_waiting_request_that_only_the_lost_lane_could_hold_ends() -> None:
    bench = Bench(make_profile(num_blocks=64, num_slots=1), make_profile(num_blocks=8))
    bench.add("first", max_tokens=60)
    bench.add("big", prompt=20)
    bench.step()
    assert bench.engine.stats().waiting == 1
    ends = bench.engine.close_lane("lane-0", "gone")
    assert reasons(ends) == dict.fromkeys(["first", "big"], FinishReason.ERROR)
    bench.add("small", max_tokens=4)
    bench.finish()
    assert texts(bench.outputs)["small"][0] == [1, 2, 3, 4]


def test_a_name_opens_again_with_a_newer_epoch() -> None:
    bench = Bench()
    bench.add("a", max_tokens=2)
    ((_, old),) = bench.plan()
    late = bench.run("lane-0", old)
    bench.engine.close_lane("lane-0", "gone")
    bench.engine.add_lane("lane-0", 2, make_profile())
    bench.add("a", max_tokens=2)
    ((_, plan),) = bench.plan()
    assert (plan.epoch, plan.seq) == (2, 1)
    assert bench.apply("lane-0", late) == []
    assert bench.engine.stats().stale_results == 1


def test_statistics_of_a_lane() -> None:
    bench = Bench()
    bench.add("a", prompt=2, max_tokens=3)
    bench.add("b", max_tokens=1)
    assert repr(bench.engine) == "<Engine 1 lanes, 2 waiting, 2 requests>"
    bench.step()
    bench.step()
    bench.plan()
    stats = bench.engine.stats()
    (lane,) = stats.lanes
    assert (stats.waiting, stats.running, stats.releasing) == (0, 1, 1)
    assert (stats.tokens, stats.loops, stats.last_applied) == (2, 8, 2.0)
    assert (lane.name, lane.epoch, lane.plans) == ("lane-0", 1, 3)
    assert (lane.in_flight, lane.in_flight_since) == (1, 3.0)
    assert (lane.free_slots, lane.kv.tables, lane.load) == (2, 2, 6)
    assert stats.free_blocks == lane.kv.free_blocks == 256 - 8


def test_one_line_of_a_lane() -> None:
    profile = make_profile()
    lane = Lane("lane-0", 3, profile, SchedulerSettings())
    assert repr(lane) == "<Lane lane-0 epoch 3: 0 requests, idle>"
    request = Request.create(RequestKey("a", 1), (1,), SamplingParams(), profile.model)
    lane.admit(request, RngKey(7))
    assert lane.next_plan(1.0) is not None
    assert repr(lane) == "<Lane lane-0 epoch 3: 1 requests, 1 in flight>"


def test_a_lane_without_blocks_takes_nothing() -> None:
    profile = make_profile(num_blocks=4)
    lane = Lane("lane-0", 1, profile, SchedulerSettings())
    request = Request.create(RequestKey("a", 1), (1,), SamplingParams(), profile.model)
    with pytest.raises(OverloadedError):
        lane.admit(request, RngKey(7))
    assert (request.state, request.lane, lane.is_busy) == (State.WAITING, None, False)
    assert lane.stats(0).kv.free_blocks == 4
