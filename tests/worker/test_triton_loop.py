"""The kernels between the attentions against the torch formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from worker.models.torch_loop import TorchLoopKernels

if TYPE_CHECKING:
    from worker.models.loop_kernels import LoopKernels

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
ROWS = [1, 2, 3, 8, 17, 33, 64, 100, 130, 2500]
SIZES = [(2048, 5632), (256, 704), (24, 40)]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


def triton_kernels() -> LoopKernels:
    from worker.models.triton_loop import TritonLoopKernels

    return TritonLoopKernels()


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).to(DEVICE)


def weight(out: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    values: torch.Tensor = normal(out, inner, dtype=torch.float32) * inner**-0.5
    return values.to(dtype)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_products_equal_float64(rows: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    kernels = triton_kernels()
    x, wide = normal(rows, hidden, dtype=dtype), normal(rows, width, dtype=dtype)
    up = weight(2 * width, hidden, dtype)
    exact = x.double() @ up.double().T
    assert error(kernels.linear(x, up), exact) < TOLERANCE[dtype]
    gate, linear = exact.chunk(2, 1)
    expected = gate * gate.sigmoid() * linear
    assert error(kernels.gated(x, up), expected) < 2 * TOLERANCE[dtype]
    down = weight(hidden, width, dtype)
    branch = kernels.branch(wide, down)
    whole = branch if branch.dim() == 2 else branch.sum(0)
    assert error(whole, wide.double() @ down.double().T) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [(1, [1]), (1024, [1024]), (2047, [2047]), (2048, [1024, 1024]), (3500, [1024, 1024, 1452])],
)
def test_many_rows_are_multiplied_in_blocks(rows: int, blocks: list[int]) -> None:
    from worker.models.triton_loop import row_blocks

    assert row_blocks(rows) == blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [2048, 256, 24])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_norms_equal_torch(parts: int, hidden: int, dtype: torch.dtype) -> None:
    kernels, torch_kernels = triton_kernels(), TorchLoopKernels()
    x = normal(5, hidden, dtype=dtype)
    weights = [1.0 + 0.1 * normal(hidden, dtype=torch.float32, seed=s) for s in range(2)]
    first, second = (w.to(dtype) for w in weights)
    assert error(kernels.norm(x, first, EPS), torch_kernels.norm(x, first, EPS)) < TOLERANCE[dtype]
    shape = (parts, 5, hidden) if parts else (5, hidden)
    branch = normal(*shape, dtype=torch.float32 if parts else dtype, seed=7)
    whole = branch.sum(0).to(dtype) if parts else branch
    for ours, exact in zip(
        kernels.residual_norm(x, branch, first, second, EPS),
        torch_kernels.residual_norm(x, whole, first, second, EPS),
        strict=True,
    ):
        assert error(ours, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hazards_equal_torch(dtype: torch.dtype) -> None:
    hidden, gate = normal(9, 2048, dtype=dtype), weight(1, 2048, dtype)
    bias = normal(1, dtype=dtype)
    ours = triton_kernels().hazards(hidden, gate, bias)
    exact = TorchLoopKernels().hazards(hidden, gate, bias)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "vocabulary"), [(2048, 5000), (256, 4096), (24, 97)])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_rounded_products(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype
) -> None:
    x, head = normal(rows, hidden, dtype=dtype), weight(vocabulary, hidden, dtype)
    wanted = torch.ones(1, dtype=torch.int32, device=DEVICE)
    exact = x.double() @ head.double().T
    for asked in (wanted, None):
        logits = triton_kernels().head(x, head, asked)
        assert logits.dtype == torch.float32
        assert torch.equal(logits.to(dtype).float(), logits)
        assert error(logits, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_logits_that_nobody_wants_are_not_computed(rows: int) -> None:
    x = normal(rows, 2048, dtype=torch.bfloat16)
    head = weight(5000, 2048, torch.bfloat16)
    nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = []
    for wanted in (nobody, nobody + 1):
        # The output takes the place of this, since nothing else has asked for as much.
        mark = torch.full((rows, 5000), 7.0, device=DEVICE)
        place = mark.data_ptr()
        del mark
        logits = triton_kernels().head(x, head, wanted)
        assert logits.data_ptr() == place
        found.append(bool((logits == 7.0).all()))
    assert found == [True, False]
