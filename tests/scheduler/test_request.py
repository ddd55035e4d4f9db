"""Progress of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.exit_rule import NEVER, FinishReason, round_to_float32
from protocol.identity import RequestKey
from protocol.sampling import SamplingParams
from protocol.stage import Stage
from scheduler.exit_policy import Ouro
from scheduler.request import Request
from scheduler.states import Event, State, StateError
from tests.scheduler.bench import make_model

if TYPE_CHECKING:
    from protocol.config import ExitPolicyName


def make(prompt: int = 5, policy: ExitPolicyName = "ouro", **params: object) -> Request:
    checked = SamplingParams.model_validate(params)
    tokens = tuple(range(1, prompt + 1))
    return Request.create(RequestKey("a", 1), tokens, checked, make_model(), policy)


def test_defaults_come_from_the_model() -> None:
    request = make()
    assert request.max_loops == request.full_depth == 4
    assert request.exit_policy == Ouro(1, 4, round_to_float32(1 - 0.9))
    assert make(exit_threshold=1.0).exit_policy == Ouro(1, 4, NEVER)
    assert make(max_loops=2).max_loops == 2


def test_one_life_of_a_request() -> None:
    request = make(max_tokens=2, exit_threshold=0.5)
    assert request.capacity_tokens == 6
    request.place("lane-0")
    request.prefill_to(4)
    assert (request.state, request.stage) == (State.PREFILL, None)
    request.prefill_to(5)
    assert (request.state, request.stage, request.position) == (State.DECODING, Stage.CODA, 4)
    assert not request.is_last_output
    request.sample()
    assert (request.stage, request.position, request.output_index) == (None, 5, 1)
    assert request.is_last_output
    assert not request.awaits_signal
    request.embed()
    assert (request.stage, request.loops_done) == (Stage.RECURRENT, 0)
    request.append(9, 4)
    assert (request.position, request.tokens, request.exit_depths) == (5, [9], [4])
    request.loop()
    assert (request.stage, request.loops_done, request.awaits_signal) == (None, 1, True)
    request.hear(5, 1, 0.7)
    assert (request.stage, request.awaits_signal) == (Stage.RECURRENT, False)
    request.loop()
    request.hear(5, 2, 0.5)
    assert (request.stage, request.loops_done) == (Stage.CODA, 2)
    assert repr(request) == "<Request a#1 DECODING CODA prefilled=5/5 tokens=1/2 loops=2>"
    request.end(Event.FINISH, FinishReason.LENGTH)
    assert (request.state, request.stage, request.is_live) == (State.RELEASING, None, False)
    request.close(Event.RELEASED)
    assert request.state is State.FINISHED
    assert repr(request) == "<Request a#1 FINISHED prefilled=5/5 tokens=1/2 loops=2>"


def test_a_signal_counts_for_its_own_token_alone() -> None:
    request = make(max_tokens=4, exit_threshold=0.5, max_loops=3, policy="ouro_delayed")
    request.place("lane-0")
    request.prefill_to(5)
    for _ in range(2):
        request.sample()
        request.append(9, 4)
        request.embed()
        for _ in range(2):
            request.loop()
    # The token at 6 has run two loops; those of the token at 5 are heard late.
    for loops in (1, 2, 3):
        request.hear(5, loops, 0.0)
    assert (request.position, request.heard, request.fired) == (6, 0, False)
    assert request.awaits_signal
    request.hear(6, 1, 0.5)
    assert (request.stage, request.heard, request.fired) == (Stage.CODA, 1, True)


def test_a_wrong_event_changes_nothing() -> None:
    request = make()
    with pytest.raises(StateError):
        request.prefill_to(5)
    with pytest.raises(StateError):
        request.end(Event.FINISH, FinishReason.STOP)
    with pytest.raises(StateError):
        request.close(Event.RELEASED)
    assert (request.state, request.stage, request.prefilled) == (State.WAITING, None, 0)
    assert (request.loops_done, request.finish_reason) == (0, None)
