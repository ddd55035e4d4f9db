"""Room for snapshots: what one takes, what fits, and what a row has to give."""

from __future__ import annotations

from protocol.identity import RequestKey
from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.row_progress import RowProgress
from protocol.snapshot import LossReason, SnapshotRoom, SnapshotStore, missing_snapshot

A, B, C = RequestKey("a", 1), RequestKey("b", 2), RequestKey("c", 3)


def test_the_size_of_a_snapshot_is_known_before_it_is_taken() -> None:
    room = SnapshotRoom(limit=2**20, row_bytes=1000, prompt_bytes=8, token_bytes=32768)
    assert room.size(5, 6) == 1000 + 40 + 196_608


def test_a_store_refuses_what_exceeds_its_bound_and_counts_what_it_keeps() -> None:
    store: SnapshotStore[str] = SnapshotStore(100)
    assert store.refuse(A, 100) is None
    store.put(A, 60, "first")
    store.put(B, 40, "second")
    assert (store.used, store.keys(), A in store, store.get(B)) == (100, (A, B), True, "second")
    loss = store.refuse(C, 1)
    assert loss is not None
    assert (loss.key, loss.reason) == (C, LossReason.OVER_BOUND)
    assert "1 bytes beside 100 exceeds the 100" in loss.message
    store.put(A, 10, "again")
    assert (store.used, store.get(A)) == (50, "again")
    store.drop(A)
    store.drop(C)
    assert (store.used, store.get(A)) == (40, None)
    store.clear()
    assert (store.used, store.keys()) == (0, ())


def test_a_store_shows_what_it_holds() -> None:
    store: SnapshotStore[str] = SnapshotStore(10)
    store.put(RequestKey("a", 1), 4, "a")
    assert repr(store) == "<SnapshotStore 1 kept, 4 of 10 bytes>"


def test_a_missing_snapshot_names_its_request() -> None:
    loss = missing_snapshot(A)
    assert (loss.key, loss.reason) == (A, LossReason.MISSING)
    assert "a#1 has no snapshot" in loss.message


def test_what_is_written_grows_with_prompt_and_first_loops() -> None:
    progress = RowProgress(A, prompt_length=3, max_loops=4, capacity=16)
    steps = (
        PrefillBatch((A,), (0,), (2,)),
        PrefillBatch((A,), (2,), (1,)),
        CodaBatch((A,), (2,), (4,), (0,)),
        PreludeBatch((A,), (3,), (-1,)),
        RecurrentBatch((A,), (3,), (0,)),
        RecurrentBatch((A,), (3,), (1,)),
        CodaBatch((A,), (3,), (2,), (1,)),
    )
    written = [progress.written]
    for step in steps:
        progress.advance(step, 0)
        written.append(progress.written)
    assert written == [0, 2, 3, 3, 3, 4, 4, 4]


def test_moving_leaves_the_old_progress_as_it_was() -> None:
    progress = RowProgress(A, prompt_length=3, max_loops=4, capacity=16, prefilled=2)
    moved = progress.moved(((5,), (6,)), 4)
    assert (moved.capacity, progress.capacity) == (4, 16)
    moved.advance(PrefillBatch((A,), (2,), (1,)), 0)
    assert (moved.prefilled, progress.prefilled) == (3, 2)
