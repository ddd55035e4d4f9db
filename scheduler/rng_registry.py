"""RngRegistry: the one owner of the randomness of public requests."""

from __future__ import annotations

from protocol.errors import DuplicateRequestError
from protocol.rng import RngKey


class RngRegistry:
    """One seed a public request id. Owner: Engine. Mutated only by: acquire and drop.

    The seed belongs to the public id and not to a place on a worker: what a choice draws depends
    on the seed, its index as the stream, and the index of the draw alone. It is dropped with the
    last release of the request's choices.
    """

    def __init__(self) -> None:
        self._keys: dict[str, RngKey] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<RngRegistry {len(self._keys)} keys>"

    def acquire(self, request_id: str, seed: int) -> RngKey:
        """A new key, stream 0. Raises DuplicateRequestError while the id holds one."""
        if request_id in self._keys:
            raise DuplicateRequestError(f"request {request_id!r} already holds an RNG key")
        key = RngKey(seed)
        self._keys[request_id] = key
        return key

    def key(self, request_id: str, choice: int = 0) -> RngKey:
        """The key of one choice of a request that holds a seed."""
        return RngKey(self._keys[request_id].seed, choice)

    def drop(self, request_id: str) -> None:
        """Forget the key of a request that is released."""
        del self._keys[request_id]
