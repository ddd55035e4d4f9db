"""Request: how far one life of a public request has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from protocol.stage import Stage
from scheduler.exit_policy import LEAVES, STAYS, exit_policy
from scheduler.prefix_cache import PromptDigests
from scheduler.states import Event, State, next_state

if TYPE_CHECKING:
    from protocol.config import ExitPolicyName
    from protocol.exit_rule import FinishReason
    from protocol.identity import RequestKey
    from protocol.profile import ModelProfile
    from protocol.resident import ResidentTerms
    from protocol.result import TokenLogprobs
    from protocol.sampling import SamplingParams
    from scheduler.exit_policy import ExitPolicy


# Looked up once: every row of every result asks.
_RECURRENT, _CODA = Stage.RECURRENT, Stage.CODA
_LIVE = (State.DECODING, State.PREFILL, State.WAITING, State.SUSPENDED, State.SUSPENDING)


@dataclass(slots=True, eq=False)
class Request:
    """Progress of one request. Owner: Engine. Mutated only by: its own methods, on one thread.

    Progress is that of the plans that were made: it moves when a row is planned (`prefill_to`,
    `sample`, `embed`, `loop`), and what comes back fills in what only the device knew: `hear` the
    signal of a loop, `append` a token. `stage` is what a next plan may run while DECODING; None
    while that hangs on a signal that has not come back, or after the last output.

    With P prompt tokens, output i is sampled from the token at position P + i - 1 and sits itself
    at position P + i; the last output is never run, so it needs no KV. `full_depth` is the loops
    of a full pass, which the prompt always takes; `max_loops` bounds the outputs after the first.
    `loops_done` counts the loops of the token at `position`, `heard` the signals of them that came
    back; `fired` says that one of these let it leave. `sampling` counts the outputs that are
    planned and not delivered, at most one. A `resident` request decodes on its worker, in plans of
    many ticks; `ticks_in_flight` are those of plans that are not answered, `least_loops` the fewest
    loops that an output after the first can take. `bypasses` counts the requests that were placed
    past this one while it waited; `later_loops` sums the exit depths of all outputs but the first.
    Where depths are forced, `forced_loops[i]` sums those of output i and all that follow it.
    `pressed` says that its last suspend was for want of blocks.

    `choice` is its index among the choices of one public request. Choice 0 runs the prompt of all:
    until their forks are planned it has the others in `unforked`, and is their `parent`. They wait,
    are placed and fall together.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    params: SamplingParams
    full_depth: int
    max_loops: int
    exit_policy: ExitPolicy
    stop_ids: frozenset[int]
    digests: PromptDigests
    state: State = State.WAITING
    stage: Stage | None = None
    lane: str | None = None
    prefilled: int = 0
    loops_done: int = 0
    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    worker_lost: bool = False
    bypasses: int = 0
    heard: int = 0
    fired: bool = False
    sampling: int = 0
    later_loops: int = 0
    resident: bool = False
    least_loops: int = 1
    ticks_in_flight: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    forced_loops: tuple[int, ...] | None = None
    pressed: bool = False
    choice: int = 0
    parent: Request | None = None
    unforked: tuple[Request, ...] = ()

    @classmethod
    def create(
        cls,
        key: RequestKey,
        prompt: tuple[int, ...],
        params: SamplingParams,
        model: ModelProfile,
        policy: ExitPolicyName = "ouro",
        tenant: str = "",
    ) -> Request:
        """A waiting request, with the model's defaults filled in where `params` leaves them.

        `tenant` is whose prompts it may share KV with.
        """
        depths = params.forced_depths
        return cls(
            key=key,
            prompt=prompt,
            params=params,
            full_depth=model.max_loops,
            max_loops=model.max_loops if params.max_loops is None else params.max_loops,
            exit_policy=exit_policy(params, model, policy),
            stop_ids=frozenset(params.stop_token_ids),
            digests=PromptDigests(prompt, model.fingerprint, tenant),
            forced_loops=None if depths is None else _sums_from(depths[: params.max_tokens]),
        )

    def __repr__(self) -> str:
        stage = f" {self.stage.name}" if self.stage else ""
        return (
            f"<Request {self.key} {self.state.name}{stage} prefilled={self.prefilled}/"
            f"{len(self.prompt)} tokens={len(self.tokens)}/{self.params.max_tokens} "
            f"loops={self.loops_done}>"
        )

    @property
    def is_live(self) -> bool:
        """Whether more outputs may come of it."""
        return self.state in _LIVE

    @property
    def together(self) -> tuple[Request, ...]:
        """It and the choices that share its fate until they are forked from it."""
        return (self, *self.unforked)

    @property
    def can_fork(self) -> bool:
        """Whether the next plan can fork its other choices."""
        return bool(self.unforked) and self.stage in (_CODA, Stage.RESIDENT)

    @property
    def position(self) -> int:
        """The token that is in work; before the first output, the last of the prompt."""
        return len(self.prompt) + self.output_index - 1

    @property
    def output_index(self) -> int:
        """The output that the token in work will give."""
        return len(self.tokens) + self.sampling

    @property
    def awaits_signal(self) -> bool:
        """Whether the token in work goes nowhere until the signal of one of its loops is heard."""
        return self.stage is None and self.loops_done > 0 and self.state is State.DECODING

    @property
    def in_prompt(self) -> bool:
        """Whether some of its prompt is not planned yet."""
        return self.prefilled < len(self.prompt)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that need KV.

        Example: 5 prompt tokens and max_tokens 3 -> 7, since the last output is never run.
        """
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def is_last_output(self) -> bool:
        """Whether the next output is the last that is allowed."""
        return self.output_index + 1 >= self.params.max_tokens

    @property
    def ends_in_flight(self) -> bool:
        """Whether the ticks in flight reach its last output, unless they are cut short."""
        left = self.params.max_tokens - len(self.tokens)
        # The first output takes no loop on top of the prompt's.
        loops = self.full_depth * left - (self.loops_done if self.tokens else self.full_depth)
        return 0 < self.ticks_in_flight >= loops

    def pass_over(self) -> None:
        """A request behind this one was placed before it."""
        self.bypasses += 1

    def place(self, lane: str, prefilled: int = 0, resident: ResidentTerms | None = None) -> None:
        """A lane has taken the request, and has the KV of its first `prefilled` tokens.

        With `resident`, its worker decides its exits and its end.
        """
        self._to(Event.PLACE)
        self.lane = lane
        self.prefilled = prefilled
        if resident is not None:
            self.resident = True
            self.least_loops = resident.min_loops

    @property
    def written(self) -> int:
        """Tokens [0, written) have KV on the worker once it has run what is planned.

        At most so many, while resident ticks are in flight.
        """
        if self.in_prompt:
            return self.prefilled
        if self.ticks_in_flight:
            return self.reach
        return self.position + (self.loops_done > 0)

    @property
    def reach(self) -> int:
        """Tokens that may have KV, or need room for it, once the ticks in flight have run.

        Example: 5 prompt tokens, 2 outputs, at least 2 loops an output, 1 loop done, 8 ticks
        in flight -> 4 more outputs at most, so 5 + 2 + 4 tokens.
        """
        started = self.loops_done if self.tokens else 0
        more = (started + self.ticks_in_flight) // self.least_loops + (not self.tokens)
        return min(self.capacity_tokens, len(self.prompt) + len(self.tokens) + more)

    def suspend(self, *, pressed: bool) -> None:
        """It has to leave its lane's slot and blocks; no further row of it is planned."""
        self._to(Event.SUSPEND)
        self.pressed = pressed

    def keep(self) -> None:
        """Its worker holds a snapshot of it: it waits to go on, as if nobody had passed it."""
        self._to(Event.SNAPSHOT)
        self.bypasses = 0

    def resume(self) -> None:
        """Its lane takes it back, exactly where it stood."""
        self._to(Event.PLACE if self.in_prompt else Event.RESUME)

    def prefill_to(self, end: int) -> None:
        """Prompt tokens [0, end) go through every depth; the last one then waits for its CODA."""
        if end == len(self.prompt):
            self._to(Event.PROMPT)
            self.stage = Stage.RESIDENT if self.resident else _CODA
            self.loops_done = self.full_depth
        self.prefilled = end

    def fork(self, count: int) -> None:
        """The first of its other choices start here: its prompt is planned, and no output of it."""
        for other in self.unforked[:count]:
            other.parent = None
            other.prefill_to(len(self.prompt))
        self.unforked = self.unforked[count:]

    def sample(self) -> None:
        """The token in work gives its output; unless that is the last one, `embed` follows."""
        self.sampling += 1
        self.loops_done = 0
        self.stage = None

    def embed(self) -> None:
        """The output that was sampled last is the token in work and starts at depth 0."""
        self.heard = 0
        self.fired = False
        self.stage = _RECURRENT

    def loop(self) -> None:
        """One more loop of the token in work."""
        self.loops_done += 1
        self._settle(self.exit_policy.awaits(self.output_index, self.loops_done))

    def hear(self, position: int, loops: int, survival: float) -> None:
        """The signal of a loop; one of a token that has left already says nothing."""
        if position != self.position:
            return
        self.heard = loops
        self.fired = self.fired or self.exit_policy.fires(loops, survival)
        if self.stage is None:
            self._settle(self.exit_policy.awaits(self.output_index, self.loops_done))

    def _settle(self, awaited: int) -> None:
        """Where the token in work goes, if that is known."""
        if awaited == STAYS:
            self.stage = _RECURRENT
        elif awaited == LEAVES:
            self.stage = _CODA
        elif self.heard >= awaited:
            self.stage = _CODA if self.fired else _RECURRENT
        else:
            self.stage = None

    def tick(self, ticks: int) -> None:
        """Up to so many ticks more on the worker."""
        self.ticks_in_flight += ticks

    def ticked(self, ticks: int, loops: int) -> None:
        """A plan of up to `ticks` ticks is answered; the token in work has run `loops` loops."""
        self.ticks_in_flight -= ticks
        self.loops_done = loops

    def append(self, token: int, exit_depth: int, logprobs: TokenLogprobs | None = None) -> None:
        """An output has come back, sampled after `exit_depth` loops."""
        if self.tokens:
            self.later_loops += exit_depth
        if not self.resident:
            self.sampling -= 1
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.exit_depths.append(exit_depth)

    def truncate(self, num_outputs: int) -> None:
        """Keep the first outputs alone: what was sampled since is not part of the answer."""
        for column in (self.tokens, self.exit_depths, self.logprobs):
            del column[num_outputs:]
        self.later_loops = sum(self.exit_depths[1:])

    def end(self, event: Event, reason: FinishReason, error: str | None = None) -> None:
        """End a live request; `error` goes with reason ERROR."""
        self._to(event)
        self.stage = None
        self.finish_reason = reason
        self.error = error
        self.worker_lost = event is Event.LOST

    def close(self, event: Event) -> None:
        """A request that has ended holds nothing any more."""
        self._to(event)

    def _to(self, event: Event) -> None:
        self.state = next_state(self.state, event)


def _sums_from(depths: tuple[int, ...]) -> tuple[int, ...]:
    """The sum of all from each entry on, and 0. Example: (4, 2, 3) -> (9, 5, 3, 0)."""
    return tuple(accumulate(reversed(depths), initial=0))[::-1]
