"""Pages: where bytes go, what a copy touches, and the end of their life."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import ExecutorClosedError
from worker.kv_storage import KEYS, VALUES, KVStorage

BLOCKS, LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 5, 3, 2, 4, 6


@pytest.fixture
def storage() -> KVStorage:
    return KVStorage(
        BLOCKS, LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM, torch.float32, torch.device("cpu")
    )


def rows(count: int, start: float = 1.0) -> torch.Tensor:
    size = count * HEADS * HEAD_DIM
    return torch.arange(start, start + size).view(count, HEADS, HEAD_DIM)


def test_there_is_one_scratch_block_beyond_the_usable_ones(storage: KVStorage) -> None:
    assert storage.scratch_block == BLOCKS
    assert storage.pages.shape == (BLOCKS + 1, LAYERS, 2, HEADS, BLOCK_SIZE, HEAD_DIM)


def test_a_head_of_a_page_is_contiguous(storage: KVStorage) -> None:
    assert storage.layer(1)[2, KEYS, 1].is_contiguous()


def test_a_write_lands_at_its_addresses_and_nowhere_else(storage: KVStorage) -> None:
    key, value = rows(3), rows(3, start=100.0)
    storage.write(1, torch.tensor([4, 0, 4]), torch.tensor([3, 2, 0]), key, value)
    expected = torch.zeros_like(storage.pages)
    for row, (block, offset) in enumerate([(4, 3), (0, 2), (4, 0)]):
        expected[block, 1, KEYS, :, offset] = key[row]
        expected[block, 1, VALUES, :, offset] = value[row]
    assert torch.equal(storage.pages, expected)


def test_padding_rows_share_the_scratch_block(storage: KVStorage) -> None:
    scratch = torch.full((2,), storage.scratch_block)
    storage.write(0, scratch, torch.zeros(2, dtype=torch.int64), rows(2), rows(2))
    assert not storage.pages[:BLOCKS].any()


def test_a_copy_moves_single_tokens_of_all_layers(storage: KVStorage) -> None:
    storage.pages.copy_(torch.randn(storage.pages.shape, generator=torch.Generator()))
    expected = storage.pages.clone()
    # One source to two targets, and another pair at another offset.
    moves = [(0, 1, 2), (0, 3, 2), (4, 2, 0)]
    for source, target, offset in moves:
        expected[target, :, :, :, offset] = expected[source, :, :, :, offset].clone()
    sources, targets, offsets = torch.tensor(moves).unbind(1)
    storage.copy_tokens(sources, targets, offsets)
    assert torch.equal(storage.pages, expected)


def test_an_empty_copy_changes_nothing(storage: KVStorage) -> None:
    none = torch.empty(0, dtype=torch.int64)
    storage.copy_tokens(none, none, none)
    assert not storage.pages.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_block_is_what_a_block_takes(dtype: torch.dtype) -> None:
    storage = KVStorage(7, LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM, dtype, torch.device("cpu"))
    size = KVStorage.bytes_per_block(LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM, dtype)
    assert storage.pages.nbytes == 8 * size


def test_bytes_per_block_of_the_documented_example() -> None:
    assert KVStorage.bytes_per_block(4, 4, 16, 64, torch.float32) == 131_072


def test_a_closed_storage_refuses_work_and_closes_twice(storage: KVStorage) -> None:
    storage.close()
    storage.close()
    assert repr(storage) == "KVStorage(closed)"
    with pytest.raises(ExecutorClosedError, match="closed"):
        storage.layer(0)
