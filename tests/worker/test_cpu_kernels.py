"""What Numba compiles for a CPU, beyond what every attention backend and every layer must do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from worker.attention.backend import PackedChunks, PagedRows
from worker.attention.numba_backend import NumbaAttention
from worker.attention.torch_backend import TorchAttention
from worker.cpu_kernels import pointwise, team
from worker.kv_storage import KVStorage
from worker.models.cpu_loop import CpuLoopKernels
from worker.models.layers import Rotary, inverse_frequencies, rotary_tables
from worker.models.torch_loop import TorchLoopKernels

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
EPS = 1e-6
LAYERS, LAYER = 2, 1
NO_CACHE = {
    "NUMBA_CACHE_DIR": "/proc/none",
    "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator",
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def storage_of(kv_heads: int, block_size: int, head_dim: int, blocks: int = 60) -> KVStorage:
    storage = KVStorage(blocks, LAYERS, kv_heads, block_size, head_dim, torch.float32, CPU)
    storage.pages.copy_(normal(*storage.pages.shape))
    return storage


def decoding(lengths: list[int], block_size: int, blocks: int = 60) -> PagedRows:
    width = -(-max(lengths) // block_size)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(5))
    tables = order[: len(lengths) * width].view(len(lengths), width)
    length = torch.tensor(lengths)
    return PagedRows(
        (length - 1).clamp(min=0), tables, torch.arange(len(lengths)), block_size, length
    )


def rotary_of(positions: torch.Tensor, head_dim: int) -> Rotary:
    frequencies = inverse_frequencies(10000.0, head_dim, CPU)
    return Rotary(*rotary_tables(positions, frequencies, torch.float32))


@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 10), (3, 1, 128)])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_decode_equals_torch_in_any_shape(
    rows: int, heads: int, kv_heads: int, head_dim: int, block_size: int, threads: int
) -> None:
    lengths = [1 + (5 * row) % 4 * block_size // 2 for row in range(rows)]
    mine, theirs = (storage_of(kv_heads, block_size, head_dim) for _ in range(2))
    metadata = decoding(lengths, block_size)
    rotary = rotary_of(metadata.positions, head_dim)
    qkv = normal(rows, heads + 2 * kv_heads, head_dim)
    found = NumbaAttention().attend(LAYER, qkv, rotary, mine, metadata)
    expected = TorchAttention().attend(LAYER, qkv, rotary, theirs, metadata)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(mine.pages, theirs.pages, atol=2e-6, rtol=2e-6)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_chunk(threads: int) -> None:
    lengths, size = [3, 17, 9, 30, 1, 22, 5, 8, 40, 2], 4
    storage, metadata = storage_of(2, size, 16, blocks=100), decoding(lengths, size, blocks=100)
    attention, query = NumbaAttention(), normal(len(lengths), 4, 16)
    together = attention.decode(query, storage, LAYER, metadata)
    for row, length in enumerate(lengths):
        one = PagedRows(
            metadata.positions[row : row + 1],
            metadata.tables,
            torch.tensor([row]),
            size,
            torch.tensor([length]),
        )
        assert torch.equal(
            attention.decode(query[row : row + 1], storage, LAYER, one)[0], together[row]
        )
        last = PackedChunks(
            positions=one.positions,
            tables=one.tables,
            table_rows=one.table_rows,
            block_size=size,
            chunk_rows=one.table_rows,
            lengths=one.lengths,
            edges=torch.tensor([0, 1]),
            bounds=(0, 1),
        )
        assert torch.equal(
            attention.prefill(query[row : row + 1], storage, LAYER, last)[0], together[row]
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_no_number_is_not_lost(part: int, bad: float) -> None:
    storage, metadata = storage_of(2, 4, 8), decoding([9, 9], 4)
    storage.pages[metadata.tables[1, 1], LAYER, part, 0, 2, 3] = bad
    output = NumbaAttention().decode(normal(2, 2, 8), storage, LAYER, metadata)
    assert output[0].isfinite().all()
    assert output[1, 1].isfinite().all()
    assert not output[1, 0].isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 33, 300])
@pytest.mark.parametrize(("hidden", "width"), [(256, 704), (24, 40)])
def test_layers_equal_torch(rows: int, hidden: int, width: int, threads: int) -> None:
    ours, plain = CpuLoopKernels(), TorchLoopKernels()
    x, branch, wide = normal(rows, hidden), normal(rows, hidden, seed=1), normal(rows, width)
    first, second = (1.0 + 0.1 * normal(hidden, seed=seed) for seed in (2, 3))
    up, down = normal(2 * width, hidden) * hidden**-0.5, normal(hidden, width) * width**-0.5

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    close(ours.norm(x, first, EPS), plain.norm(x, first, EPS))
    for found, expected in zip(
        ours.residual_norm(x, branch, first, second, EPS),
        plain.residual_norm(x, branch, first, second, EPS),
        strict=True,
    ):
        close(found, expected)
    close(ours.linear(x, ours.packed(up)), plain.linear(x, up))
    close(ours.gated(x, ours.packed(up)), plain.gated(x, up))
    close(ours.branch(wide, ours.packed(down)), plain.branch(wide, down))
    close(ours.head(x, ours.packed(up), None), plain.head(x, up, None))


def test_a_product_has_the_same_bits_whatever_else_is_in_its_batch() -> None:
    kernels, x = CpuLoopKernels(), normal(40, 256)
    weight = kernels.packed(normal(768, 256))
    together = kernels.linear(x, weight)
    for count in (1, 2, 5, 17):
        assert torch.equal(kernels.linear(x[:count], weight), together[:count])


def test_norms_take_rows_that_do_not_lie_side_by_side() -> None:
    x, weight = normal(5, 16).T[:8], 1.0 + normal(5)
    assert not x.is_contiguous()
    plain = TorchLoopKernels()
    torch.testing.assert_close(pointwise.norm(x, weight, EPS), plain.norm(x, weight, EPS))
    found, expected = (
        kernels.residual_norm(x, x, weight, weight, EPS) for kernels in (CpuLoopKernels(), plain)
    )
    torch.testing.assert_close(found, expected)


def test_one_thread_does_all_where_there_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, metadata = storage_of(2, 4, 8), decoding([9, 5, 3, 1, 7, 2, 8, 6, 4], 4)
    query = normal(9, 2, 8)
    with_team = NumbaAttention().decode(query, storage, LAYER, metadata)
    monkeypatch.setattr(team, "_RUNTIME", None)
    assert torch.equal(NumbaAttention().decode(query, storage, LAYER, metadata), with_team)


def test_kernels_serve_where_nothing_can_be_cached() -> None:
    program = (
        "import logging; logging.basicConfig();"
        "import torch; from worker.cpu_kernels.pointwise import norm;"
        "print(norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | NO_CACHE,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "0.8485" in done.stdout
    assert "kernels are compiled anew in each process" in done.stderr


def test_tables_may_lie_in_any_order() -> None:
    storage, metadata = storage_of(2, 4, 8), decoding([9, 5, 12], 4)
    turned = replace(metadata, tables=metadata.tables.T.contiguous().T)
    assert turned.tables.stride(1) != 1
    query = normal(3, 2, 8)
    expected = NumbaAttention().decode(query, storage, LAYER, metadata)
    assert torch.equal(NumbaAttention().decode(query, storage, LAYER, turned), expected)
