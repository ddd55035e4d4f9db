"""Who a request is, below the public API."""

from __future__ import annotations

from typing import NamedTuple, Self

MAX_REQUEST_ID_LENGTH = 256


class _Fields(NamedTuple):
    request_id: str
    generation: int


class RequestKey(_Fields):
    """One life of a request id: the only key used below the public API.

    `generation` grows whenever the id is used again, so that a late result of an earlier life is
    recognised and dropped. A tuple, because every row of every plan is looked up by its key.
    """

    __slots__ = ()

    def __new__(cls, request_id: str, generation: int) -> Self:
        """Raises ValueError for an id or a generation out of range."""
        if not 0 < len(request_id) <= MAX_REQUEST_ID_LENGTH:
            raise ValueError(f"a request id has 1 to {MAX_REQUEST_ID_LENGTH} characters")
        if not 0 < generation < 2**63:
            raise ValueError(f"generation {generation} is not in [1, 2**63)")
        return super().__new__(cls, request_id, generation)

    def __str__(self) -> str:
        return f"{self.request_id}#{self.generation}"
