"""The life of a request as one table: (state, event) -> state.

A pair that is not in the table is a mistake of the scheduler: `next_state` raises and changes
nothing. An abort is legal in every state.
"""

from __future__ import annotations

from enum import Enum

from protocol.errors import LoopmeshError


class StateError(LoopmeshError):
    """An event reached a request in a state that has no entry for it."""


class State(Enum):
    """Where a request stands.

    WAITING    queued; holds no slot and no block
    PREFILL    placed on a lane; its prompt is being run
    DECODING   its whole prompt is planned; its Stage says what it needs next
    SUSPENDING the plan in flight takes it off its slot and blocks, which are used until the answer
    SUSPENDED  queued again; its lane alone holds a snapshot of it, but no slot and no block
    RELEASING  it has ended; slot and blocks are used until its release is acknowledged
    FINISHED   it holds nothing, and its id is free
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RELEASING = "releasing"
    FINISHED = "finished"


class Event(Enum):
    """What happens to a request.

    PLACE     a lane has room and takes it, or takes it back with its prompt not through
    RESUME    its lane has room and takes it back where it was DECODING
    PROMPT    the last prompt token is planned through every depth
    SUSPEND   it has to make room for a request of higher priority, or blocks have run out
    SNAPSHOT  its worker keeps a snapshot of it, and nothing else
    FINISH    a stop token, the last token allowed, or an end that only its text told
    FAIL      the worker could not run it
    ABORT     its user gave it up
    RELEASED  its lane holds nothing of it any more
    LOST      its lane was closed, or no lane is left that could serve it
    """

    PLACE = "place"
    RESUME = "resume"
    PROMPT = "prompt"
    SUSPEND = "suspend"
    SNAPSHOT = "snapshot"
    FINISH = "finish"
    FAIL = "fail"
    ABORT = "abort"
    RELEASED = "released"
    LOST = "lost"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.PLACE): State.PREFILL,
    (State.WAITING, Event.ABORT): State.FINISHED,
    (State.WAITING, Event.LOST): State.FINISHED,
    (State.PREFILL, Event.PROMPT): State.DECODING,
    (State.PREFILL, Event.SUSPEND): State.SUSPENDING,
    (State.PREFILL, Event.FAIL): State.RELEASING,
    (State.PREFILL, Event.ABORT): State.RELEASING,
    (State.PREFILL, Event.LOST): State.FINISHED,
    (State.DECODING, Event.SUSPEND): State.SUSPENDING,
    (State.DECODING, Event.FINISH): State.RELEASING,
    (State.DECODING, Event.FAIL): State.RELEASING,
    (State.DECODING, Event.ABORT): State.RELEASING,
    (State.DECODING, Event.LOST): State.FINISHED,
    (State.SUSPENDING, Event.SNAPSHOT): State.SUSPENDED,
    (State.SUSPENDING, Event.FINISH): State.RELEASING,
    (State.SUSPENDING, Event.FAIL): State.RELEASING,
    (State.SUSPENDING, Event.ABORT): State.RELEASING,
    (State.SUSPENDING, Event.LOST): State.FINISHED,
    (State.SUSPENDED, Event.PLACE): State.PREFILL,
    (State.SUSPENDED, Event.RESUME): State.DECODING,
    (State.SUSPENDED, Event.FINISH): State.RELEASING,
    (State.SUSPENDED, Event.ABORT): State.RELEASING,
    (State.SUSPENDED, Event.LOST): State.FINISHED,
    (State.RELEASING, Event.ABORT): State.RELEASING,
    (State.RELEASING, Event.RELEASED): State.FINISHED,
    (State.RELEASING, Event.LOST): State.FINISHED,
    (State.FINISHED, Event.ABORT): State.FINISHED,
}


def next_state(state: State, event: Event) -> State:
    """The state after `event`. Raises StateError when the table has no entry.

    Example: (DECODING, ABORT) -> RELEASING; (WAITING, PROMPT) raises.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise StateError(
            f"event {event.name} is not possible in state {state.name}: "
            "add it to scheduler/states.py if it should be"
        ) from None
