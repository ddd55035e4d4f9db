"""Block pool, block tables and RNG keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DuplicateRequestError, OverloadedError
from protocol.identity import RequestKey
from protocol.rng import RngKey
from scheduler.block_pool import BlockPool
from scheduler.kv_cost import KVCost, KVStats
from scheduler.kv_manager import KVManager
from scheduler.rng_registry import RngRegistry
from tests.scheduler.bench import make_profile

A, B = RequestKey("a", 1), RequestKey("b", 2)


def test_the_last_freed_block_is_claimed_first() -> None:
    pool = BlockPool(6)
    assert pool.claim(3) == (0, 1, 2)
    pool.free((1,))
    pool.free((0, 2))
    assert pool.claim(4) == (0, 2, 1, 3)
    assert repr(pool) == "<BlockPool 2/6 free>"


def test_a_failed_claim_changes_nothing() -> None:
    pool = BlockPool(3)
    pool.claim(2)
    with pytest.raises(OverloadedError, match="2 blocks needed, 1 of 3 free"):
        pool.claim(2)
    assert pool.free_count == 1
    assert pool.claim(1) == (2,)


@pytest.mark.parametrize("blocks", [(5,), (0, 0), (0, 3), (-1,)])
def test_only_claimed_blocks_come_back(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(6)
    pool.claim(2)
    with pytest.raises(ValueError, match="not all claimed"):
        pool.free(blocks)
    assert pool.free_count == 4


@given(st.lists(st.integers(0, 5), max_size=30))
def test_blocks_are_conserved(sizes: list[int]) -> None:
    pool = BlockPool(12)
    held: list[tuple[int, ...]] = []
    for size in sizes:
        try:
            held.append(pool.claim(size))
        except OverloadedError:
            pool.free(held.pop(0))
        claimed = [block for blocks in held for block in blocks]
        assert len(set(claimed)) == len(claimed) == 12 - pool.free_count


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 4), (16, 4), (17, 8), (32, 8), (33, 12)])
def test_cost_counts_every_plane(tokens: int, blocks: int) -> None:
    assert KVManager(make_profile(block_size=16)).cost(tokens).blocks == blocks


def test_a_table_has_blocks_of_its_own_in_each_plane() -> None:
    kv = KVManager(make_profile(num_blocks=16, block_size=4))
    table = kv.commit(A, kv.cost(7))
    assert table == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert kv.table(A) == table
    assert kv.stats() == KVStats(total_blocks=16, free_blocks=8, tables=1)
    assert repr(kv) == "<KVManager 1 tables, 8/16 blocks free>"
    kv.release(A)
    assert kv.stats() == KVStats(total_blocks=16, free_blocks=16, tables=0)
    assert kv.commit(B, kv.cost(7)) == table


def test_a_failed_commit_changes_nothing() -> None:
    kv = KVManager(make_profile(num_blocks=10, block_size=4))
    kv.commit(A, kv.cost(4))
    assert not kv.fits(KVCost(4, 2))
    with pytest.raises(OverloadedError):
        kv.commit(B, KVCost(4, 2))
    with pytest.raises(ValueError, match="already has a block table"):
        kv.commit(A, KVCost(4, 1))
    assert kv.stats() == KVStats(total_blocks=10, free_blocks=6, tables=1)


def test_a_promise_is_kept_and_grown_into() -> None:
    kv = KVManager(make_profile(num_blocks=20, block_size=4))
    assert kv.commit(A, kv.cost(12), kv.cost(3)) == ((0,), (1,), (2,), (3,))
    assert kv.stats() == KVStats(20, 16, 1, promised_blocks=8)
    assert kv.fits(kv.cost(8))
    assert not kv.fits(kv.cost(8), headroom=1)
    with pytest.raises(OverloadedError, match="12 blocks needed, 16 of 20 free and 8 of them"):
        kv.commit(B, kv.cost(9), kv.cost(1))
    assert kv.grow(A, 4) is None
    assert kv.grow(A, 5) == ((4,), (5,), (6,), (7,))
    assert kv.table(A) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert kv.stats() == KVStats(20, 12, 1, promised_blocks=4)
    kv.forgo(A)
    kv.forgo(A)
    assert kv.stats() == KVStats(20, 12, 1)
    kv.release(A)
    assert kv.stats() == KVStats(20, 20, 0)
    kv.commit(B, kv.cost(9), kv.cost(1))
    kv.release(B)
    assert kv.stats() == KVStats(20, 20, 0)


def test_growth_beyond_the_promise_takes_what_nobody_is_promised() -> None:
    kv = KVManager(make_profile(num_blocks=24, block_size=4))
    kv.commit(A, kv.cost(8), kv.cost(4))
    kv.commit(B, kv.cost(8), kv.cost(4))
    assert (kv.unpromised_blocks, kv.lack(A, 8), kv.lack(A, 9), kv.lack(A, 13)) == (8, 0, 4, 8)
    assert kv.freed_by([A]) == 8
    assert [kv.affordable(A, tokens, 0) for tokens in (3, 8, 14, 16, 17, 30)] == [
        3,
        8,
        14,
        16,
        16,
        16,
    ]
    assert [kv.affordable(A, 30, kept) for kept in (1, 4, 5, 8, 99)] == [12, 12, 8, 8, 8]
    more = kv.grow(A, 16)
    assert more is not None
    assert [len(plane) for plane in more] == [3] * 4
    assert (kv.unpromised_blocks, kv.lack(A, 16), kv.lack(A, 17)) == (0, 0, 4)
    before = kv.stats()
    with pytest.raises(OverloadedError, match="4 blocks more than promised, 0 to be had"):
        kv.grow(A, 17)
    assert kv.stats() == before
    assert kv.grow(B, 8) is not None
    assert (kv.freed_by([A]), kv.freed_by([A, B])) == (16, 24)


def test_one_rng_key_a_public_id() -> None:
    registry = RngRegistry()
    assert registry.acquire("a", 7) == RngKey(7, 0) == registry.key("a")
    assert registry.key("a", 5) == RngKey(7, 5)
    with pytest.raises(DuplicateRequestError):
        registry.acquire("a", 8)
    assert (len(registry), repr(registry)) == (1, "<RngRegistry 1 keys>")
    registry.drop("a")
    assert registry.acquire("a", 8) == RngKey(8, 0)
