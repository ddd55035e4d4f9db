"""The kernels that sample against the formulas in torch: the same ids, the same bits of chance."""

from __future__ import annotations

import pytest
import torch

from protocol.rng import Purpose
from worker.sampling.adjustments import AdjustmentNeeds, LogitAdjuster
from worker.sampling.logprobs import token_logprobs
from worker.sampling.philox import uniform
from worker.sampling.sampler import greedy, sample

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 48


def test_uniforms_have_the_bits_of_the_definition() -> None:
    pick = torch.Generator().manual_seed(1)
    rng = torch.randint(0, 2**32, (ROWS, 3), generator=pick)
    indices = torch.randint(0, 2**40, (ROWS,), generator=pick)
    indices[:3] = torch.tensor([0, 1, 2**32])
    for purpose in Purpose:
        expected = uniform(rng, purpose, indices)
        found = uniform(rng.to(DEVICE), purpose, indices.to(DEVICE))
        assert torch.equal(found.cpu(), expected)
    assert len(uniform(rng[:0].to(DEVICE), Purpose.SAMPLE, indices[:0].to(DEVICE))) == 0


def peculiar(rows: int, vocabulary: int) -> torch.Tensor:
    """Logits with ties, zeros of both signs, infinities, and rows that have no distribution."""
    pick = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=pick) * 3
    logits[1] = (logits[1] * 2).round() / 2
    logits[2] = (logits[2] / 3).round() * -0.0
    logits[3, ::2] = float("-inf")
    logits[4] = float("-inf")
    logits[5, vocabulary // 2] = float("inf")
    logits[6, vocabulary // 3 :: 2] = float("nan")
    logits[7] = float("nan")
    logits[8] = logits[8].abs().neg()
    return logits


@pytest.mark.parametrize("vocabulary", [5, 4096, 5000, 49_152])
def test_the_largest_logit_is_torch_s(vocabulary: int) -> None:
    from worker.kernels.sampler import greedy

    logits = peculiar(ROWS, vocabulary)
    tokens, largest, broken = (each.cpu() for each in greedy(logits.to(DEVICE)))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(broken, logits.isnan().any(-1))
    assert torch.equal(largest[~broken], logits.amax(-1)[~broken])


@pytest.mark.parametrize("vocabulary", [5, 4096, 5000, 49_152])
@pytest.mark.parametrize("top_k", [-1, 1, 7, 4096])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_ids_equal_those_of_the_formulas(vocabulary: int, top_k: int, top_p: float) -> None:
    logits = peculiar(ROWS, vocabulary)
    pick = torch.Generator().manual_seed(top_k + 2)
    heats = torch.tensor([0.0, 0.3, 1.0, 1.7, 1e6, 1e-6])
    temperature = heats[torch.randint(0, 6, (ROWS,), generator=pick)]
    temperature[:9] = 0.8
    mixed = torch.rand(ROWS, generator=pick) < 0.8
    top_ps = torch.where(mixed, top_p, 1.0)
    top_ks = torch.where(mixed.flip(0), top_k, -1)
    uniforms = torch.rand(ROWS, generator=pick, dtype=torch.float64)
    uniforms[9:11] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    expected = sample(logits, temperature, top_ps, top_ks, uniforms)
    on_device = (each.to(DEVICE) for each in (logits, temperature, top_ps, top_ks, uniforms))
    found = sample(*on_device)
    assert found.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 4


def test_an_adjusted_view_is_sampled_as_it_lies() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    for same in (logits.T.to(DEVICE), logits.to(DEVICE).T):
        none = torch.zeros(8, device=DEVICE)
        ids = sample(same, none, none + 1, none.long() - 1, none.double())
        assert ids.tolist() == greedy(same).tolist() == logits.T.argmax(-1).tolist()


@pytest.mark.parametrize("vocabulary", [5, 4096, 5000, 49_152])
def test_adjustments_have_the_bits_of_the_formulas(vocabulary: int) -> None:
    pick = torch.Generator().manual_seed(vocabulary)
    slots, logits = ROWS + 1, peculiar(ROWS, vocabulary)
    ours, plain = (
        LogitAdjuster(slots, vocabulary, device) for device in (DEVICE, torch.device("cpu"))
    )
    plain.bias.copy_(torch.randn(slots, vocabulary, generator=pick))
    plain.counts.copy_(torch.randint(0, 4, (slots, vocabulary), generator=pick))
    plain.marks.copy_(torch.randint(0, 4, (slots, vocabulary), generator=pick))
    choices = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.0, 0.0], [0.7, 0.7, -0.3], [1.0, 0.0, 1.7]])
    plain.penalties.copy_(choices[torch.randint(0, 4, (slots,), generator=pick)])
    plain.bias[::3] = 0.0
    for name in ("bias", "counts", "marks", "penalties"):
        getattr(ours, name).copy_(getattr(plain, name))
    seats = torch.randperm(slots, generator=pick)[:ROWS]
    early = torch.rand(ROWS, generator=pick) < 0.5
    needs = AdjustmentNeeds(biased=True, penalized=True, banned=True)
    expected = plain.adjust_seats(logits, seats, early, needs)
    found = ours.adjust_seats(logits.to(DEVICE), seats.to(DEVICE), early.to(DEVICE), needs).cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    same = (found == expected) | expected.isnan()
    assert bool(same.all())
    nothing = AdjustmentNeeds(biased=False, penalized=False, banned=False)
    assert ours.adjust_seats(found, seats, early, nothing) is found


@pytest.mark.parametrize("vocabulary", [5, 4096, 5000, 49_152])
@pytest.mark.parametrize("alternatives", [True, False])
def test_logprobs_are_those_of_the_formulas(vocabulary: int, alternatives: bool) -> None:
    logits = peculiar(ROWS, vocabulary)
    logits[9, 4096:] = float("-inf")
    tokens = torch.randint(0, vocabulary, (ROWS,), generator=torch.Generator().manual_seed(2))
    exact = token_logprobs(logits, tokens, alternatives=alternatives)
    told = token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), alternatives=alternatives)
    numbers = ~logits.isnan().any(-1)
    assert told.top_ids.shape == exact.top_ids.shape
    assert torch.equal(told.top_ids.cpu()[numbers], exact.top_ids[numbers])
    torch.testing.assert_close(told.sampled.cpu(), exact.sampled, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(told.top.cpu()[numbers], exact.top[numbers], atol=2e-5, rtol=1e-6)
    assert bool((told.top.cpu()[~numbers] == float("-inf")).all())
