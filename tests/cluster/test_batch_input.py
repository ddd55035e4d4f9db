from __future__ import annotations

import hashlib
import json
import tracemalloc
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from cluster.batch_input import HashedChunks, repeated_entries, scan

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 1000


def lines_of(ids: list[str | None]) -> bytes:
    return b"".join(
        (b"broken" if name is None else json.dumps({"custom_id": name}).encode()) + b"\n"
        for name in ids
    )


@given(st.lists(st.sampled_from(["a", "b", "c", "ü", None]), max_size=30))
def test_the_first_of_equal_custom_ids_counts(ids: list[str | None]) -> None:
    data = lines_of(ids)
    found = scan([data], LIMIT)
    again = [i for i, name in enumerate(ids) if name is not None and name in ids[:i]]
    assert list(found.repeated) == again
    assert [i for i in range(len(ids)) if found.is_repeated(i)] == again
    assert (found.num_lines, found.num_bytes) == (len(ids), len(data))
    assert found.sha256 == hashlib.sha256(data).hexdigest()


@given(st.lists(st.integers(0, 5), max_size=40))
def test_entries_that_came_before(values: list[int]) -> None:
    # Differ in either half, so that both count.
    entries = b"".join((value << (64 * (value % 2))).to_bytes(16, "little") for value in values)
    expected = [i for i, value in enumerate(values) if value in values[:i]]
    assert repeated_entries(entries).tolist() == expected


def test_a_long_file_does_not_stay_in_memory() -> None:
    count, filler = 30_000, "x" * 300

    def chunks() -> Iterator[bytes]:
        for number in range(count):
            yield json.dumps({"custom_id": str(number), "filler": filler}).encode() + b"\n"

    tracemalloc.start()
    try:
        found = scan(chunks(), LIMIT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.num_lines == count
    assert found.num_bytes > 10**7
    assert peak < 80 * count + 10**6


def test_chunks_pass_unchanged() -> None:
    hashed = HashedChunks([b"ab", b"", b"c"])
    assert list(hashed) == [b"ab", b"", b"c"]
    assert (hashed.num_bytes, hashed.sha256) == (3, hashlib.sha256(b"abc").hexdigest())
