"""RngRegistry: the one owner of the randomness of public requests."""

from __future__ import annotations

from protocol.errors import DuplicateRequestError
from protocol.rng import RngKey


class RngRegistry:
    """One RngKey a public request id. Owner: Engine. Mutated only by: acquire and drop.

    The key belongs to the public id and not to a place on a worker: what a request draws depends
    on its seed and the index of the draw alone. It is dropped with the request's last release.
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

    def key(self, request_id: str) -> RngKey:
        """The key that the request holds."""
        return self._keys[request_id]

    def drop(self, request_id: str) -> None:
        """Forget the key of a request that is released."""
        del self._keys[request_id]
