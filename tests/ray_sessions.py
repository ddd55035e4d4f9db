"""Which sessions of Ray's this process has had; imports no Ray."""

from __future__ import annotations

BEGUN: list[str] = []
"""Their folders. Mutated only by: tests/ray_cluster.py."""
