"""Frames around plans: what else travels on a worker's ordered stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from protocol.plan import ExecutionPlan
from protocol.result import PlanResult

if TYPE_CHECKING:
    from protocol.profile import WorkerProfile


@dataclass(frozen=True, slots=True)
class Open:
    """First frame of a stream, to the worker: starts an epoch and drops the state of the last."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The worker's answer to Open: the epoch stands, and this is what there is to plan with."""

    epoch: int
    profile: WorkerProfile


@dataclass(frozen=True, slots=True)
class Synchronize:
    """To the worker: answer once every frame up to plan `seq` has been run."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Synchronized:
    """The worker's answer to Synchronize."""

    epoch: int
    seq: int


class Phase(Enum):
    """What a worker's device thread is doing."""

    IDLE = "idle"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Beat:
    """The worker is alive: its last finished seq and a count of finished steps."""

    epoch: int
    seq: int
    steps_done: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Fault:
    """The worker ends the epoch: a device error, or a frame that broke the contract."""

    epoch: int
    message: str


ToWorker: TypeAlias = Open | ExecutionPlan | Synchronize
FromWorker: TypeAlias = Opened | PlanResult | Synchronized | Beat | Fault
Frame: TypeAlias = ToWorker | FromWorker
