"""Placement policies compared at several loads: many workers, many requests, a virtual clock."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby, product
from statistics import median
from typing import TYPE_CHECKING, get_args

from benchmarks.report import Figure, progress
from benchmarks.simulation import SHORT_CONTEXT, Case, Outcome, Simulation, StepCost
from protocol.config import PlacementName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LOADS = (0.5, 0.7, 0.85, 0.95)
LONG_CONTEXT_LOADS = (0.7,)
SEEDS = (1, 2, 3)


def compare_placements(
    requests: int,
    workers: int,
    *,
    loads: Sequence[float] = LOADS,
    seeds: Sequence[int] = SEEDS,
    cost: StepCost = SHORT_CONTEXT,
    processes: int = 1,
) -> list[Figure]:
    """When all is done, and what a request takes, by load and policy: medians over the seeds."""
    progress(f"{requests} requests on {workers} workers, virtual clock, {cost.name}")
    placements: tuple[PlacementName, ...] = get_args(PlacementName)
    cases = [
        Case(placement, load, seed, requests, workers, cost)
        for load, placement, seed in product(loads, placements, seeds)
    ]
    figures = []
    pairs = zip(cases, _outcomes(cases, processes), strict=True)
    for (load, placement), group in groupby(pairs, key=lambda pair: _cell(pair[0])):
        runs = [outcome for _, outcome in group]
        named = f"{cost.name}, load {load:g}, {placement}"
        figures += [
            Figure(f"{named}: all done", median(run.makespan for run in runs), "ms (virtual)"),
            Figure(f"{named}: mean request", median(run.mean for run in runs), "ms (virtual)"),
            Figure(f"{named}: p99 request", median(run.p99 for run in runs), "ms (virtual)"),
        ]
        progress(f"  {named}")
    return figures


def _cell(case: Case) -> tuple[float, PlacementName]:
    return case.load, case.placement


def _outcomes(cases: Iterable[Case], processes: int) -> Iterator[Outcome]:
    """The outcome of each case, in order, as soon as it is there."""
    if processes == 1:
        yield from map(simulate, cases)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        yield from pool.map(simulate, cases)


def simulate(case: Case) -> Outcome:
    """One case from its start to its end."""
    return Simulation(case).run()
