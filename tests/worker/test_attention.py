"""Paged attention against a dense loop over rows and heads in float64."""

from __future__ import annotations

import weakref
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch

from protocol.errors import ExecutorClosedError
from worker.attention.backend import PackedChunks, PagedRows, paged_attention
from worker.attention.torch_backend import GROUP_ROWS, TorchAttention
from worker.device_memory import forget_frames
from worker.kv_storage import KEYS, VALUES, KVStorage
from worker.models.layers import Rotary, inverse_frequencies, rotary_tables

if TYPE_CHECKING:
    from worker.attention.backend import AttentionBackend

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 2, 2, 8, 4, 120
LAYER = 1
HEADS = [KV_HEADS, 3 * KV_HEADS]


@pytest.fixture(params=["torch", "numba"])
def attention(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "torch":
        return TorchAttention()
    pytest.importorskip("numba")  # a GPU's worker does without
    from worker.attention.numba_backend import NumbaAttention

    return NumbaAttention()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def filled_storage(dtype: torch.dtype = torch.float32) -> KVStorage:
    storage = KVStorage(BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype, torch.device("cpu"))
    storage.pages.copy_(torch.randn(storage.pages.shape, generator=generator()))
    return storage


def shuffled_tables(sequences: int, width: int) -> torch.Tensor:
    order = torch.randperm(BLOCKS, generator=generator())
    return order[: sequences * width].view(sequences, width)


def history(storage: KVStorage, table: torch.Tensor, length: int, what: int) -> torch.Tensor:
    """Keys or values [length, kv_heads, head_dim] of one sequence, token by token."""
    pages = storage.layer(LAYER)
    tokens = [pages[table[i // BLOCK_SIZE], what, :, i % BLOCK_SIZE] for i in range(length)]
    return torch.stack(tokens).double()


def dense(
    query: torch.Tensor, storage: KVStorage, table: torch.Tensor, length: int
) -> torch.Tensor:
    """One query [heads, head_dim] over the first `length` tokens of a table."""
    keys = history(storage, table, length, KEYS)
    values = history(storage, table, length, VALUES)
    group = query.shape[0] // KV_HEADS
    outputs = []
    for head, vector in enumerate(query.double()):
        scores = keys[:, head // group] @ vector / HEAD_DIM**0.5
        outputs.append(scores.softmax(0) @ values[:, head // group])
    return torch.stack(outputs).float()


def decode_rows(tables: torch.Tensor, lengths: list[int]) -> PagedRows:
    length = torch.tensor(lengths)
    position = (length - 1).clamp(min=0)
    return PagedRows(position, tables, torch.arange(len(lengths)), BLOCK_SIZE, length)


def packed(tables: torch.Tensor, chunks: list[tuple[int, int]]) -> PackedChunks:
    """Chunks of (start, count), chunk c over table c."""
    positions = torch.cat([torch.arange(start, start + count) for start, count in chunks])
    owners = torch.tensor([c for c, (_, count) in enumerate(chunks) for _ in range(count)])
    return PackedChunks(
        positions=positions,
        tables=tables,
        table_rows=owners,
        block_size=BLOCK_SIZE,
        chunk_rows=torch.arange(len(chunks)),
        lengths=torch.tensor([start + count for start, count in chunks]),
        bounds=(0, *accumulate(count for _, count in chunks)),
        edges=torch.tensor([0, *accumulate(count for _, count in chunks)]),
    )


@pytest.mark.parametrize("heads", HEADS)
def test_decode_equals_dense_attention_at_mixed_lengths(
    heads: int, attention: AttentionBackend
) -> None:
    storage, lengths = filled_storage(), [1, 4, 5, 12, 7]
    tables = shuffled_tables(5, 3)
    query = torch.randn(5, heads, HEAD_DIM, generator=generator())
    output = attention.decode(query, storage, LAYER, decode_rows(tables, lengths))
    for row, length in enumerate(lengths):
        expected = dense(query[row], storage, tables[row], length)
        torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_prefill_equals_dense_causal_attention_after_any_history(
    heads: int, attention: AttentionBackend
) -> None:
    storage, chunks = filled_storage(), [(0, 6), (5, 1), (3, 9), (0, 1)]
    tables = shuffled_tables(4, 3)
    metadata = packed(tables, chunks)
    query = torch.randn(17, heads, HEAD_DIM, generator=generator())
    output = attention.prefill(query, storage, LAYER, metadata)
    row = 0
    for chunk, (start, count) in enumerate(chunks):
        for position in range(start, start + count):
            expected = dense(query[row], storage, tables[chunk], position + 1)
            torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)
            row += 1


def test_padding_rows_yield_zeros_and_leave_the_others_alone(attention: AttentionBackend) -> None:
    storage = filled_storage()
    tables = shuffled_tables(3, 3)
    tables[1] = storage.scratch_block
    query = torch.randn(3, 4, HEAD_DIM, generator=generator())
    output = attention.decode(query, storage, LAYER, decode_rows(tables, [9, 0, 2]))
    assert not output[1].any()
    torch.testing.assert_close(output[0], dense(query[0], storage, tables[0], 9))
    torch.testing.assert_close(output[2], dense(query[2], storage, tables[2], 2))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
def test_nothing_beyond_a_length_is_seen(garbage: float, attention: AttentionBackend) -> None:
    lengths, tables = [5, 9, 0, 2], shuffled_tables(4, 3)
    query = torch.randn(4, 4, HEAD_DIM, generator=generator())
    clean, spoiled = filled_storage(), filled_storage()
    for row, length in enumerate(lengths):
        for position in range(length, 3 * BLOCK_SIZE):
            block = tables[row, position // BLOCK_SIZE]
            spoiled.pages[block, :, :, :, position % BLOCK_SIZE] = garbage
    spoiled.pages[spoiled.scratch_block] = garbage
    rows = decode_rows(tables, lengths)
    expected = attention.decode(query, clean, LAYER, rows)
    assert torch.equal(attention.decode(query, spoiled, LAYER, rows), expected)
    # Entries past the last page of a row may name any block, even another row's or the scratch.
    padded = torch.cat([tables, tables.flip(0), torch.full((4, 1), spoiled.scratch_block)], 1)
    wider = attention.decode(query, spoiled, LAYER, decode_rows(padded, lengths))
    torch.testing.assert_close(wider, expected)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_prefill_sees_nothing_beyond_its_chunk(garbage: float, attention: AttentionBackend) -> None:
    tables = shuffled_tables(3, 3)
    metadata = packed(tables, [(0, 5), (2, 4), (0, 3)])
    query = torch.randn(12, 4, HEAD_DIM, generator=generator())
    clean, spoiled = filled_storage(), filled_storage()
    for chunk, end in enumerate([5, 6, 3]):
        for position in range(end, 3 * BLOCK_SIZE):
            block = tables[chunk, position // BLOCK_SIZE]
            spoiled.pages[block, :, :, :, position % BLOCK_SIZE] = garbage
    expected = attention.prefill(query, clean, LAYER, metadata)
    assert torch.equal(attention.prefill(query, spoiled, LAYER, metadata), expected)


def test_an_error_that_is_kept_keeps_no_batch(attention: AttentionBackend) -> None:
    storage, tables = filled_storage(), shuffled_tables(1, 3)
    rows = decode_rows(tables, [3])
    attention.decode(torch.zeros(1, 4, HEAD_DIM), storage, LAYER, rows)
    frequencies = inverse_frequencies(10000.0, HEAD_DIM, torch.device("cpu"))
    rotary = Rotary(*rotary_tables(rows.positions, frequencies, torch.float32))
    storage.close()
    gone = weakref.ref(rows)
    with pytest.raises(ExecutorClosedError) as caught:
        paged_attention(attention, storage, rows)(LAYER, torch.zeros(1, 8, HEAD_DIM), rotary)
    del rows
    assert gone() is not None  # the error's frames have it
    forget_frames(caught.value)
    assert gone() is None


def test_a_row_alone_equals_itself_in_a_batch(attention: AttentionBackend) -> None:
    storage, lengths = filled_storage(), [1, 12, 6]
    tables = shuffled_tables(3, 3)
    query = torch.randn(3, 4, HEAD_DIM, generator=generator())
    together = attention.decode(query, storage, LAYER, decode_rows(tables, lengths))
    for i, length in enumerate(lengths):
        width = -(-length // BLOCK_SIZE)
        rows = decode_rows(tables[i : i + 1, :width], [length])
        alone = attention.decode(query[i : i + 1], storage, LAYER, rows)
        torch.testing.assert_close(alone[0], together[i], atol=1e-5, rtol=0)


def test_many_rows_are_attended_in_groups_of_like_lengths(attention: AttentionBackend) -> None:
    count = 2 * GROUP_ROWS + 3
    lengths = [(7 * row) % 13 for row in range(count)]
    storage, tables = filled_storage(), shuffled_tables(count, 3)
    query = torch.randn(count, 4, HEAD_DIM, generator=generator())
    output = attention.decode(query, storage, LAYER, decode_rows(tables, lengths))
    for row, length in enumerate(lengths):
        one = decode_rows(tables[row : row + 1], [length])
        alone = attention.decode(query[row : row + 1], storage, LAYER, one)
        torch.testing.assert_close(output[row], alone[0], atol=1e-5, rtol=0)
        assert output[row].any() == (length > 0)


def test_large_scores_do_not_overflow(attention: AttentionBackend) -> None:
    storage = filled_storage()
    tables = shuffled_tables(1, 1)
    query = torch.full((1, 2, HEAD_DIM), 1e4)
    output = attention.decode(query, storage, LAYER, decode_rows(tables, [4]))
    torch.testing.assert_close(output[0], dense(query[0], storage, tables[0], 4))


def test_bfloat16_keeps_its_dtype_and_computes_in_float32() -> None:
    storage = filled_storage(torch.bfloat16)
    tables = shuffled_tables(2, 3)
    query = torch.randn(2, 4, HEAD_DIM, generator=generator()).bfloat16()
    output = TorchAttention().decode(query, storage, LAYER, decode_rows(tables, [12, 3]))
    assert output.dtype == torch.bfloat16
    for row, length in enumerate([12, 3]):
        exact = dense(query[row], storage, tables[row], length)
        # One rounding of the result to 8 bits is all that is lost.
        torch.testing.assert_close(output[row].float(), exact, atol=1e-5, rtol=2**-8)


def test_empty_batches_are_legal(attention: AttentionBackend) -> None:
    storage, query = filled_storage(), torch.empty(0, 4, HEAD_DIM)
    none = torch.empty(0, dtype=torch.int64)
    tables = torch.empty(0, 3, dtype=torch.int64)
    rows = PagedRows(none, tables, none, BLOCK_SIZE, none)
    chunks = PackedChunks(none, tables, none, BLOCK_SIZE, none, none, torch.tensor([0]), (0,))
    assert attention.decode(query, storage, LAYER, rows).shape == query.shape
    assert attention.prefill(query, storage, LAYER, chunks).shape == query.shape


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_rows_own_kv_is_written_before_it_is_read(
    kind: str, attention: AttentionBackend
) -> None:
    storage, tables = filled_storage(), shuffled_tables(2, 2)
    metadata = decode_rows(tables, [3, 6]) if kind == "decode" else packed(tables, [(2, 1), (5, 1)])
    qkv = torch.randn(2, 3 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(9))
    frequencies = inverse_frequencies(10000.0, HEAD_DIM, torch.device("cpu"))
    rotary = Rotary(*rotary_tables(metadata.positions, frequencies, torch.float32))
    other_layer = storage.layer(0).clone()
    output = paged_attention(attention, storage, metadata)(LAYER, qkv, rotary)
    query, key, value = rotary(qkv[:, :2]), rotary(qkv[:, 2:4]), qkv[:, 4:]
    torch.testing.assert_close(history(storage, tables[0], 3, KEYS)[2].float(), key[0])
    assert torch.equal(history(storage, tables[1], 6, VALUES)[5], value[1].double())
    torch.testing.assert_close(output[0], dense(query[0], storage, tables[0], 3))
    torch.testing.assert_close(output[1], dense(query[1], storage, tables[1], 6))
    assert torch.equal(storage.layer(0), other_layer)
