"""The table of request states."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.states import TRANSITIONS, Event, State, StateError, next_state


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_an_event_moves_by_the_table_or_raises(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(StateError, match=f"{event.name}.*{state.name}"):
            next_state(state, event)


@pytest.mark.parametrize("state", list(State))
def test_abort_is_legal_in_each_state(state: State) -> None:
    assert next_state(state, Event.ABORT) in (State.RELEASING, State.FINISHED)


def test_every_state_but_the_last_leads_to_finished() -> None:
    leads = {State.FINISHED}
    for _ in State:
        leads |= {state for (state, _), target in TRANSITIONS.items() if target in leads}
    assert leads == set(State)


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "states.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    events, _, *states = rows[: 2 + len(State)]
    shown = {
        (State[row[0]], Event[event]): State[target]
        for row in states
        for event, target in zip(events[1:], row[1:], strict=True)
        if target
    }
    assert shown == TRANSITIONS
