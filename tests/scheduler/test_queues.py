"""Who is placed next: policies, the bounded scan, bypasses, the watermark, limits of a lane."""

from __future__ import annotations

import pytest

from protocol.config import SchedulerSettings
from protocol.identity import RequestKey
from protocol.sampling import SamplingParams
from scheduler.queues import WaitingQueue
from scheduler.request import Request
from tests.scheduler.bench import Bench, make_model, make_profile, reasons


def admitted(bench: Bench) -> list[str]:
    """The request ids that all plans so far have admitted, in order."""
    return [item.key.request_id for plan in bench.plans for item in plan.admits]


def queue_of(sizes: dict[str, int], **settings: object) -> tuple[WaitingQueue, dict[str, Request]]:
    """A queue of requests of these numbers of prompt tokens, one output each."""
    queue = WaitingQueue(SchedulerSettings.model_validate(settings))
    requests = {}
    for index, (name, size) in enumerate(sizes.items()):
        key = RequestKey(name, index + 1)
        params = SamplingParams(max_tokens=1)
        requests[name] = Request.create(key, (1,) * size, params, make_model())
        queue.add(requests[name])
    return queue, requests


class Room:
    """Some room, and who took it. Owner: one test."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[str] = []
        self.taken: list[str] = []

    def take(self, request: Request) -> bool:
        self.asked.append(request.key.request_id)
        if request.capacity_tokens > self.free:
            return False
        self.free -= request.capacity_tokens
        self.taken.append(request.key.request_id)
        return True


def names(queue: WaitingQueue) -> list[str]:
    return [request.key.request_id for request in queue]


def test_the_worked_bypass_example() -> None:
    queue, requests = queue_of({"a": 12, "b": 4, "c": 4}, max_admission_bypasses=1)
    room = Room(8)
    queue.place(room.take)
    assert (room.taken, names(queue), requests["a"].bypasses) == (["b"], ["a", "c"], 1)
    queue.place(room.take)
    assert (room.taken, room.asked) == (["b"], ["a", "b", "a"])
    room.free = 16
    queue.place(room.take)
    assert room.taken == ["b", "a", "c"]
    assert (len(queue), repr(queue)) == (0, "<WaitingQueue 0 requests>")


def test_small_requests_pass_a_large_one_so_often_and_no_more() -> None:
    sizes = {"small0": 2, "large": 30} | {f"small{index}": 2 for index in range(1, 9)}
    queue, requests = queue_of(sizes, max_admission_bypasses=3)
    room = Room(20)
    queue.place(room.take)
    assert room.taken == ["small0", "small1", "small2", "small3"]
    assert requests["large"].bypasses == 3
    assert names(queue) == ["large", "small4", "small5", "small6", "small7", "small8"]


def test_a_failed_offer_without_a_later_success_is_no_bypass() -> None:
    queue, requests = queue_of({"a": 12, "b": 9}, max_admission_bypasses=1)
    queue.place(Room(8).take)
    assert [request.bypasses for request in requests.values()] == [0, 0]
    assert names(queue) == ["a", "b"]


def test_the_scan_is_bounded() -> None:
    queue, _ = queue_of(dict.fromkeys("abcd", 9) | {"e": 1}, admission_scan_limit=4)
    room = Room(8)
    queue.place(room.take)
    assert (room.asked, room.taken) == (list("abcd"), [])
    wider, _ = queue_of(dict.fromkeys("abcd", 9) | {"e": 1}, admission_scan_limit=5)
    wider.place(room.take)
    assert room.taken == ["e"]


def test_a_small_request_passes_a_large_one_that_does_not_fit() -> None:
    bench = Bench(make_profile(num_blocks=16))
    bench.add("first", max_tokens=5)
    bench.add("large", max_tokens=13)
    bench.add("small", max_tokens=1)
    bench.step()
    assert admitted(bench) == ["first", "small"]
    bench.finish()
    assert admitted(bench) == ["first", "small", "large"]
    assert len(reasons(bench.outputs)) == 3


def test_a_large_request_is_not_passed_for_ever() -> None:
    bench = Bench(make_profile(num_blocks=16), max_admission_bypasses=2)
    bench.add("first", max_tokens=5)
    bench.add("large", max_tokens=16)
    for index in range(30):
        bench.add(f"small{index}", max_tokens=1)
    bench.finish()
    assert admitted(bench)[:4] == ["first", "small0", "small1", "large"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["a", "b", "c", "d", "e"]), ("priority", ["d", "b", "e", "a", "c"])],
)
def test_policies(policy: str, order: list[str]) -> None:
    bench = Bench(make_profile(num_slots=1), policy=policy)
    for name, priority in zip("abcde", [3, 0, 3, -5, 0], strict=True):
        bench.add(name, max_tokens=1, priority=priority)
    bench.finish()
    assert admitted(bench) == order


def test_who_was_suspended_keeps_its_place() -> None:
    for policy in ("fcfs", "priority"):
        queue, requests = queue_of(dict.fromkeys("abc", 1), policy=policy)
        queue.remove(requests["b"])
        queue.add(requests["b"])
        assert names(queue) == ["a", "b", "c"]


def test_a_watermark_stays_free_unless_the_lane_is_idle() -> None:
    bench = Bench(make_profile(num_blocks=32), kv_watermark=0.26)
    for name in ("a", "b", "c"):
        bench.add(name, max_tokens=8)
    bench.step()
    # 8 blocks each; of 32, int(0.26 * 32) = 8 stay free beside a running request.
    assert admitted(bench) == ["a", "b", "c"]
    bench.add("d", max_tokens=4)
    bench.step()
    assert admitted(bench) == ["a", "b", "c"]
    bench.finish()
    bench.add("whole", max_tokens=32)
    bench.finish()
    assert admitted(bench) == ["a", "b", "c", "d", "whole"]


def test_max_running_bounds_a_lane() -> None:
    bench = Bench(make_profile(), make_profile(), max_running=2)
    for index in range(6):
        bench.add(f"r{index}", max_tokens=3)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting) == (4, 2)
    assert [lane.free_slots for lane in stats.lanes] == [0, 0]
    assert len(reasons(bench.finish())) == 6
    wide = Bench(make_profile(num_slots=3), max_running=9)
    assert wide.engine.stats().lanes[0].free_slots == 3


def test_an_aborted_request_waits_no_more() -> None:
    bench = Bench(make_profile(num_slots=1))
    for name in "abc":
        bench.add(name, max_tokens=2)
    bench.step()
    bench.engine.abort("b")
    bench.finish()
    assert admitted(bench) == ["a", "c"]
