"""Shared blocks are never written to again, in either layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.layout import Layout
from protocol.plan import CodaBatch, PrefillBatch, RecurrentBatch
from tests.scheduler.bench import Bench, make_profile, texts

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import BlockTable, ExecutionPlan

LONG = tuple(range(1, 18))
"""17 tokens: 4 complete blocks of 4, and the last token."""


def written_blocks(plan: ExecutionPlan, tables: dict[RequestKey, BlockTable]) -> list[int]:
    """Every block that a plan's rows write to, each as often as a request writes to it."""
    blocks: set[tuple[RequestKey, int]] = set()
    for step in plan.steps:
        match step:
            case PrefillBatch(keys, starts, counts):
                for key, start, count in zip(keys, starts, counts, strict=True):
                    pages = {position // 4 for position in range(start, start + count)}
                    blocks |= {(key, plane[page]) for plane in tables[key] for page in pages}
            case RecurrentBatch(keys, positions, depths):
                for key, position, depth in zip(keys, positions, depths, strict=True):
                    plane = tables[key][min(depth, len(tables[key]) - 1)]
                    blocks.add((key, plane[position // 4]))
            case CodaBatch(keys, positions, exits, _):
                for key, position, exit_depth in zip(keys, positions, exits, strict=True):
                    planes = tables[key][exit_depth:]
                    blocks |= {(key, plane[position // 4]) for plane in planes}
    return [block for _, block in blocks]


@pytest.mark.parametrize("layout", Layout)
def test_requests_that_share_a_prefix_run_at_once_and_nobody_writes_to_it(layout: Layout) -> None:
    bench = Bench(make_profile(layout=layout), hazard=None, token=None, chunk=3, prefill=7)
    bench.send("first", LONG, max_tokens=6)
    tables: dict[RequestKey, BlockTable] = {}
    shared_at_most = 0
    for step in range(60):
        if step == 6:
            for index in range(3):
                bench.send(f"r{index}", (*LONG[: 12 + index], 60 + index), max_tokens=6)
        for lane, plan in bench.plan():
            tables.update((item.key, item.tables) for item in plan.admits)
            blocks = [block for table in tables.values() for plane in table for block in plane]
            shared = {block for block in blocks if blocks.count(block) > 1}
            shared_at_most = max(shared_at_most, len(shared))
            written = written_blocks(plan, tables)
            assert len(set(written)) == len(written), "a block with two writers"
            assert shared.isdisjoint(written)
            bench.apply(lane, bench.run(lane, plan))
            for key in plan.releases:
                del tables[key]
    assert not bench.engine.has_work()
    assert shared_at_most == layout.planes(4) * 3
    admitted = {i.key.request_id: i.prefilled for plan in bench.plans for i in plan.admits}
    assert admitted == {"first": 0, "r0": 12, "r1": 12, "r2": 12}
    cold = Bench(hazard=None, token=None, caching=False)
    cold.send("first", LONG, max_tokens=6)
    for index in range(3):
        cold.send(f"r{index}", (*LONG[: 12 + index], 60 + index), max_tokens=6)
    assert texts(bench.outputs) == texts(cold.finish())


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_no_block_is_published_that_a_decoding_row_still_writes_to(
    layout: Layout, length: int, chunk: int
) -> None:
    bench = Bench(make_profile(layout=layout), hazard=None, chunk=chunk)
    prompt = tuple(range(30, 30 + length))
    key = bench.send("writer", prompt, max_tokens=10)
    planes = layout.planes(4)
    table: BlockTable = ()
    cached = 0
    while bench.engine.has_work():
        for lane, plan in bench.plan():
            table = plan.admits[0].tables if plan.admits else table
            # A chain grows from its first block, and nobody else publishes any.
            published = {block for plane in table for block in plane[: cached // planes]}
            assert published.isdisjoint(written_blocks(plan, {key: table}))
            bench.apply(lane, bench.run(lane, plan))
            assert bench.engine.stats().cached_blocks >= cached
            cached = bench.engine.stats().cached_blocks
    assert cached == planes * ((length - 1) // 4)
    bench.send("reader", (*prompt, *texts(bench.outputs)["writer"][0]), max_tokens=1)
    ((_, plan),) = bench.plan()
    hit = plan.admits[0].prefilled // 4
    assert hit == (length - 1) // 4
    assert [own[:hit] for own in table] == [plane[:hit] for plane in plan.admits[0].tables]
