"""What the columns of a batch or result must fulfil, whoever made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.identity import RequestKey


def require_equal_lengths(what: str, *columns: Sequence[object]) -> None:
    """Raise ValueError unless every column has one entry a row."""
    if len({len(column) for column in columns}) > 1:
        lengths = [len(column) for column in columns]
        raise ValueError(f"{what}: columns differ in length: {lengths}")


def require_non_negative(what: str, *columns: Sequence[int]) -> None:
    """Raise ValueError if any column holds a negative number."""
    for column in columns:
        if column and min(column) < 0:
            raise ValueError(f"{what}: negative entry {min(column)}")


def require_distinct(what: str, keys: Sequence[RequestKey]) -> None:
    """Raise ValueError if a request has two rows in one batch."""
    if len(set(keys)) != len(keys):
        raise ValueError(f"{what}: a request appears twice")
