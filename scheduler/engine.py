"""Engine: every decision about requests, and not one wait.

for lane, plan in engine.plan(now):         # what each worker is to run next
    submission = executors[lane].submit(plan)
outputs = engine.apply(lane, result, now)   # what came of it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import (
    ConfigError,
    DuplicateRequestError,
    OverloadedError,
    WorkerLostError,
)
from protocol.exit_rule import FinishReason
from protocol.identity import RequestKey
from scheduler.admission import (
    check_params,
    check_profile,
    check_request_id,
    check_room,
    check_tenant,
    checked_prompt,
    could_hold,
)
from scheduler.applier import ResultApplier
from scheduler.choices import create_choices
from scheduler.lane import Lane
from scheduler.output import end_of
from scheduler.placement import LoadLedger, loop_debt, placement_policy, with_affinity
from scheduler.preemption import Preemption
from scheduler.pressure import left_out
from scheduler.queues import WaitingQueue
from scheduler.rng_registry import RngRegistry
from scheduler.states import Event, State
from scheduler.stats import EngineStats, Totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.config import SchedulerSettings
    from protocol.plan import ExecutionPlan
    from protocol.profile import ModelProfile, WorkerProfile
    from protocol.result import PlanResult
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput
    from scheduler.request import Request


class Engine:
    """Requests, lanes and what is in flight. Owner: one driver. Mutated only by: its thread.

    Time comes in as `now`, in seconds of any monotonic clock; seeds come in resolved.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._lanes: dict[str, Lane] = {}
        self._epochs: dict[str, int] = {}
        self._requests: dict[str, tuple[Request, ...]] = {}
        self._waiting = WaitingQueue(settings)
        self._rng = RngRegistry()
        self._ledger = LoadLedger()
        self._placement = placement_policy(settings.placement, self._ledger)
        self._preemption = Preemption()
        self._totals = Totals()
        self._generation = 0
        self._last_applied: float | None = None

    def __repr__(self) -> str:
        return (
            f"<Engine {len(self._lanes)} lanes, {len(self._waiting)} waiting, "
            f"{len(self._requests)} requests>"
        )

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the open lanes, in the order they were added."""
        return tuple(self._lanes)

    def add_lane(self, lane: str, epoch: int, profile: WorkerProfile) -> None:
        """Open a lane over one epoch of a worker.

        Raises ConfigError for a name in use, an epoch that is not newer than the name's last, a
        model or KV layout other than that of the open lanes.
        """
        if lane in self._lanes:
            raise ConfigError(f"lane {lane} is open already: close it first")
        if epoch <= self._epochs.get(lane, 0):
            raise ConfigError(f"lane {lane}: epoch {epoch} is not after {self._epochs[lane]}")
        check_profile(lane, profile, self._lanes.values())
        self._lanes[lane] = Lane(lane, epoch, profile, self._settings)
        self._epochs[lane] = epoch

    def close_lane(self, lane: str, reason: str) -> list[RequestOutput]:
        """Drop a lane whole, with all that its worker held; an unknown lane is none.

        Its requests end with ERROR, and so do waiting ones that no lane left could ever hold.
        """
        closed = self._lanes.pop(lane, None)
        if closed is None:
            return []
        message = f"{lane} was closed: {reason}"
        ended = []
        for request in (*closed.requests.values(), *closed.suspended.requests.values()):
            if request.state is State.SUSPENDED:
                self._waiting.remove(request)
            if request.is_live:
                request.end(Event.LOST, FinishReason.ERROR, message)
                ended.append(request)
            else:
                request.close(Event.LOST)
            self._forget(request)
        self._ledger.forget(lane)
        for request in self._waiting:
            if not self._could_run(request):
                self._waiting.remove(request)
                no_lane = f"{message}; no worker is left that could run this request"
                for choice in request.together:
                    choice.end(Event.LOST, FinishReason.ERROR, no_lane)
                    self._forget(choice)
                    ended.append(choice)
        return self._emit([end_of(request) for request in ended], closed.profile.model)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        tenant: str = "",
    ) -> RequestKey:
        """Queue a request; the key names this life of its id, in its choice 0.

        Its other choices have the generations that follow, and are placed with it.

        Prompts of one `tenant` share what they start with; of others nothing can be told.
        Raises RequestError for a request that is wrong in itself, CapacityError for one that no
        worker could hold, DuplicateRequestError while the id is in use, OverloadedError when the
        queue is full, WorkerLostError without a lane. A refused request leaves no trace.
        """
        check_request_id(request_id)
        model = self._model()
        if request_id in self._requests:
            raise DuplicateRequestError(
                f"request id {request_id!r} is in use: wait for its end or take another id"
            )
        tokens = checked_prompt(prompt, model)
        check_params(params, seed, model)
        check_tenant(tenant)
        check_room(len(tokens), params, model, self._lanes.values())
        if len(self._waiting) >= self._settings.max_waiting:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting, which is max_waiting: try again later"
            )
        key = RequestKey(request_id, self._generation + 1)
        policy = self._settings.exit_policy
        choices = create_choices(key, tokens, params, model, policy, tenant)
        self._generation += params.n
        self._rng.acquire(request_id, seed)
        self._requests[request_id] = choices
        self._waiting.add(choices[0])
        return key

    def abort(self, request_id: str) -> list[RequestOutput]:
        """Give all choices of a request up, wherever they stand; unknown or ended ones are none.

        What a worker holds comes back once the plan that carries its release is answered.
        """
        live = [choice for choice in self._requests.get(request_id, ()) if choice.is_live]
        for request in live:
            if request.state in (State.WAITING, State.SUSPENDED) and request.parent is None:
                self._waiting.remove(request)
            request.end(Event.ABORT, FinishReason.ABORT)
            if request.lane is None:
                self._forget(request)
            else:
                self._give_up(request, self._lanes[request.lane])
        return self._emit([end_of(request) for request in live], self._model()) if live else []

    def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> list[RequestOutput]:
        """End a choice with STOP after one of its outputs, and drop those sampled since.

        For an end that only the text tells. A choice that is unknown, has ended or has no such
        output is none. What its worker holds comes back as after an abort.
        """
        choices = self._requests.get(request_id, ())
        if not 0 <= choice < len(choices) or not choices[choice].is_live:
            return []
        request = choices[choice]
        if request.lane is None or not 0 <= at_output_index < len(request.tokens):
            return []
        if request.state is State.SUSPENDED:
            self._waiting.remove(request)
        request.truncate(at_output_index + 1)
        request.end(Event.FINISH, FinishReason.STOP)
        self._give_up(request, self._lanes[request.lane])
        return self._emit([end_of(request)], self._model())

    def plan(self, now: float) -> list[tuple[str, ExecutionPlan]]:
        """Place waiting requests, then the next plans of each lane, in the order of submission."""
        self._preemption.begin()
        if self._settings.preemption or any(lane.has_slot for lane in self._lanes.values()):
            self._waiting.place(self._try_place)
        plans = []
        for lane in self._lanes.values():
            yields = bool(self._waiting)
            while (plan := lane.next_plan(now, left_out(lane), yields=yields)) is not None:
                plans.append((lane.name, plan))
                if plan.suspends:
                    self._ledger.forget(lane.name)
        return plans

    def apply(self, lane: str, result: PlanResult, now: float) -> list[RequestOutput]:
        """Apply a result; any but that of a lane's first plan in flight is counted and dropped."""
        source = self._lanes.get(lane)
        plan = source.take_plan(result) if source is not None else None
        if source is None or plan is None:
            self._totals.stale_results += 1
            return []
        self._last_applied = now
        model = source.profile.model
        outputs = ResultApplier(source.requests, plan, model, self._totals).run(result)
        self._ledger.forget(lane)
        source.cache_prompts(plan, result, outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._give_up(source.requests[output.key], source)
        for request in source.take_suspended(plan):
            self._waiting.add(request)
            self._totals.pressure_preemptions += request.pressed
        for key in plan.releases:
            request = source.requests.get(key) or source.suspended.requests[key]
            source.release(request)
            self._forget(request)
        return self._emit(outputs, model)

    def has_work(self) -> bool:
        """Whether a request is live, a plan in flight or a release not yet acknowledged."""
        return bool(self._waiting) or any(lane.is_busy for lane in self._lanes.values())

    def queued_debt(self) -> int:
        """Loops that the waiting requests are expected to cost; suspended ones count nothing."""
        return sum(loop_debt(choice) for request in self._waiting for choice in request.together)

    def stats(self) -> EngineStats:
        """The engine and its lanes now, and all totals."""
        lanes = tuple(lane.stats(self._ledger.load(lane)) for lane in self._lanes.values())
        return EngineStats(
            waiting=sum(len(request.together) for request in self._waiting),
            running=sum(lane.running for lane in lanes),
            releasing=sum(lane.releasing for lane in lanes),
            free_blocks=sum(lane.kv.free_blocks for lane in lanes),
            total_blocks=sum(lane.kv.total_blocks for lane in lanes),
            rng_keys=len(self._rng),
            tokens=self._totals.tokens,
            loops=self._totals.loops,
            loops_saved=self._totals.loops_saved,
            finished=dict(self._totals.finished),
            stale_results=self._totals.stale_results,
            stale_rows=self._totals.stale_rows,
            discarded_rows=self._totals.discarded_rows,
            last_applied=self._last_applied,
            lanes=lanes,
            prefix_queries=self._totals.prefix_queries,
            prefix_hit_tokens=self._totals.prefix_hit_tokens,
            cached_blocks=sum(lane.kv.cached_blocks for lane in lanes),
            evicted_blocks=sum(lane.kv.evicted_blocks for lane in lanes),
            preemptions=self._totals.preemptions,
            resumptions=self._totals.resumptions,
            suspended=sum(lane.num_suspended for lane in self._lanes.values()),
            pressure_preemptions=self._totals.pressure_preemptions,
        )

    def _model(self) -> ModelProfile:
        for lane in self._lanes.values():
            return lane.profile.model
        raise WorkerLostError("no worker is available: start one, or wait for one to come back")

    def _try_place(self, request: Request) -> bool:
        """Give a waiting request to a lane, if one has room for it now."""
        suspended = request.state is State.SUSPENDED
        # A snapshot lies on the lane that took it, and nowhere else.
        home = (lane for lane in self._lanes.values() if not suspended or lane.name == request.lane)
        open_lanes = self._preemption.open_to(home)
        costs = ((lane, lane.room_for(request)) for lane in open_lanes)
        rooms = [(lane, cost) for lane, cost in costs if cost is not None]
        if not rooms:
            if self._settings.preemption:
                self._make_room(request, open_lanes)
            return False
        self._preemption.drop(request.key)
        if suspended:
            lane = rooms[0][0]
            lane.resume(request)
            self._totals.resumptions += 1
        else:
            window = self._settings.affinity_window
            lane = self._placement.choose(with_affinity(rooms, self._ledger, window))
            request_id = request.key.request_id
            lane.admit(request, *(self._rng.key(request_id, c.choice) for c in request.together))
            self._totals.prefix_queries += lane.caches_prompts
            self._totals.prefix_hit_tokens += request.prefilled
        self._ledger.place(request, lane.name)
        return True

    def _make_room(self, request: Request, lanes: list[Lane]) -> None:
        lane = self._preemption.make_room(request, lanes)
        if lane is not None:
            self._ledger.forget(lane.name)

    def _could_run(self, request: Request) -> bool:
        needed = request.capacity_tokens, len(request.prompt), len(request.together)
        return any(could_hold(lane, *needed) for lane in self._lanes.values())

    def _give_up(self, request: Request, lane: Lane) -> None:
        """A placed request has no use any more: release it now if its worker never heard of it."""
        self._ledger.forget(lane.name)
        lane.kv.forgo(request.key)
        if lane.holds_unsent(request):
            lane.release(request)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """A request holds nothing any more; its id is free once that is so of all its choices."""
        self._preemption.drop(request.key)
        request_id = request.key.request_id
        if all(choice.state is State.FINISHED for choice in self._requests[request_id]):
            del self._requests[request_id]
            self._rng.drop(request_id)

    def _emit(self, outputs: list[RequestOutput], model: ModelProfile) -> list[RequestOutput]:
        self._totals.count(outputs, model.max_loops)
        return outputs
