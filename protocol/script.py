"""What a scripted worker plays: its gates and its tokens, as functions of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from protocol.identity import RequestKey

Hazard: TypeAlias = Callable[[RequestKey, int, int], float]
"""The gate, in [0, 1], of (key, position, 0-based depth)."""

Token: TypeAlias = Callable[[RequestKey, int], int]
"""The sampled token of (key, output index)."""
