"""The finalize kernel against its definition, cell by cell."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLANES, WIDTH, BLOCK_SIZE, LAYERS, HEADS = 4, 3, 16, 3, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_it_copies_the_exit_plane_into_deeper_ones_and_nothing_else(
    head_dim: int, dtype: torch.dtype
) -> None:
    from worker.kernels.finalize import finalize

    slots, trash = 9, 8
    generator = torch.Generator().manual_seed(head_dim)
    blocks = slots * PLANES * WIDTH
    pages = torch.randn(blocks, LAYERS, 2, HEADS, BLOCK_SIZE, head_dim, generator=generator)
    pages = pages.to(dtype)
    tables = torch.randperm(blocks, generator=generator).view(slots, PLANES, WIDTH)
    position = torch.randint(0, WIDTH * BLOCK_SIZE, (slots,), generator=generator)
    loops = torch.tensor([1, 2, 3, 4, 1, 2, 0, 3, 1])
    seats = torch.tensor([5, trash, 0, 3, 6, trash, 1, 7])
    expected = pages.clone()
    for slot in seats.tolist():
        if slot == trash or loops[slot] == 0:
            continue
        page, offset = divmod(int(position[slot]), BLOCK_SIZE)
        source = pages[tables[slot, loops[slot] - 1, page], :, :, :, offset]
        for plane in range(int(loops[slot]), PLANES):
            expected[tables[slot, plane, page], :, :, :, offset] = source
    on_device = pages.to(DEVICE)
    finalize(
        seats.to(DEVICE),
        position.to(DEVICE),
        loops.to(DEVICE),
        tables.to(DEVICE),
        on_device,
        trash,
    )
    assert torch.equal(on_device.cpu(), expected)
