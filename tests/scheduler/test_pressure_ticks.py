"""Pressure on requests that decode on their worker: rows park where their blocks end."""

from __future__ import annotations

import pytest

from protocol.layout import Layout
from tests.scheduler.bench import Bench, exit_after, texts
from tests.scheduler.test_pressure import check_idle, pressed, suspended


def granted(bench: Bench) -> list[str]:
    """The pages that each plan so far grants."""
    return [
        " ".join(f"{item.key.request_id}+{len(item.tables[0])}" for item in plan.grants)
        for plan in bench.plans
    ]


def test_rows_run_as_far_as_their_blocks_and_the_last_of_them_leave() -> None:
    bench = pressed(20, max_ticks=4)
    bench.add("a", prompt=3, max_tokens=8)
    bench.add("b", prompt=2, max_tokens=9)
    bench.add("c", prompt=3, max_tokens=6)
    bench.finish()
    assert list(zip(bench.traces(), granted(bench), strict=True)) == [
        # Two pages are left for three rows that may come as far as their second page.
        ("+a | +b | +c | PREFILL a[0:3) b[0:2) c[0:3) | TICKS a b c x4", "a+1 b+1"),
        # c is parked; a and b go on to the ends of theirs.
        ("~c | TICKS a b x4", ""),
        # Both are parked, and c has left one page.
        ("~b | TICKS a x4 yields", "a+1"),
        ("-a | ^c | TICKS c x4 yields", ""),
        ("-c | ^b | TICKS b x4", ""),
        ("-b", ""),
    ]
    stats = bench.engine.stats()
    assert (stats.preemptions, stats.pressure_preemptions, stats.resumptions) == (2, 2, 2)
    check_idle(bench)


def test_what_another_row_needs_to_get_on_comes_before_what_ticks_may_reach() -> None:
    # Within its ticks a may come two pages further, and two are left; b needs one to get on.
    bench = pressed(16, max_ticks=8)
    bench.add("a", prompt=4, max_tokens=12)
    bench.add("b", prompt=4, max_tokens=4)
    bench.finish()
    assert granted(bench)[0] == "a+1 b+1"
    assert suspended(bench) == []
    check_idle(bench)


def test_ticks_may_take_what_nobody_needs() -> None:
    for others, pages in ((0, 3), (1, 2)):
        bench = pressed(16, max_ticks=8)
        bench.add("a", prompt=4, max_tokens=12)
        for index in range(others):
            bench.add(f"brief{index}", prompt=4, max_tokens=1)
        bench.step()
        assert granted(bench) == [f"a+{pages}"]
        bench.finish()
        check_idle(bench)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_decoding_row_comes_before_one_that_starts(first: str) -> None:
    # d leaves the only free page when a is at the end of its own, and b at that of its prompt.
    bench = pressed(20, max_ticks=1, chunk=4)
    sizes = {"a": (2, 6), "b": (12, 3)}
    for name in sorted(sizes, key=lambda name: name != first):
        prompt, outputs = sizes[name]
        bench.add(name, prompt=prompt, max_tokens=outputs)
    bench.add("d", prompt=1, max_tokens=1)
    for _ in range(3):
        bench.step()
    ticks = "a b" if first == "a" else "b a"
    assert bench.traces()[1:] == [
        "-d | PREFILL b[4:8) | TICKS a x1",
        f"PREFILL b[8:12) | TICKS {ticks} x1",
    ]
    # The third page of its prompt is promised to b.
    assert granted(bench) == ["", "b+1", "b+1 a+1"]
    bench.finish()
    check_idle(bench)


def test_a_request_at_the_end_of_its_ticks_is_waited_for() -> None:
    # b certainly ends in the ticks in flight; a, which is parked, waits for its page.
    bench = pressed(12, max_ticks=16, plans_in_flight=2, hazard=exit_after({4: 1, 5: 1, 6: 1}))
    bench.add("a", prompt=4, max_tokens=4, exit_threshold=0.5)
    bench.add("b", prompt=1, max_tokens=4)
    bench.add("c", prompt=1, max_tokens=4)
    bench.finish()
    assert suspended(bench) == []
    check_idle(bench)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("plans_in_flight", [1, 3])
def test_ticks_under_pressure_change_no_answer(layout: Layout, plans_in_flight: int) -> None:
    found = []
    for blocks, max_ticks in ((64, 0), (6, 0), (6, 1), (6, 3), (6, 12)):
        bench = pressed(
            blocks * layout.planes(4),
            max_ticks=max_ticks,
            layout=layout,
            hazard=exit_after({4: 2, 7: 1, 9: 3}),
            plans_in_flight=plans_in_flight,
        )
        for index in range(8):
            bench.add(f"r{index}", prompt=1 + index % 4, max_tokens=20 - index)
        bench.add("single", prompt=2, max_tokens=9, stop_token_ids=tuple(range(40, 60)))
        found.append(texts(bench.finish()))
        left = suspended(bench)
        assert len(set(left)) == len(left)
        assert (len(left) > 1) is (blocks == 6)
        check_idle(bench)
    assert all(each == found[0] for each in found)
