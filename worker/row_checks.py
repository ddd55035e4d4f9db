"""Whether a row of a plan is the next thing its request may do; pure host arithmetic.

A check either raises ProtocolError, which fails that request alone, or advances the slot's
progress, so that a later step of the same plan is judged by what the earlier ones will have done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import ProtocolError

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from worker.slot_table import SlotProgress


def advance_prefill(
    key: RequestKey, slot: SlotProgress, start: int, count: int, max_loops: int
) -> None:
    """Take prompt tokens [start, start + count); the last chunk leaves the row ready for CODA."""
    end = start + count
    _require(slot.prefilled == start, key, f"prefill from {start}, but {slot.prefilled} are done")
    _require(end <= slot.prompt_length, key, f"prefill to {end} of {slot.prompt_length} tokens")
    _require(end <= slot.capacity, key, f"prefill to {end} with room for {slot.capacity}")
    slot.prefilled = end
    if end == slot.prompt_length:
        slot.position, slot.loops = end - 1, max_loops


def advance_prelude(key: RequestKey, slot: SlotProgress, position: int) -> None:
    """Embed the token that follows the one in work."""
    _require(slot.position >= 0, key, "prelude before the end of its prefill")
    _require(position == slot.position + 1, key, f"prelude at {position} after {slot.position}")
    _require(position < slot.capacity, key, f"position {position}, room for {slot.capacity}")
    slot.position, slot.loops = position, 0


def advance_recurrent(
    key: RequestKey, slot: SlotProgress, position: int, depth: int, max_loops: int
) -> None:
    """Run the next loop of the token in work."""
    _require(position == slot.position, key, f"loop at {position}, in work is {slot.position}")
    _require(depth == slot.loops, key, f"loop at depth {depth} after {slot.loops} loops")
    _require(depth < max_loops, key, f"loop at depth {depth} of a model of {max_loops} loops")
    slot.loops = depth + 1


def check_coda(key: RequestKey, slot: SlotProgress, position: int, exit_depth: int) -> None:
    """Sample after the token in work, which has run `exit_depth` loops."""
    _require(position == slot.position, key, f"coda at {position}, in work is {slot.position}")
    _require(exit_depth == slot.loops, key, f"exit depth {exit_depth} after {slot.loops} loops")


def _require(holds: bool, key: RequestKey, what: str) -> None:
    if not holds:
        raise ProtocolError(f"request {key}: {what}")
