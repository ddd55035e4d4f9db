"""Stop strings: where a growing text ends, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import RequestError

MAX_STOP_STRINGS = 4


def checked_stop(value: object) -> tuple[str, ...]:
    """Stop strings from one text, a list of them or None.

    Raises RequestError for more than MAX_STOP_STRINGS, an empty one or one that is no text.
    """
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop is a text or a list of at most {MAX_STOP_STRINGS} of them")
    stop = tuple(entry for entry in strings if isinstance(entry, str) and entry)
    if len(stop) < len(strings):
        raise RequestError("a stop string is a text of at least one character")
    return stop


class StopSearch:
    """The text of one answer up to its stop. Owner: TextAssembler. Mutated only by: push, finish.

    The first stop string to be complete ends the text; of several that one piece completes, the
    one that begins first. Text that may be the beginning of one is held back, so nothing that was
    given out is ever taken back.

    Example: stop "END"; pushing "one E" gives "one ", then "ND two" gives "" and `found`.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text before the stop that `piece` sets free; may be empty."""
        if not self._stop:
            return piece
        text = self._held + piece
        starts = [start for entry in self._stop if (start := text.find(entry)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        free = len(text) - self._begun(text)
        self._held = text[free:]
        return text[:free]

    def finish(self) -> str:
        """The text still held: no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(entry) - 1 for entry in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(entry.startswith(text[-size:]) for entry in self._stop):
                return size
        return 0
