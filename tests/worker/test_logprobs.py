"""Log probabilities against the definition, with ties, impossible tokens and broken rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.plan import NO_LOGPROBS
from protocol.result import TokenLogprobs
from protocol.sampling import MAX_LOGPROBS
from worker.outcome import read_logprobs
from worker.readback import ReadbackPool
from worker.sampling.logprobs import token_logprobs

NEG_INF = float("-inf")
CPU = torch.device("cpu")
values = st.one_of(st.floats(-30.0, 30.0, width=32), st.sampled_from([0.0, -0.0, 1.0, NEG_INF]))


@given(st.lists(values, min_size=1, max_size=30).filter(lambda row: max(row) > NEG_INF), st.data())
@settings(deadline=None)
def test_a_row_agrees_with_the_definition(row: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    told = token_logprobs(torch.tensor([row]), torch.tensor([token]), alternatives=True)
    largest = max(row)
    total = math.log(math.fsum(math.exp(value - largest) for value in row))
    dense = [value - largest - total for value in row]
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:MAX_LOGPROBS]
    assert told.top_ids[0].tolist() == order
    close = torch.testing.assert_close
    close(told.sampled[0], torch.tensor(dense[token]), atol=1e-5, rtol=0)
    close(told.top[0], torch.tensor([dense[index] for index in order]), atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(9, 4096, generator=torch.Generator().manual_seed(3)) * 4
    tokens = torch.arange(9) * 7
    together = token_logprobs(logits, tokens, alternatives=True)
    for row in range(9):
        alone = token_logprobs(logits[row : row + 1], tokens[row : row + 1], alternatives=True)
        assert torch.equal(alone.sampled[0], together.sampled[row])
        assert torch.equal(alone.top_ids[0], together.top_ids[row])
        assert torch.equal(alone.top[0], together.top[row])


def test_a_row_without_a_distribution_tells_minus_infinity() -> None:
    rows = torch.tensor([[NEG_INF, NEG_INF], [math.nan, 1.0], [math.inf, 1.0]])
    told = token_logprobs(rows, torch.tensor([0, 0, 0]), alternatives=True)
    assert told.sampled.tolist() == [NEG_INF] * 3
    assert not told.top.isnan().any()


def test_without_alternatives_there_are_none() -> None:
    told = token_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), alternatives=False)
    assert told.top_ids.shape == told.top.shape == (2, 0)
    torch.testing.assert_close(told.sampled, torch.full((2,), math.log(0.25)))


def test_rows_come_back_ragged_through_one_lease() -> None:
    """Two CODA steps of one plan share the lease; a reused lease starts anew."""
    pool = ReadbackPool(1, 4, CPU)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(2, 1)
    for _ in range(2):
        lease = pool.lease()
        first = lease.put_logprobs(token_logprobs(logits, torch.tensor([1, 2]), alternatives=True))
        second = lease.put_logprobs(
            token_logprobs(logits.flip(1), torch.tensor([0, 3]), alternatives=False)
        )
        a, nothing, b = read_logprobs(first, [2, NO_LOGPROBS, 0])
        c, d = read_logprobs(second, [0, 0])
        pool.give_back(lease)
        assert nothing is None
        assert isinstance(a, TokenLogprobs)
        assert a.top_ids == (1, 2)
        assert a.top_logprobs == tuple(first.top[0, :2].tolist())
        assert a.logprob == a.top_logprobs[0]
        assert b == TokenLogprobs(first.top[1, 1].item())
        assert c is not None
        assert c.logprob == pytest.approx(first.top[0, 2].item())
        assert d is not None
        assert d.logprob == pytest.approx(first.top[0, 3].item())
    assert read_logprobs(None, [NO_LOGPROBS]) == []
