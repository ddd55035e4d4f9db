"""The Triton attention against float64, and against the torch one bit by bit of its contract."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch

from worker.attention.backend import PackedChunks, PagedRows
from worker.attention.torch_backend import TorchAttention
from worker.kv_storage import KVStorage
from worker.models.layers import Rotary, inverse_frequencies, rotary_tables

if TYPE_CHECKING:
    from torch import Tensor

    from worker.attention.triton_backend import TritonAttention

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, LAYER, PLANES = 2, 1, 3
SHAPES = [(16, 16, 128), (4, 4, 64), (8, 2, 128), (4, 2, 8), (6, 2, 96)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 0, 100, 129, 511, 0, 1024, 1025, 2049]


def attention(shape: tuple[int, int, int], rows: int = 32) -> TritonAttention:
    from worker.attention.triton_backend import TritonAttention

    return TritonAttention(*shape, rows, DEVICE)


class Case:
    """Random pages, NaN wherever no row may look. Owner: one test, which alone uses it."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        lengths: list[int],
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = shape
        self.dtype, self.lengths, self.block_size = dtype, lengths, block_size
        self.random = torch.Generator().manual_seed(seed)
        width = -(-max(*lengths, 1) // block_size) + 1
        sequences = len(lengths)
        blocks = sequences * PLANES * width
        self.storage = KVStorage(
            blocks, LAYERS, self.kv_heads, block_size, self.head_dim, dtype, DEVICE
        )
        order = torch.randperm(blocks, generator=self.random)
        self.tables = order.view(sequences * PLANES, width).to(DEVICE)
        planes = torch.randint(PLANES, (sequences,), generator=self.random)
        self.table_rows = (torch.arange(sequences) * PLANES + planes).to(DEVICE)
        self.keys, self.values = (
            [self.normal(length, self.kv_heads, self.head_dim) for length in lengths]
            for _ in range(2)
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype).to(DEVICE)

    def fill(self, shorter: int = 0) -> None:
        """Write every history but its last `shorter` tokens; all the rest is poison."""
        self.storage.pages.fill_(float("nan"))
        for row, length in enumerate(self.lengths):
            position = torch.arange(max(length - shorter, 0), device=DEVICE)
            block = self.tables[self.table_rows[row], position // self.block_size]
            self.storage.write(
                LAYER,
                block,
                position % self.block_size,
                self.keys[row][: len(position)],
                self.values[row][: len(position)],
            )

    def rows(self) -> PagedRows:
        length = torch.tensor(self.lengths, device=DEVICE)
        position = (length - 1).clamp(min=0)
        return PagedRows(position, self.tables, self.table_rows, self.block_size, length)

    def exact(self, row: int, query: Tensor, length: int) -> Tensor:
        """Dense attention of one query [heads, head_dim] in float64."""
        group = self.heads // self.kv_heads
        keys, values = (
            x[row][:length].double().repeat_interleave(group, 1) for x in (self.keys, self.values)
        )
        scores = torch.einsum("hd,thd->ht", query.double(), keys) / self.head_dim**0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def error(ours: Tensor, exact: Tensor) -> float:
    """Relative error in the norm; NaN stays NaN."""
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("copies", [1, 8])
def test_decode_equals_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, block_size: int, copies: int
) -> None:
    # More rows mean fewer splits of each.
    case = Case(shape, dtype, LENGTHS * copies, block_size)
    case.fill()
    query = case.normal(len(case.lengths), case.heads, case.head_dim)
    backend = attention(shape, len(case.lengths))
    output = backend.decode(query, case.storage, LAYER, case.rows())
    assert output.dtype == dtype
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert not output[row].any()
        else:
            assert error(output[row], case.exact(row, query[row], length)) < TOLERANCE[dtype]
    again = backend.decode(query, case.storage, LAYER, case.rows())
    assert torch.equal(output, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_kv_write_equal_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    ours, theirs = (Case(shape, dtype, LENGTHS) for _ in range(2))
    for case in (ours, theirs):
        case.fill(shorter=1)
    qkv = ours.normal(len(LENGTHS), ours.heads + 2 * ours.kv_heads, ours.head_dim)
    rows = ours.rows()
    frequencies = inverse_frequencies(10000.0, ours.head_dim, DEVICE)
    rotary = Rotary(*rotary_tables(rows.positions, frequencies, dtype))
    backend = attention(shape)
    output = backend.attend(LAYER, qkv, rotary, ours.storage, rows)
    # A padding row of the torch backend writes where its table says: give it a block of its own.
    own = torch.where(rows.lengths > 0, rows.blocks, theirs.storage.scratch_block)
    reference = PagedRows(rows.positions, rows.tables, rows.table_rows, 16, rows.lengths)
    vars(reference)["blocks"] = own
    expected = TorchAttention().attend(LAYER, qkv, rotary, theirs.storage, reference)
    assert error(output, expected.double()) < TOLERANCE[dtype]
    pages, exact = ours.storage.pages[:-1], theirs.storage.pages[:-1]
    assert torch.equal(pages.isnan(), exact.isnan())
    near = ROUNDING[dtype]
    torch.testing.assert_close(pages, exact, equal_nan=True, atol=near, rtol=near)
    assert bool(ours.storage.pages[-1].isnan().all()), "nothing is written for padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_prefill_equals_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    chunks = [(0, 1), (0, 17), (5, 130), (300, 64), (1000, 25)]
    lengths = [start + count for start, count in chunks]
    case = Case(shape, dtype, lengths)
    case.fill()
    bounds = (0, *accumulate(count for _, count in chunks))
    positions = torch.cat([torch.arange(start, start + count) for start, count in chunks])
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    metadata = PackedChunks(
        positions=positions.to(DEVICE),
        tables=case.tables,
        table_rows=none,
        block_size=16,
        chunk_rows=case.table_rows,
        lengths=torch.tensor(lengths, device=DEVICE),
        bounds=bounds,
        edges=torch.tensor(bounds, device=DEVICE),
    )
    query = case.normal(bounds[-1], case.heads, case.head_dim)
    backend = attention(shape)
    output = backend.prefill(query, case.storage, LAYER, metadata)
    for chunk, (start, count) in enumerate(chunks):
        for row in {0, count // 2, count - 1}:
            exact = case.exact(chunk, query[bounds[chunk] + row], start + row + 1)
            assert error(output[bounds[chunk] + row], exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_writes_what_torch_writes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [20, 33]
    ours, theirs = (Case(shape, dtype, lengths) for _ in range(2))
    for case in (ours, theirs):
        case.fill(shorter=9)
    positions = torch.cat([torch.arange(length - 9, length) for length in lengths]).to(DEVICE)
    owners = torch.arange(2, device=DEVICE).repeat_interleave(9)
    metadata = PackedChunks(
        positions=positions,
        tables=ours.tables,
        table_rows=ours.table_rows[owners],
        block_size=16,
        chunk_rows=ours.table_rows,
        lengths=torch.tensor(lengths, device=DEVICE),
        bounds=(0, 9, 18),
        edges=torch.tensor([0, 9, 18], device=DEVICE),
    )
    qkv = ours.normal(18, ours.heads + 2 * ours.kv_heads, ours.head_dim)
    frequencies = inverse_frequencies(10000.0, ours.head_dim, DEVICE)
    rotary = Rotary(*rotary_tables(positions, frequencies, dtype))
    backend = attention(shape)
    output = backend.attend(LAYER, qkv, rotary, ours.storage, metadata)
    expected = TorchAttention().attend(LAYER, qkv, rotary, theirs.storage, metadata)
    assert error(output, expected.double()) < TOLERANCE[dtype]
    near, pages, exact = ROUNDING[dtype], ours.storage.pages, theirs.storage.pages
    torch.testing.assert_close(pages, exact, equal_nan=True, atol=near, rtol=near)


@pytest.mark.parametrize(("longest", "block_size"), [(200, 16), (900, 16), (900, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_over_history_equal_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, longest: int, block_size: int
) -> None:
    # Few tokens and many are read in different ways, see MAPPED_TOKENS.
    # Own tokens in several tiles, history that ends inside one, empty chunks and padding rows
    # behind the last, as in a graph; what they hold must not show.
    chunks, empty, padding = [(0, longest), (70, 65), (300, 64), (9, 1), (128, 129)], 3, 5
    starts, counts = zip(*chunks, strict=True)
    lengths = [start + count for start, count in chunks]
    ours, theirs = (Case(shape, dtype, lengths, block_size) for _ in range(2))
    for case in (ours, theirs):
        case.storage.pages.fill_(float("nan"))
        for row, start in enumerate(starts):
            position = torch.arange(start, device=DEVICE)
            block = case.tables[case.table_rows[row], position // block_size]
            keys, values = case.keys[row][:start], case.values[row][:start]
            case.storage.write(LAYER, block, position % block_size, keys, values)
    total, trash = sum(counts), ours.storage.scratch_block
    tables = torch.cat([ours.tables, torch.full_like(ours.tables[:1], trash)])
    owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    positions = torch.cat([torch.arange(*span) for span in zip(starts, lengths, strict=True)])
    nowhere = torch.full((padding,), len(tables) - 1, device=DEVICE)
    bounds = (0, *accumulate(counts))
    padded = PackedChunks(
        positions=torch.cat([positions, torch.zeros(padding, dtype=torch.int64)]).to(DEVICE),
        tables=tables,
        table_rows=torch.cat([ours.table_rows[owners], nowhere]),
        block_size=block_size,
        chunk_rows=torch.cat([ours.table_rows, nowhere[:empty]]),
        lengths=torch.tensor(lengths + [0] * empty, device=DEVICE),
        bounds=(),
        edges=torch.tensor(bounds + (total,) * empty, device=DEVICE),
    )
    exact = PackedChunks(
        positions=positions.to(DEVICE),
        tables=tables,
        table_rows=ours.table_rows[owners],
        block_size=block_size,
        chunk_rows=ours.table_rows,
        lengths=torch.tensor(lengths, device=DEVICE),
        bounds=bounds,
        edges=torch.tensor(bounds, device=DEVICE),
    )
    qkv = ours.normal(total + padding, ours.heads + 2 * ours.kv_heads, ours.head_dim)
    qkv[total:] = float("nan")
    frequencies = inverse_frequencies(10000.0, ours.head_dim, DEVICE)
    rotary = Rotary(*rotary_tables(padded.positions, frequencies, dtype))
    own = Rotary(rotary.cosine[:total], rotary.sine[:total])
    output = attention(shape).attend(LAYER, qkv, rotary, ours.storage, padded)
    expected = TorchAttention().attend(LAYER, qkv[:total], own, theirs.storage, exact)
    assert error(output[:total], expected.double()) < TOLERANCE[dtype]
    near, pages, written = ROUNDING[dtype], ours.storage.pages[:-1], theirs.storage.pages[:-1]
    torch.testing.assert_close(pages, written, equal_nan=True, atol=near, rtol=near)
