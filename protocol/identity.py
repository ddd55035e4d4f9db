"""Who a request is, below the public API."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REQUEST_ID_LENGTH = 256


@dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """One life of a request id: the only key used below the public API.

    `generation` grows whenever the id is used again, so that a late result of an earlier life is
    recognised and dropped.
    """

    request_id: str
    generation: int

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= MAX_REQUEST_ID_LENGTH:
            raise ValueError(f"a request id has 1 to {MAX_REQUEST_ID_LENGTH} characters")
        if not 0 < self.generation < 2**63:
            raise ValueError(f"generation {self.generation} is not in [1, 2**63)")

    def __str__(self) -> str:
        return f"{self.request_id}#{self.generation}"
