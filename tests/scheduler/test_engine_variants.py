"""The random walk over engines with other settings and other workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from hypothesis import settings

from tests.scheduler.test_engine_stateful import PROFILES, EngineMachine

if TYPE_CHECKING:
    from protocol.profile import WorkerProfile


class GrowingMachine(EngineMachine):
    """The same with blocks that come one by one, and other rules of admission."""

    scheduler: ClassVar[dict[str, object]] = {
        "reservation": "incremental",
        "policy": "priority",
        "kv_watermark": 0.2,
        "max_admission_bypasses": 2,
    }


class CohortMachine(EngineMachine):
    """The same in cohorts, with a tight budget."""

    scheduler: ClassVar[dict[str, object]] = {"mode": "no_refill", "max_step_tokens": 3}


class PatientMachine(EngineMachine):
    """The same with tokens that wait for each other."""

    scheduler: ClassVar[dict[str, object]] = {
        "min_coda_batch": 2,
        "reservation": "incremental",
        "exit_policy": "ouro_delayed",
    }


class DeepMachine(EngineMachine):
    """The same with as many plans in flight as anybody's tokens allow, in cohorts."""

    scheduler: ClassVar[dict[str, object]] = {"plans_in_flight": 4, "mode": "no_refill"}


TICKING = {
    lane: replace(profile, max_ticks=ticks)
    for (lane, profile), ticks in zip(PROFILES.items(), (4, 9), strict=True)
}


class ResidentMachine(EngineMachine):
    """The same with workers that decide exits and ends, beside requests that they cannot."""

    profiles: ClassVar[dict[str, WorkerProfile]] = TICKING
    scheduler: ClassVar[dict[str, object]] = {"max_ticks": 6}


class ResidentPipelinedMachine(EngineMachine):
    """The same with two plans in flight and blocks that come one by one."""

    profiles: ClassVar[dict[str, WorkerProfile]] = TICKING
    scheduler: ClassVar[dict[str, object]] = {
        "plans_in_flight": 2,
        "reservation": "incremental",
        "kv_watermark": 0.2,
    }


TestGrowing = GrowingMachine.TestCase
TestGrowing.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestCohort = CohortMachine.TestCase
TestCohort.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestPatient = PatientMachine.TestCase
TestPatient.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestDeep = DeepMachine.TestCase
TestDeep.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestResident = ResidentMachine.TestCase
TestResident.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestResidentPipelined = ResidentPipelinedMachine.TestCase
TestResidentPipelined.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
