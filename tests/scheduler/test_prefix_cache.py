"""Digests, reference counts, and what is evicted when: literal cases and random ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import OverloadedError
from protocol.identity import RequestKey
from protocol.layout import Layout
from scheduler.block_pool import BlockPool
from scheduler.kv_cost import KVStats
from scheduler.kv_manager import KVManager
from scheduler.prefix_cache import PrefixCache, PromptDigests, root_digest
from tests.scheduler.bench import make_model, make_profile

A, B, C, D, E = (RequestKey(name, number + 1) for number, name in enumerate("abcde"))


def digests(*tokens: int, tenant: str = "") -> tuple[bytes, ...]:
    """The digests of a prompt, block size 2, whose last token is left out of `tokens`."""
    return PromptDigests((*tokens, 99), "model", tenant).of(2, Layout.LAST_EXITED)


def manager(num_blocks: int = 16, planes: int = 1) -> KVManager:
    model = replace(make_model(), max_loops=planes)
    return KVManager(make_profile(model=model, num_blocks=num_blocks, block_size=2))


def take(kv: KVManager, key: RequestKey, *tokens: int, more: int = 1) -> tuple[int, ...]:
    """Commit a request of `tokens`, one last prompt token and `more` - 1 outputs; plane 0."""
    return kv.commit(key, kv.cost(len(tokens) + more, digests(*tokens)))[0]


def cached(kv: KVManager, *tokens: int) -> int:
    """How many blocks of a prompt are cached."""
    return kv.cost(1, digests(*tokens)).cached


def test_a_digest_covers_everything_before_it() -> None:
    root = root_digest("model", Layout.LAST_EXITED, 2, "")
    first = sha256(root + b"\x05" + bytes(7) + b"\x00\x01" + bytes(6)).digest()
    second = sha256(first + b"\x07" + bytes(7) + b"\x08" + bytes(7)).digest()
    prompt = PromptDigests((5, 256, 7, 8, 9), "model", "")
    found = prompt.of(2, Layout.LAST_EXITED)
    assert found == (first, second)
    assert prompt.of(2, Layout.LAST_EXITED) is found
    shared = prompt.of(2, Layout.SHARED)
    root_of_shared = root_digest("model", Layout.SHARED, 2, "")
    assert (
        shared[0] == sha256(root_of_shared + b"\x05" + bytes(7) + b"\x00\x01" + bytes(6)).digest()
    )
    assert repr(prompt) == "<PromptDigests of 5 tokens>"
    length = (5).to_bytes(8, "little"), (11).to_bytes(8, "little"), (1).to_bytes(8, "little")
    written = length[0] + b"model" + length[1] + b"last_exited" + length[2] + b"2" + bytes(8)
    assert root == sha256(written).digest()


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)])
def test_the_last_prompt_token_is_in_no_digest(length: int, blocks: int) -> None:
    prompt = PromptDigests(tuple(range(length)), "model", "")
    assert len(prompt.of(4, Layout.LAST_EXITED)) == blocks


def test_whatever_kv_depends_on_changes_every_digest() -> None:
    roots = {
        root_digest("model", Layout.LAST_EXITED, 2, ""),
        root_digest("other", Layout.LAST_EXITED, 2, ""),
        root_digest("model", Layout.SHARED, 2, ""),
        root_digest("model", Layout.LAST_EXITED, 4, ""),
        root_digest("model", Layout.LAST_EXITED, 2, "tenant"),
        root_digest("model", Layout.LAST_EXITED, 21, ""),
        root_digest("model", Layout.LAST_EXITED, 2, "1"),
        root_digest("model", Layout.LAST_EXITED, 2, "\ud800"),
    }
    assert len(roots) == 8
    mine, yours = digests(1, 2, 3, 4), digests(1, 2, 3, 4, tenant="you")
    assert set(mine).isdisjoint(yours)
    assert digests(1, 2, 5, 6)[0] == mine[0]
    assert digests(1, 2, 5, 6)[1] != mine[1]
    assert digests(5, 2, 3, 4)[1] != mine[1]


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(4)
    assert pool.claim(3) == (0, 1, 2)
    pool.share((1, 2))
    pool.share((2,))
    assert [pool.references(block) for block in range(4)] == [1, 2, 3, 0]
    pool.free((0, 1, 2))
    assert (pool.free_count, [pool.references(block) for block in range(4)]) == (2, [0, 1, 2, 0])
    pool.free((2,))
    pool.free((1, 2))
    assert pool.claim(4) == (1, 2, 0, 3)


@pytest.mark.parametrize("blocks", [(0, 3), (1, 1)])
def test_only_claimed_blocks_are_shared_each_once(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(4)
    pool.claim(2)
    with pytest.raises(ValueError, match="not all claimed"):
        pool.share(blocks)
    assert [pool.references(block) for block in range(4)] == [1, 1, 0, 0]


def test_the_cache_finds_the_longest_run_and_drops_whole_subtrees() -> None:
    cache = PrefixCache()
    cache.add(b"1", None, (0,))
    cache.add(b"2", b"1", (1,))
    cache.add(b"3", b"2", (2,))
    cache.add(b"x", b"1", (3,))
    assert cache.match([b"1", b"2", b"9", b"8"]) == 2
    assert cache.match([b"9"]) == cache.match([]) == 0
    assert (cache.blocks(b"2"), cache.blocks(b"9")) == ((1,), None)
    cache.rest(b"3")
    cache.rest(b"2")
    assert cache.idle_within([b"1", b"2", b"3"], 3) == 2
    assert cache.idle_within([b"1", b"2", b"3"], 1) == 0
    assert repr(cache) == "<PrefixCache 4 entries, 2 idle>"
    assert cache.evict() == (2,)
    assert cache.hold(b"2") == (1,)
    assert cache.idle_count == 0
    assert sorted(cache.drop(b"1")) == [(0,), (1,), (3,)]
    assert cache.drop(b"1") == []
    assert len(cache) == 0


def test_a_block_of_every_plane_is_shared_and_the_rest_is_new() -> None:
    kv = manager(planes=4, num_blocks=40)
    first = kv.commit(A, kv.cost(6, digests(1, 2, 3, 4)))
    assert first == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    kv.publish(A, 4)
    second = kv.commit(B, kv.cost(5, digests(1, 2, 3, 4)))
    assert second == ((0, 1, 12), (3, 4, 13), (6, 7, 14), (9, 10, 15))
    assert kv.table(B) == second
    assert kv.stats() == KVStats(40, 24, 2, cached_blocks=8, evicted_blocks=0)


def test_only_what_is_complete_and_of_the_prompt_is_published() -> None:
    kv = manager()
    take(kv, A, 1, 2, 3, 4, more=5)
    kv.publish(A, 1)
    assert cached(kv, 1, 2, 3, 4) == 0
    kv.publish(A, 3)
    assert cached(kv, 1, 2, 3, 4) == 1
    kv.publish(A, 5)  # the whole prompt: its last token's block is none of these
    kv.publish(A, 9)
    assert cached(kv, 1, 2, 3, 4, 99, 0) == 2
    assert kv.stats().cached_blocks == 2


def test_references_count_requests_and_the_cache() -> None:
    kv = manager(8)
    assert take(kv, A, 1, 2, 3, 4) == (0, 1, 2)
    kv.publish(A, 4)
    assert take(kv, B, 1, 2, 3, 4) == (0, 1, 3)
    assert take(kv, C, 1, 2, 5, 6) == (0, 4, 5)
    assert kv.free_blocks == 2
    kv.release(A)
    assert kv.free_blocks == 3  # block 2
    kv.release(B)
    assert kv.free_blocks == 5  # block 3, and 1 as an idle entry; C still holds 0
    kv.release(C)
    assert kv.stats() == KVStats(8, 8, 0, cached_blocks=2, evicted_blocks=0)


def test_the_leaf_that_has_been_idle_longest_goes_first() -> None:
    kv = manager(6)
    for key, tokens in ((A, (1, 2, 3, 4)), (B, (1, 2, 5, 6))):
        take(kv, key, *tokens)
        kv.publish(key, 4)
        kv.release(key)
    chains = ((1, 2, 3, 4), (1, 2, 5, 6))
    assert [cached(kv, *chain) for chain in chains] == [2, 2]
    evicted: list[list[int]] = []
    for count in (3, 1, 1, 1):
        key = RequestKey(f"new{len(evicted)}", 10)
        kv.commit(key, kv.cost(2 * count))
        evicted.append([cached(kv, *chain) for chain in chains])
    # Three free blocks, then the leaf of A's chain, that of B's, and last what both start with.
    assert evicted == [[2, 2], [1, 2], [1, 1], [0, 0]]
    assert kv.stats() == KVStats(6, 0, 4, cached_blocks=0, evicted_blocks=3)


def test_a_hit_counts_as_use() -> None:
    kv = manager(6)
    for key, tokens in ((A, (1, 2)), (B, (3, 4)), (C, (5, 6))):
        take(kv, key, *tokens)
        kv.publish(key, 2)
        kv.release(key)
    take(kv, D, 1, 2)
    kv.release(D)
    kv.commit(E, kv.cost(2 * 4))
    assert [cached(kv, *tokens) for tokens in ((1, 2), (3, 4), (5, 6))] == [1, 0, 1]


def test_a_hit_is_not_evicted_for_its_own_request() -> None:
    kv = manager(4)
    take(kv, A, 1, 2, 3, 4)
    kv.publish(A, 4)
    kv.release(A)
    take(kv, B, 5, 6)
    kv.publish(B, 2)
    kv.release(B)  # block 1, 2 free besides; 0 and the other two idle
    table = take(kv, C, 1, 2, 3, 4, more=4)
    assert len(set(table)) == 4
    assert (cached(kv, 1, 2, 3, 4), cached(kv, 5, 6)) == (2, 0)
    assert kv.free_blocks == 0


def test_cached_blocks_are_free_for_others_and_charged_to_who_takes_them() -> None:
    kv = manager(12)
    take(kv, A, *range(8))
    kv.publish(A, 8)
    kv.release(A)
    kv.commit(B, kv.cost(2 * 4))
    # Eight are free, four of them cached: the other four do for eight with this hit.
    assert kv.free_blocks == 8
    assert kv.fits(kv.cost(16, digests(*range(8))))
    assert not kv.fits(kv.cost(18, digests(*range(8))))
    assert kv.fits(kv.cost(16))


def test_a_claim_that_cannot_succeed_evicts_nothing_and_shares_nothing() -> None:
    kv = manager(6)
    take(kv, A, 1, 2, 3, 4)
    kv.publish(A, 4)
    kv.release(A)
    kv.commit(B, kv.cost(6))
    before = kv.stats()
    for cost in (kv.cost(8, digests(1, 2, 3, 4)), kv.cost(8)):
        with pytest.raises(OverloadedError, match="3 of 6 free"):
            kv.commit(C, cost)
        assert kv.stats() == before
        assert cached(kv, 1, 2, 3, 4) == 2
    assert len(take(kv, C, 1, 2, 3, 4)) == 3


def test_growth_evicts_what_is_idle_and_never_what_was_promised_to_others() -> None:
    kv = manager(8)
    take(kv, A, 1, 2, 3, 4)
    kv.publish(A, 4)
    kv.release(A)
    first = kv.commit(B, kv.cost(8, digests(1, 2)), kv.cost(4, digests(1, 2)))
    assert [len(plane) for plane in first] == [2]
    assert kv.stats() == KVStats(8, 6, 1, promised_blocks=2, cached_blocks=2)
    # Six are free, one of them cached, and two promised: four are left.
    assert not kv.fits(kv.cost(10))
    kv.commit(C, kv.cost(8))
    assert kv.grow(B, 5) is not None
    assert kv.grow(B, 8) is not None
    assert len(set(kv.table(B)[0]) | set(kv.table(C)[0])) == 8
    assert kv.stats() == KVStats(8, 0, 2, cached_blocks=1, evicted_blocks=1)
    kv.publish(B, 2)
    assert cached(kv, 1, 2, 3, 4) == 1


def test_a_cost_whose_blocks_were_evicted_is_refused() -> None:
    kv = manager(4)
    take(kv, A, 1, 2)
    kv.publish(A, 2)
    kv.release(A)
    old = kv.cost(3, digests(1, 2))
    kv.commit(B, kv.cost(8))
    kv.release(B)
    with pytest.raises(ValueError, match="ask for the cost again"):
        kv.commit(C, old)
    assert kv.stats() == KVStats(4, 4, 0, cached_blocks=0, evicted_blocks=1)


def test_the_second_of_two_equal_prompts_keeps_blocks_of_its_own() -> None:
    kv = manager()
    take(kv, A, 1, 2, 3, 4)
    own = take(kv, B, 1, 2, 3, 4, 5, 6)
    kv.publish(A, 2)
    kv.publish(B, 6)
    assert (cached(kv, 1, 2, 3, 4, 5, 6), kv.table(B)[0]) == (1, own)
    kv.publish(A, 4)
    kv.publish(B, 6)
    assert cached(kv, 1, 2, 3, 4, 5, 6) == 2
    kv.release(A)
    kv.release(B)
    take(kv, C, 1, 2, 3, 4, 5, 6)
    kv.publish(C, 6)
    assert cached(kv, 1, 2, 3, 4, 5, 6) == 3


def test_what_a_failed_request_held_of_the_cache_is_forgotten_for_all_who_come() -> None:
    kv = manager()
    take(kv, A, 1, 2, 3, 4)
    kv.publish(A, 4)
    sharer = take(kv, B, 1, 2, 5, 6)
    kv.publish(B, 4)
    take(kv, C, 1, 2, 3, 4, 9, 9)
    kv.distrust(B)
    assert [cached(kv, *tokens) for tokens in ((1, 2, 3, 4), (1, 2, 5, 6))] == [0, 0]
    assert kv.table(B)[0] == sharer
    kv.publish(C, 6)  # its first block is cached no more, so what follows has no parent
    assert kv.stats().cached_blocks == 0
    take(kv, D, 1, 2, 3, 4)
    kv.publish(D, 4)
    kv.publish(C, 6)
    assert cached(kv, 1, 2, 3, 4, 9, 9) == 2
    for key in (A, B, C):
        kv.release(key)
    assert kv.table(D)[0][0] != sharer[0]
    kv.release(D)
    assert kv.stats() == KVStats(16, 16, 0, cached_blocks=2, evicted_blocks=0)


def test_a_failed_request_that_held_nothing_cached_forgets_nothing() -> None:
    kv = manager()
    take(kv, A, 1, 2)
    take(kv, B, 1, 2)
    kv.publish(A, 2)
    kv.distrust(B)
    assert cached(kv, 1, 2) == 1


@dataclass(slots=True)
class _World:
    """A manager, and which tokens each block of its single plane should hold. Owner: one test."""

    kv: KVManager
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prompts: dict[RequestKey, tuple[int, ...]] = field(default_factory=dict)
    done: dict[RequestKey, int] = field(default_factory=dict)

    def check(self) -> None:
        held = {block for key in self.prompts for block in self.kv.table(key)[0]}
        stats = self.kv.stats()
        assert len(held) + stats.free_blocks == stats.total_blocks == 10
        for key, prompt in self.prompts.items():
            for end in range(2, self.done[key] + 1, 2):
                block = self.kv.table(key)[0][end // 2 - 1]
                assert self.content[block] == prompt[:end], f"{key}: overwritten"


prompts = st.lists(st.integers(0, 1), min_size=2, max_size=8).map(tuple)
operations = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["write", "publish", "release", "fail"]), prompts),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_blocks_are_conserved_and_a_cached_one_keeps_its_content(
    steps: list[tuple[int, str, tuple[int, ...]]],
) -> None:
    world = _World(manager(10))
    kv = world.kv
    for index, what, prompt in steps:
        key = (A, B, C, D, E)[index]
        if key not in world.prompts:
            cost = kv.cost(len(prompt) + 2, digests(*prompt[:-1]))
            before = kv.stats()
            if not kv.fits(cost):
                with pytest.raises(OverloadedError):
                    kv.commit(key, cost)
                assert kv.stats() == before
                continue
            kv.commit(key, cost)
            world.prompts[key], world.done[key] = prompt[:-1], 2 * cost.cached
        elif what == "write":
            start, end = world.done[key] // 2, len(world.prompts[key]) // 2
            for number, block in enumerate(kv.table(key)[0][start:], start):
                holders = [k for k in world.prompts if block in kv.table(k)[0]]
                assert holders == [key], "a block with two writers"
                own = world.prompts[key][: 2 * number + 2]
                world.content[block] = own if number < end else (-1,)
            world.done[key] = 2 * end
        elif what == "publish":
            kv.publish(key, world.done[key])
        else:
            if what == "fail":
                kv.distrust(key)
            kv.release(key)
            del world.prompts[key], world.done[key]
        world.check()
    for key in tuple(world.prompts):
        kv.release(key)
    assert kv.free_blocks == 10
    kv.commit(A, kv.cost(20))
    assert kv.stats().cached_blocks == 0
