"""Whether a request would fit if others were gone: as if they really were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.identity import RequestKey
from scheduler.kv_manager import KVManager
from tests.scheduler.bench import make_profile

CHAINS = tuple(tuple(bytes([name, index]) for index in range(4)) for name in range(2))
"""Digests of prompts: requests of one chain share its blocks once they are published."""


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 7), st.booleans(), st.booleans()), max_size=5
    ),
    chain=st.integers(0, 1),
    tokens=st.integers(1, 40),
    headroom=st.integers(0, 8),
)
def test_the_room_that_others_would_leave(
    requests: list[tuple[int, int, bool, bool]], chain: int, tokens: int, headroom: int
) -> None:
    kv = KVManager(make_profile(num_blocks=64))
    leaving: list[RequestKey] = []
    gone: list[RequestKey] = []
    for generation, (name, blocks, publishes, leaves) in enumerate(requests, start=1):
        key = RequestKey("r", generation)
        cost = kv.cost(4 * blocks, CHAINS[name][: blocks - 1])
        if not kv.fits(cost):
            continue
        kv.commit(key, cost, kv.cost(4 * max(cost.cached, 1)))
        if publishes:
            kv.grow(key, 4 * blocks)
            kv.publish(key, 4 * blocks)
        (leaving if leaves else gone).append(key)
    if gone and len(requests) % 2:
        kv.release(gone[0])  # leaves idle blocks in the cache
    asked = kv.cost(tokens, CHAINS[chain][: (tokens - 1) // 4])
    before = kv.stats()
    told = kv.fits(asked, headroom, leaving)
    assert kv.stats() == before
    for key in leaving:
        kv.release(key)
    after = kv.cost(tokens, CHAINS[chain][: (tokens - 1) // 4])
    assert after == asked
    assert told is kv.fits(after, headroom)
