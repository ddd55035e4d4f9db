"""Lane: the scheduler's side of one worker."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.exit_rule import FinishReason
from protocol.plan import ExecutionPlan, PrefillBatch
from protocol.plan_size import PLAN_LIMIT
from protocol.result import PrefillResult
from scheduler.choices import UnsentForks
from scheduler.commitments import Commitments
from scheduler.flight import PlansInFlight
from scheduler.growth import grants_for
from scheduler.kv_manager import KVManager
from scheduler.opening import admission_of
from scheduler.pace import TickPace
from scheduler.plan_room import PlanRoom
from scheduler.planner import StepLimits, plan_steps
from scheduler.queues import order_of
from scheduler.resident import resident_terms
from scheduler.states import Event, State
from scheduler.stats import LaneStats
from scheduler.suspended import SuspendedRequests

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from protocol.config import SchedulerSettings
    from protocol.identity import RequestKey
    from protocol.plan import Admission, Resume
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult
    from protocol.rng import RngKey
    from scheduler.kv_cost import KVCost
    from scheduler.output import RequestOutput
    from scheduler.request import Request


class Lane:
    """One epoch of one worker. Owner: Engine. Mutated only by: Engine.

    `requests` are those that hold a slot and blocks here, in the order of their placement, also
    the ended ones until the plan that carried their release is answered. `suspended` ones
    hold neither. Up to `plans_in_flight` plans are sent before the first of them is answered, as
    long as no token has to wait for its signal; answers come in the order of the plans.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        profile: WorkerProfile,
        settings: SchedulerSettings,
        plan_limit: int = PLAN_LIMIT,
    ) -> None:
        """Raises ConfigError for a worker that is too large for plans of `plan_limit` bytes."""
        self.name = name
        self.epoch = epoch
        self.profile = profile
        self.kv = KVManager(profile)
        self.requests: dict[RequestKey, Request] = {}
        self.caches_prompts = settings.prefix_caching
        self.suspended = SuspendedRequests(profile.snapshots)
        self.commitments = Commitments(self.kv, self.suspended, settings)
        self.order = order_of(settings)
        self._settings = settings
        self.limits = StepLimits.of(settings, profile)
        # A decode step has a row for every slot, so slots beyond the largest step are not used.
        slots = settings.max_running or profile.num_slots
        self.num_slots = min(profile.num_slots, self.limits.max_tokens, slots)
        self._room = PlanRoom.of(profile, self.limits, self.num_slots, plan_limit)
        self._grows = settings.reservation != "full"
        self._watermark = int(settings.kv_watermark * profile.num_blocks)
        self._admissions: dict[RequestKey, Admission] = {}
        self._forks = UnsentForks(self.kv, grows=self._grows)
        self._in_flight = PlansInFlight()
        self._pace = TickPace.of(settings, profile)
        self._seq = 0

    def __repr__(self) -> str:
        requests = f"{len(self.requests)} requests"
        return f"<Lane {self.name} epoch {self.epoch}: {requests}, {self._in_flight!r}>"

    @property
    def is_busy(self) -> bool:
        """Whether a plan is in flight or the worker still holds a request."""
        return bool(self._in_flight or self.requests or self.suspended.requests)

    @property
    def takes_plan(self) -> bool:
        """Whether a plan can be made now.

        None is made beside a token whose signal is on its way: it would miss that batch. One more
        than usual is made for what cannot wait until all ticks in flight have run.
        """
        if not self._in_flight:
            return True
        limit = self.limits.plans_in_flight
        if len(self._in_flight) == limit and self.limits.max_ticks and self._has_news():
            limit = min(limit + 1, MAX_PLANS_IN_FLIGHT)
        if len(self._in_flight) >= limit:
            return False
        return not any(request.awaits_signal for request in self.requests.values())

    def _has_news(self) -> bool:
        """Whether ticks are in flight that should end early for an arrival or an end."""
        if not self._in_flight.are_ticking:
            return False
        ended = (key for key, r in self.requests.items() if r.state is State.RELEASING)
        return bool(self._admissions) or any(not self._in_flight.releases(key) for key in ended)

    @property
    def num_suspended(self) -> int:
        """Suspended requests that may still go on."""
        return sum(request.is_live for request in self.suspended.requests.values())

    def blocks_needed(self, num_tokens: int, num_prompt: int = 0, choices: int = 1) -> int:
        """Blocks, over all planes, of a request of `num_tokens` tokens, with all its choices."""
        others = (choices - 1) * self.kv.own_blocks(num_tokens, num_prompt)
        return self.kv.cost(num_tokens).blocks + others

    @property
    def has_slot(self) -> bool:
        """Whether one more request could be on the lane, had it the blocks."""
        return len(self.requests) < self.num_slots

    def cost(self, request: Request, *, loose: bool) -> KVCost:
        """What the request would be sure to get here, and how much of its prompt is cached.

        That is its prompt's blocks alone if it is loose. A suspended one has its prompt's KV in its
        snapshot, and shares no block. Choices that wait for its prompt are part of the cost.
        """
        cached = self.caches_prompts and request.state is not State.SUSPENDED
        profile = self.profile
        digests = request.digests.of(profile.block_size, profile.layout) if cached else ()
        tokens = len(request.prompt) if loose else request.capacity_tokens
        own = self.kv.own_blocks(request.capacity_tokens, len(request.prompt))
        return self.kv.cost(tokens, digests, len(request.unforked) * own)

    def room_for(self, request: Request) -> KVCost | None:
        """Its cost, if its slots, and the blocks beside the watermark, are free now.

        An idle lane has no watermark, so that its largest request can start at all. Blocks that
        those on the lane are about to need count as taken.
        """
        return self.room_without(request, ())

    def room_without(self, request: Request, leaving: Collection[Request]) -> KVCost | None:
        """The same, were those of its requests gone; what it would cost then is no more."""
        staying = len(self.requests) - len(leaving)
        if staying + len(request.together) > self.num_slots:
            return None
        keys = [gone.key for gone in leaving]
        loose = self.commitments.takes_loosely(request, leaving)
        if not loose and not self.commitments.allow_firm(request, leaving):
            return None
        cost = self.cost(request, loose=loose)
        fits = self.kv.fits(cost, self._watermark if staying else 0, keys)
        if fits and self.commitments.loose:
            fits = self.kv.fits(cost, self.commitments.wanted(leaving), keys)
        return cost if fits else None

    def admit(self, request: Request, rng: RngKey, *others: RngKey) -> None:
        """Reserve a slot and all blocks; the plan of its first chunk carries the admission.

        The choices that wait for its prompt are placed with it; they draw from `others`.

        Its prefill starts where its cached prefix ends. Under incremental reservation the blocks
        beyond the first chunk are only promised, and of a loose request those beyond its prompt not
        even that. Raises OverloadedError, and changes nothing, when the blocks are not free.
        """
        loose = self.commitments.takes_loosely(request)
        cost = self.cost(request, loose=loose)
        prefilled = cost.cached * self.profile.block_size
        first = request.capacity_tokens
        if self._grows:
            first = min(len(request.prompt), prefilled + self.limits.chunk_size)
        tables = self.kv.commit(request.key, cost, self.kv.cost(first))
        terms = resident_terms(request, self.profile, self._settings)
        request.place(self.name, prefilled, terms)
        self.requests[request.key] = request
        eos_ids = self.profile.model.eos_ids
        self._admissions[request.key] = admission_of(request, tables, rng, eos_ids, terms)
        for choice, stream in zip(request.unforked, others, strict=True):
            self._forks.hold(choice, stream, request)
            choice.place(self.name, resident=terms)
            self.requests[choice.key] = choice
        for choice in request.together:
            self.commitments.add(choice, loose=loose)

    def can_suspend(self, request: Request) -> bool:
        """Whether the worker holds a live request that it could keep a snapshot of.

        One whose last output is on its way leaves by itself, and one from which others fork stays.
        """
        return (
            request.state in (State.PREFILL, State.DECODING)
            and not request.unforked
            and request.output_index < request.params.max_tokens
            and not self.holds_unsent(request)
            and not self.suspended.is_waking(request.key)
            and self.suspended.takes(request) <= self.suspended.free_bytes
        )

    def suspend(self, request: Request, *, pressed: bool = False) -> None:
        """Have the next plan suspend a request; slot and blocks come back with its answer.

        `pressed` says that it is for want of blocks, and not for another's priority.
        """
        request.suspend(pressed=pressed)
        self.suspended.reserve(request)
        self.commitments.drop(request.key)
        self.kv.forgo(request.key)

    def resume(self, request: Request) -> None:
        """Give a suspended request a slot and all blocks; the plan of its next row resumes it.

        Raises OverloadedError, and changes nothing, when the blocks are not free.
        """
        first = request.capacity_tokens
        if self._grows:
            first = request.written if request.stage is None else request.position + 1
        cost = self.cost(request, loose=False)
        tables = self.kv.commit(request.key, cost, self.kv.cost(first))
        request.resume()
        self.requests[request.key] = request
        self.commitments.add(request, loose=False)
        self.suspended.wake(request.key, tables)

    def take_suspended(self, plan: ExecutionPlan) -> list[Request]:
        """Slots and blocks of those that an answered plan suspended come back; who they are."""
        requests = [self.requests[key] for key in plan.suspends]
        suspended = [request for request in requests if request.state is State.SUSPENDED]
        for request in suspended:
            del self.requests[request.key]
            self.kv.release(request.key)
            self.suspended.keep(request)
        return suspended

    def holds_unsent(self, request: Request) -> bool:
        """Whether the worker has never heard of the request."""
        return request.key in self._admissions or request.key in self._forks

    def release(self, request: Request) -> None:
        """Take back whatever an ended request has, slot and blocks or a snapshot."""
        request.close(Event.RELEASED)
        self._admissions.pop(request.key, None)
        self._forks.forget(request.key)
        self.suspended.forget(request.key)
        self.commitments.drop(request.key)
        if self.requests.pop(request.key, None) is not None:
            self.kv.release(request.key)

    def next_plan(
        self, now: float, idle: Collection[Request] = (), *, yields: bool = False
    ) -> ExecutionPlan | None:
        """What the worker is to run next; None while it has enough, or there is nothing.

        Those that are `idle` have no row. With `yields`, somebody waits for room, and ticks end
        when a request does.
        """
        if not self.takes_plan:
            return None
        requests = list(self.requests.values())
        releases = [r.key for r in requests if r.state is State.RELEASING]
        suspends: list[RequestKey] = []
        if self.suspended:
            asleep = self.suspended.requests.values()
            releases += [r.key for r in asleep if r.state is State.RELEASING]
            suspends = [r.key for r in requests if r.state is State.SUSPENDING]
            requests = [r for r in requests if r.state is not State.SUSPENDING and r not in idle]
        if self._in_flight:
            releases = [key for key in releases if not self._in_flight.releases(key)]
            suspends = [key for key in suspends if not self._in_flight.suspends(key)]
        releases = releases[: self.num_slots]  # which is what a frame surely has room for
        forks = self._forks.send(requests, self._room.bytes)
        if self._admissions or self.suspended:
            requests = self._room.select(requests, self._opening, forks)
        steps = plan_steps(requests, self.limits, self._pace, yields=yields)
        if not (releases or suspends or steps):
            return None
        # Sent with its first chunk, an admission adds little more to a plan than what is run of it.
        admits: tuple[Admission, ...] = ()
        if self._admissions:
            named = dict.fromkeys(key for step in steps for key in step.keys)
            admits = tuple(self._admissions.pop(key) for key in named if key in self._admissions)
        grants = grants_for(steps, self.requests, self.kv, self.commitments)
        self._seq += 1
        plan = ExecutionPlan(
            epoch=self.epoch,
            seq=self._seq,
            releases=tuple(releases),
            admits=admits,
            grants=tuple(grants) if self._grows else (),
            steps=steps,
            suspends=tuple(suspends),
            resumes=self.suspended.send(key for step in steps for key in step.keys),
            forks=forks,
        )
        self._in_flight.add(plan, now)
        return plan

    def _opening(self, request: Request) -> Admission | Resume | None:
        """What its first row is to be sent with."""
        return self._admissions.get(request.key) or self.suspended.resume_of(request.key)

    def take_plan(self, result: PlanResult) -> ExecutionPlan | None:
        """The plan that `result` answers, no longer in flight; None unless it is the first one."""
        plan = self._in_flight.take(result)
        if plan is not None:
            self._pace.note(plan, result)
        return plan

    def cache_prompts(
        self, plan: ExecutionPlan, result: PlanResult, outputs: Iterable[RequestOutput]
    ) -> None:
        """Publish the prompt blocks that a plan has filled, once its result is applied.

        `outputs` came of the result: what a request that failed had cached is forgotten. A chunk
        that has run counts also if its request has ended since.
        """
        failed = {o.key for o in outputs if o.finish_reason is FinishReason.ERROR}
        for key in failed:
            self.kv.distrust(key)
        for step, answer in zip(plan.steps, result.steps, strict=False):
            if isinstance(step, PrefillBatch) and isinstance(answer, PrefillResult):
                answered = set(zip(answer.keys, answer.ends, strict=True))
                for row in zip(step.keys, map(add, step.starts, step.counts), strict=True):
                    if row in answered and row[0] not in failed:
                        self.kv.publish(*row)

    def stats(self, load: int) -> LaneStats:
        """The lane now; `load` is what the ledger says of it."""
        running = sum(request.is_live for request in self.requests.values())
        held = len(self.requests) + len(self.suspended.requests)
        return LaneStats(
            name=self.name,
            epoch=self.epoch,
            running=running,
            releasing=held - running - self.num_suspended,
            free_slots=self.num_slots - len(self.requests),
            kv=self.kv.stats(),
            load=load,
            plans=self._seq,
            in_flight_since=self._in_flight.since,
            in_flight=len(self._in_flight),
        )
