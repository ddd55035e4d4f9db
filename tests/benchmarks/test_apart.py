"""Baselines in a process of their own: what they give, and that none is left behind."""

from __future__ import annotations

import os
import threading
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import psutil
import pytest

from benchmarks import apart
from benchmarks.apart import Apart
from benchmarks.workload import Ask

if TYPE_CHECKING:
    from collections.abc import Sequence


class Told:
    """Says in which process it runs."""

    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        return [[os.getpid(), size] for _ in asks]


class Endless:
    """Never answers."""

    def run(self, asks: Sequence[Ask], size: int) -> list[list[int]]:
        threading.Event().wait()
        return []


class Impossible(Told):
    """Cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no such model")


def test_a_baseline_runs_elsewhere_and_is_gone_afterwards() -> None:
    with Apart(Told) as baseline:
        ((pid, size), _) = baseline.run([Ask((1,), 1)] * 2, 3)
    assert pid != os.getpid()
    assert size == 3
    assert not psutil.pid_exists(pid)


def test_one_that_does_not_answer_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, baseline = psutil.Process(), Apart(Endless)
    before = len(mine.children())
    monkeypatch.setattr(apart, "TIMEOUT", 0.0)
    with pytest.raises(TimeoutError), baseline:
        baseline.run([], 1)
    assert len(mine.children()) == before - 1


def test_one_that_cannot_be_made_says_so() -> None:
    with pytest.raises(BrokenProcessPool):
        Apart(Impossible)
